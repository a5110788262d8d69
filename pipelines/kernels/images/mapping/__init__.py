"""Mapping of a quantized image network's ONNX graph to an `ImageProgram`: `from_graph.image_program`."""
