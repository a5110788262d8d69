"""ONNX graphs (onnx_ir): files, queries, edits, and onnxruntime as a reference that computes what the graph says.

Imports `core` alone.
"""
