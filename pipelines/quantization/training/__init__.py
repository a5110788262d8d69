"""Quantization-aware training by the rules of the quantizer."""
