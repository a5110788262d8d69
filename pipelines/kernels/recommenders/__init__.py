"""Native kernels of recommenders.

A click model is a program of steps on buffers (`program`, `steps`); `reference` computes it in numpy.
"""
