"""Float weights of models of int8-zoo, MODEL/fp16.onnx, which it finds by its entry point group `int8_zoo.models`."""
