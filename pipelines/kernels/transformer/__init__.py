"""Kernels of an int8 encoder-decoder Transformer.

Programs of layers over registers, KV caches, and beam search with continuous batching.
"""
