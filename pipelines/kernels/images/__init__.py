"""Kernels of images: quantized networks mapped from ONNX, and antialiased resizing and cropping on uint8.

`from_graph` maps a graph, `native` runs it in C++ with onnxruntime's integers, and `rest` is its float remainder.
"""
