"""Shared parts of training: runs, settings, gradient exchange, lazy torch modules, and the export to ONNX."""
