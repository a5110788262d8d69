"""Hugging Face folders to model folders."""
