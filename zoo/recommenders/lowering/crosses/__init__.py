"""Lowering of cross networks."""
