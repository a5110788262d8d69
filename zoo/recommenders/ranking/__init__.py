"""Ranking: one user and many candidate items."""
