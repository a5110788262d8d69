"""Rankers of other libraries: ONNX exports (`rankers`) and TensorFlow graphs (`tensorflow`)."""
