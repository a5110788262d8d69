"""Checkpoint to fp32.onnx, and the graph rewrites of translation models."""
