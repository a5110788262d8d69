"""Importer of sentence encoders and cross-encoders from Hugging Face folders."""
