"""Readers of texts and of text pairs, tokenization, and writers of embeddings."""
