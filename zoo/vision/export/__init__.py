"""Export of image classifiers to fp32.onnx, and their graph rewrites."""
