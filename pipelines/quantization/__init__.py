"""Post-training quantization to QDQ int8: calibration, the quantizer's passes and its algorithms; quantization-aware
training by the same rules.

Imports `core`, `graph` and `rewrites`.
"""
