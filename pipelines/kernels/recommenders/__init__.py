"""Kernels of click models: rows of text to arrays, embedding tables folded with the first layer, int8 fully connected
layers.
"""
