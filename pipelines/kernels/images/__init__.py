"""Kernels of images: quantized networks mapped from ONNX (`from_graph`) and run in C++ with onnxruntime's integers
(`native`), what such a graph ends with in float (`rest`), and antialiased resize and crop on uint8.
"""
