"""The encoder-decoder Transformer: configuration, layers and network in torch."""
