"""Native kernels in C++ for several instruction sets (`extension.isas`): recommenders, transformer, images, logs.

In every package `operators` or `program` defines the computation as validated dataclasses, `reference` is the same in
numpy and defines the bits, `native` creates native objects, and `from_graph` maps an ONNX graph to them. `isa/` has the
kernels for each instruction set and the choice among them. An object uses the best instruction set of the CPU, or the
one named by `isa`; all return the same bits.

The package imports `core`, `graph` and the qparams of `quantization`.
"""
