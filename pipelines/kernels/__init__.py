"""The few native kernels that no library has, in C++ (AVX-512 VNNI, AVX2 and plain), a room a product: clicks,
transformer, images.

In every room `operators` or `program` says what is computed, as validated dataclasses, `reference` is the same in numpy
and the definition of the bits, `native` makes native objects, and `from_graph` maps an ONNX graph to them; `isa/` holds
what is written once for each instruction set. The best that the CPU runs is chosen when an object is made, or the one
named by `isa`; all return the same bits.

Imports `core`, `graph` and the qparams of `quantization`.
"""
