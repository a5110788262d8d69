"""BERT-shaped networks: configuration, weights and pipelines of sentence encoders and cross-encoders."""
