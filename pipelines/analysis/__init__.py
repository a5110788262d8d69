"""Measurements of quantized models: reports, metrics, benchmarks, the tuner, the self-check.

The package imports every other package but `data` and `models`.
"""
