"""Export of BERT-shaped networks to fp32.onnx, and their graph rewrites."""
