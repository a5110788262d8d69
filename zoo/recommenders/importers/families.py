"""Determines the family of an imported ranker from the structure of its graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph.infer import infer_shapes
from zoo.recommenders.data.features import Features
from zoo.recommenders.lowering.algebra import subexpressions
from zoo.recommenders.lowering.expressions import (
    Crossed,
    Dots,
    Expression,
    Factorization,
    FloatVector,
    GatedSum,
    L2Normalized,
    Linear,
    Numbers,
    ProbabilityProduct,
    Product,
    SigmoidGated,
    Total,
    parts_of,
)
from zoo.recommenders.lowering.expressions import Field as Lookup
from zoo.recommenders.lowering.fields.expressions import FieldAttention
from zoo.recommenders.lowering.graph_reader import GraphReader
from zoo.recommenders.lowering.sequences.expressions import TargetAttention, TransformedTarget

GENERIC = "ranker"
FAMILY_OPERATORS = {  # the operators of the families
    *("Gather", "Slice", "Concat", "Reshape", "Gemm", "MatMul", "Add", "Sum", "Relu", "Mul", "Sub", "ReduceSum"),
    *("ReduceMax", "Sigmoid", "Max", "Sqrt", "Div", "Transpose", "Identity", "PRelu", "LeakyRelu", "Tanh", "Softmax"),
    *("Einsum", "Split", "Squeeze", "Unsqueeze", "Equal", "Not", "Cast", "LayerNormalization", "Pad"),
}
BY_EXPRESSION: tuple[tuple[type[Expression], str, str], ...] = (  # families with an operator of their own
    (TargetAttention, "din", "its history is weighted by a network on every item and the target"),
    (TransformedTarget, "bst", "its history and target pass a transformer layer"),
    (FieldAttention, "autoint", "its fields attend to each other"),
    (Dots, "dlrm", "its embeddings are multiplied with each other, every one with every other"),
)


def family_of(model: ir.Model, features: Features) -> tuple[str, str, Features]:
    """Determines the family of a graph from its structure.

    Adds the outputs and names of the family to the graph, in place.

    Args:
        model: Rewritten graph.
        features: Encoding of the rows.

    Returns:
        (family, reason, features with towers); the family is `GENERIC` if no family matches.
    """
    if len(model.graph.outputs) > 1:
        return (*_of_several_labels(model), features)
    strange = sorted({node.op_type for node in model.graph} - FAMILY_OPERATORS)
    if strange:
        many = "s" * (len(strange) > 1)
        return GENERIC, f"mapped as any graph: no family here has the operator{many} {', '.join(strange)}", features
    reader = GraphReader()
    try:
        infer_shapes(model)
        result = reader.read(model.graph.outputs[0])
    except RequestError as error:
        return GENERIC, f"mapped as any graph: {error}", features
    by_type = {type(expression): expression for expression in subexpressions(result)}
    terms = [term for term, _ in result.terms] if isinstance(result, Total) else []
    deep = [
        any(
            isinstance(expression, FloatVector) or (isinstance(expression, Linear) and expression.relu)
            for expression in subexpressions(term)
        )
        for term in terms
    ]
    if isinstance(product := by_type.get(Product), Product):
        if isinstance(product.x, L2Normalized) and isinstance(product.y, L2Normalized):
            features = _with_towers(model, features, reader, [product.x, product.y])
            return "two-tower", "its result is the dot product of two networks that read different columns", features
        return "finalmlp", "it joins two networks by a bilinear form", features
    for kind, family, reason in BY_EXPRESSION:
        if kind in by_type:
            return family, reason, features
    if Crossed in by_type:
        _name_output(model, terms)
        if SigmoidGated in by_type:
            return "gdcn", "it has cross layers with gates: x0 times a linear layer of x times a sigmoid", features
        return "dcn-v2", "it has cross layers: x0 times a linear layer of x", features
    if Factorization in by_type:
        return "deepfm", "it has a factorization machine: the square of a sum less the sum of squares", features
    if any(deep) and not all(deep):
        return "wide-deep", "it has a linear part beside a network of embeddings", features
    return (
        GENERIC,
        "mapped as any graph: it has no linear part, factorization machine, cross layers or dot products",
        features,
    )


def _of_several_labels(model: ir.Model) -> tuple[str, str]:
    """Returns family and reason for a graph with the probabilities of several labels."""
    reader = GraphReader()
    try:
        infer_shapes(model)
        results = [reader.read(value) for value in model.graph.outputs]
    except RequestError as error:
        return GENERIC, f"mapped as any graph: {error}"
    expressions = [expression for result in results for expression in subexpressions(result)]
    mixtures = [expression for expression in expressions if isinstance(expression, GatedSum)]
    if any(isinstance(result, ProbabilityProduct) for result in results):
        return "esmm", "a result is the product of two probabilities"
    if any(isinstance(inner, GatedSum) for mixture in mixtures for inner in [*subexpressions(mixture)][1:]):
        return "ple", "it mixes experts by gates in several levels"
    if mixtures:
        return "mmoe", "it mixes experts by gates"
    return GENERIC, "mapped as any graph: its labels share layers, no experts and no product of probabilities"


def _with_towers(model: ir.Model, features: Features, reader: GraphReader, sides: list[Expression]) -> Features:
    """Adds the outputs `user` and `item` to the graph, and the towers of the columns to the features.

    The item tower is the one with more columns that the schema assigns to items, else the second one.
    """
    names = {side: _columns_of(side, features) for side in sides}
    item_names = {column.name for column in features.schema.columns if column.tower == "item"}
    sides = sorted(sides, key=lambda side: len(names[side] & item_names))
    towers: dict[str, str] = {}
    for side, tower in zip(sides, ("user", "item"), strict=True):
        value = reader.value_of(side)
        value.name = tower
        model.graph.outputs.append(value)
        towers |= dict.fromkeys(names[side], tower)
    columns = (replace(column, tower=towers.get(column.name, column.tower)) for column in features.schema.columns)
    return Features(replace(features.schema, columns=tuple(columns)))


def _columns_of(x: Expression, features: Features) -> set[str]:
    """Returns the columns of the log that a value depends on."""
    ids = {expression.column for expression in subexpressions(x) if isinstance(expression, Lookup)}
    numbers = {
        column for expression in subexpressions(x) if isinstance(expression, Numbers) for column in expression.columns
    }
    return {field.name for field in features.fields if field.start in ids} | {
        number.name for index, number in enumerate(features.numbers) if index in numbers
    }


def _name_output(model: ir.Model, terms: Sequence[Expression]) -> None:
    """Renames the layer with one output that reads the cross layers to the name in the family's recipe."""
    values = {term.value for term in terms if isinstance(term, Linear) if any(map(_is_cross, parts_of(term.x)))}
    for node in model.graph:
        if node.op_type in ("Gemm", "MatMul") and node.outputs[0].name in values:
            node.name = node.outputs[0].name = "cross_output"
            return


def _is_cross(x: Expression) -> bool:
    return isinstance(x, Crossed)
