"""What quantization did and what it is worth, measured: reports, metrics, benchmarks, the tuner, the self-check.

Imports every package but `data` and `models`.
"""
