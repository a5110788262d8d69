"""ONNX graphs (onnx_ir): files, queries, edits, and onnxruntime as a reference that computes a graph unoptimized.

The package imports `core` only.
"""
