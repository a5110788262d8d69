"""Translation by a Transformer (Vaswani et al. 2017, "Attention Is All You Need")."""
