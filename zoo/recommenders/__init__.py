"""Recommenders: click logs (`data`), training, pruning, import of third-party rankers, lowering and inference.

All families of recommenders share this package; it imports `pipelines` and no family.
"""
