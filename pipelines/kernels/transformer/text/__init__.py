"""Encoders of texts: program, numpy reference, mapping of ONNX graphs, and native encoder."""
