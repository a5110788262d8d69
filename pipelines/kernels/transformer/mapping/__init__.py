"""Frozen ONNX graphs as operations over registers."""
