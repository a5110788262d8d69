"""BERT-shaped networks: configuration, and weights under the names of several architectures."""
