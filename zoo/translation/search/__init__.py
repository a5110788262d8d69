"""Beam search: the numpy reference, decoding steps with KV caches, the search as an ONNX Loop, lexical shortlists."""
