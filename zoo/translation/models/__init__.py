"""The encoder-decoder Transformer: its configuration, its network in torch, and checkpoints."""
