"""Algorithms that lower quantization error: equalization, smoothing, GPTQ, bias correction, error bounds."""
