"""Kernels of an encoder-decoder Transformer in int8: programs of layers over registers, KV caches, beam search with
continuous batching.
"""
