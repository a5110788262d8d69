"""ONNX graph to native program: graph reading, expressions, table folding, planning and encoding."""
