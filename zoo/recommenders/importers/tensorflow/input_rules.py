"""Rules for the inputs of a feature column graph, and for the parsing of tf.train.Example.

See `zoo.recommenders.importers.tensorflow.rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zoo.recommenders.importers.tensorflow.expressions import Column, Row
from zoo.recommenders.importers.tensorflow.tensors import (
    BATCH,
    Array,
    Feature,
    Flat,
    LookupStage,
    Node,
    Refused,
    Rule,
    Source,
    is_stage,
    refuse,
    require,
)


def _placeholder(node: Node, inputs: list[Any], source: Source) -> Any:
    """An input of the graph: texts [n] or [n, 1], or numbers [n] or [n, k]."""
    shape = node.attr["shape"].shape
    if shape.unknown_rank or (node.op == "Placeholder" and "shape" not in node.attr):
        refuse("an input of unknown shape; expected one value a row, [?] or [?, 1]")
    sizes = [axis.size for axis in shape.dim]
    if node.op == "PlaceholderWithDefault" and not sizes:
        return inputs[0]
    shown = f"an input of the shape {['?' if size < 0 else size for size in sizes]}".replace("'", "")
    require(sizes and sizes[0] < 0, f"{shown}; expected any number of rows, [?] or [?, 1]")
    kind = type_of(node, "dtype")
    if kind == "string":
        require(len(sizes) == 1 or sizes[1:] == [1], f"{shown} holds several values a row; expected [?] or [?, 1]")
        return LookupStage("text", node.name, rank=len(sizes))
    require(kind in NUMBERS, f"an input of {kind}; expected text or numbers")
    require(len(sizes) == 1 or (len(sizes) == 2 and sizes[1] > 0), f"{shown}; expected a known number of columns")
    return _numbers(source, node.name, sizes[1:], np.zeros(sizes[1:]))


NUMBERS = ("float", "double", "half", "int32", "int64")


def type_of(node: Node, name: str) -> str:
    """Reads a dtype attribute.

    Args:
        node: Node.
        name: Name of the attribute.

    Returns:
        Name of the type, e.g. "float".
    """
    return _type_name(node.attr[name].type)


def _numbers(source: Source, name: str, sizes: Sequence[int], fill: Array) -> Any:
    """A numeric feature with `fill` for missing entries, as a row of columns; flat where it has no second axis."""
    width = sizes[0] if sizes else 1
    source.numbers[name] = Feature(tuple(np.broadcast_to(fill.ravel(), (width,)).astype(float).tolist()))
    row = Row(tuple(Column(name, i) for i in range(width)))
    return row if sizes else Flat(row)


def _parse_example(node: Node, inputs: list[Any], source: Source) -> Any:
    """ParseExample: sparse indices, values and shapes, then dense values.

    A feature of any length is assumed to hold at most one value.
    """
    require(is_stage(inputs[0], "text") and inputs[0].rank == 1, "its examples are no input of the graph")
    types = [_type_name(code) for code in node.attr["sparse_types"].list.type]
    shapes = [[axis.size for axis in shape.dim] for shape in node.attr["dense_shapes"].list.shape]
    if node.op == "ParseExampleV2":
        sparse, dense, ragged = ([key.decode() for key in np.ravel(keys)] for keys in inputs[2:5])
        defaults = inputs[5:]
    else:
        count, ragged = len(types), []
        sparse, dense = (
            [np.ravel(key)[0].decode() for key in keys]
            for keys in (inputs[2:][:count], inputs[2 + count :][: len(shapes)])
        )
        defaults = inputs[2 + count + len(shapes) :]
    outputs: list[Any] = []
    texts = [LookupStage("text", name, rank=2) for name in sparse]
    held = [kind == "string" for kind in types]
    whys = [
        Refused((f"{name} ({node.op}): numbers of any length a row are not mapped, those of a fixed length are",))
        for name in sparse
    ]
    for kind in ("entries", "held"):
        outputs += [text.to(kind) if fits else why for text, fits, why in zip(texts, held, whys, strict=True)]
    outputs += [np.array([BATCH, 1], object) if fits else why for fits, why in zip(held, whys, strict=True)]
    kinds = [_type_name(code) for code in node.attr["Tdense"].list.type]
    for name, kind, shape, default in zip(dense, kinds, shapes, defaults, strict=True):
        if len(shape) > 1 or any(size < 1 for size in shape) or (kind == "string" and shape not in ([], [1])):
            outputs.append(
                Refused(
                    (f"{name} ({node.op}): it has the shape {shape}; expected one value a row, or a row of numbers",)
                )
            )
        elif kind == "string":
            other = any(text != b"" for text in np.ravel(default))
            why = Refused(
                (
                    f"{name} ({node.op}): a missing text becomes {np.ravel(default)[:1]}; expected no default, or an "
                    "empty one",
                )
            )
            outputs.append(why if other else LookupStage("text", name, rank=1 + len(shape)))
        else:
            outputs.append(_numbers(source, name, shape, default if np.size(default) else np.zeros(1)))
    return (
        *outputs,
        *[
            Refused((f"{name} ({node.op}): a column of several values a row is not mapped",))
            for name in ragged
            for _ in "ab"
        ],
    )


def _type_name(number: int) -> str:
    """The name of a TensorFlow dtype, e.g. float, by its number."""
    from tensorflow.core.framework import types_pb2

    return str(types_pb2.DataType.Name(number)).removeprefix("DT_").lower()


INPUTS: dict[str, Rule] = {
    **dict.fromkeys(("Placeholder", "PlaceholderWithDefault"), _placeholder),
    **dict.fromkeys(("ParseExample", "ParseExampleV2"), _parse_example),
}
