"""Ranking networks in torch, one file a family, built on `layers`."""
