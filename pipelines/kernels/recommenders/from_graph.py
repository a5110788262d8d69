"""`ClickProgram` nodes of an ONNX graph, written and read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query
from pipelines.kernels.recommenders.operators import DOMAIN, LinearLayer
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import STEPS

VERSION = 1  # of the domain, as the opset imports name it
PROGRAM = ClickProgram.name


def program_node(
    main: ir.Graph,
    program: ClickProgram,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[str],
    name: str,
    taken: set[str],
    written: dict[int, ir.Value] | None = None,
) -> ir.Node:
    """Creates the `ClickProgram` node of a program; its arrays become initializers of `main`.

    The node has the inputs ids, numbers and scales (None if the program has none), followed by the arrays. Its
    attribute `program` has the rest as JSON, where {"array": i} is input 3 + i.

    Args:
        main: Graph of the node; the node is not added.
        program: The program.
        inputs: Values of ids, numbers and scales.
        outputs: Names of the outputs.
        name: Name of the node and prefix of the initializers.
        taken: Names in use; updated.
        written: Initializers of other programs of the graph by the address of their arrays, which the node shares;
            updated.

    Returns:
        The node.
    """
    arrays: list[NDArray[Any]] = []
    content = {
        "numbers": program.numbers,
        "means": program.means,
        "slots": program.slots,
        "outputs": program.outputs,
        "rows": _written(program.rows, arrays),
        "steps": [{"step": type(step).__name__} | _written(step, arrays) for step in program.steps],
    }
    written = {} if written is None else written
    for i, array in enumerate(arrays):
        if id(array) not in written:
            written[id(array)] = edit.initializer(main, f"{name}.{i}", array, taken)
    constants = [written[id(array)] for array in arrays]
    text = json.dumps(content, separators=(",", ":"))
    node = ir.node(
        PROGRAM,
        [*inputs, *constants],
        attributes={"program": text},
        domain=DOMAIN,
        name=edit.unique(name, taken),
        num_outputs=len(outputs),
    )
    batch = inputs[0].shape[0] if inputs[0] is not None and inputs[0].shape is not None else None
    for value, output, slot in zip(node.outputs, outputs, program.outputs, strict=True):
        value.name, value.type = output, ir.TensorType(ir.DataType.FLOAT)
        value.shape = ir.Shape([batch, program.slots[slot][1]])
    main.opset_imports[DOMAIN] = VERSION
    return node


def click_program(node: ir.Node) -> ClickProgram:
    """Reads the program of a `ClickProgram` node.

    Args:
        node: The node.

    Returns:
        The program.

    Raises:
        RequestError: The node is of another type, or its program is not valid.
    """
    if (node.domain, node.op_type) != (DOMAIN, PROGRAM):
        raise RequestError(f"the operator {node.name or '?'} is {node.op_type}; expected {PROGRAM} of {DOMAIN}")
    try:
        arrays = [query.constant(value) for value in node.inputs[3:]]
        if any(array is None for array in arrays):
            raise RequestError(
                f"the operator {node.name or '?'} has inputs that are no constants; build the model again"
            )
        content = json.loads(node.attributes["program"].as_string())
        steps = [STEPS[step.pop("step")](**_read(step, arrays)) for step in content.pop("steps")]
        return ClickProgram(steps=tuple(steps), **_read(content, arrays))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RequestError(
            f"the operator {node.name or '?'} holds no program ({error}); build the model again"
        ) from error


def _written(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """Converts a value to JSON and appends its arrays to `arrays`."""
    if isinstance(value, np.ndarray):
        arrays.append(np.ascontiguousarray(value))
        return {"array": len(arrays) - 1}
    if type(value) in (*STEPS.values(), LinearLayer):
        return {field.name: _written(getattr(value, field.name), arrays) for field in fields(value)}
    return value


def _read(value: dict[str, Any], arrays: Sequence[NDArray[Any] | None]) -> dict[str, Any]:
    """Reverses `_written` for the fields of one dataclass."""
    kwargs: dict[str, Any] = {}
    for key, raw in value.items():
        if isinstance(raw, dict):
            kwargs[key] = arrays[raw["array"]] if "array" in raw else LinearLayer(**_read(raw, arrays))
        else:
            kwargs[key] = tuple(tuple(i) if isinstance(i, list) else i for i in raw) if isinstance(raw, list) else raw
    return kwargs
