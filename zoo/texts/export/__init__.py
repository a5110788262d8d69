"""Weights to fp32.onnx, and the graph rewrites of BERT-shaped networks."""
