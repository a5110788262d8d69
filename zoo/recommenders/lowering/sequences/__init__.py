"""Sequences in the float graph of a recommender: target attention, and small transformers."""
