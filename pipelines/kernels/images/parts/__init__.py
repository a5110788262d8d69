"""Quantized graphs in parts: native regions, and operators without a native form between them."""
