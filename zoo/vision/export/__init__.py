"""Image classifiers to fp32.onnx, and their graph rewrites."""
