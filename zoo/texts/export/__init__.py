"""Export of text encoders to fp32.onnx, and their graph rewrites."""
