"""Parallel text and vocabularies: files read line by line, cleaned, tokenized and batched."""
