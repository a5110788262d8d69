"""Texts and pairs of texts from files, tokenization, and files of embeddings."""
