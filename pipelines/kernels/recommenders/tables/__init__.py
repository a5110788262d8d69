"""Quantized embedding tables: rows of 8, 4 or 2 bits with a scale and a bias each, and embedding bags of them."""
