"""Kernels of images: quantized networks mapped from ONNX, and antialiased resizing and cropping on uint8.

`mapping` turns a graph into a program and its float remainder; `native` runs the program in C++ with onnxruntime's
integers.
"""
