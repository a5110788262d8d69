"""Ranking networks in torch to fp32.onnx, and the graph rewrites of recommenders."""
