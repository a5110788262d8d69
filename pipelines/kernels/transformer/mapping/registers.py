"""Allocation of registers to operations."""

from __future__ import annotations

from dataclasses import replace

from pipelines.kernels.transformer.operations import (
    MEMORY,
    CrossAttention,
    Linear,
    Operation,
    StaticQParams,
    Vocabulary,
)


def unify_qparams(operations: list[Operation]) -> list[Operation]:
    """Replaces static by dynamic quantization where layers quantize one register by different parameters.

    Layers with float weights, which quantize nothing, lose their parameters.

    Args:
        operations: The operations; each register is written once.

    Returns:
        The operations, changed where needed.
    """
    readers: dict[int, set[StaticQParams | None]] = {}

    def qparams_beside(operation: Linear | CrossAttention | Vocabulary) -> set[StaticQParams | None]:
        return readers.setdefault(MEMORY if isinstance(operation, CrossAttention) else operation.input, set())

    for operation in operations:
        if isinstance(operation, Linear | CrossAttention | Vocabulary) and operation.layer.quantizes:
            qparams_beside(operation).add(operation.layer.qparams)
    unified: list[Operation] = []
    for operation in operations:
        if isinstance(operation, Linear | CrossAttention | Vocabulary) and (
            not operation.layer.quantizes or len(qparams_beside(operation)) > 1
        ):
            operation = replace(operation, layer=replace(operation.layer, qparams=None))
        unified.append(operation)
    return unified


def allocate_registers(operations: list[Operation]) -> list[Operation]:
    """Renumbers registers so that each is reused after its last reader.

    Args:
        operations: The operations; each register is written once.

    Returns:
        The same operations on as few registers as possible.
    """
    last_reader = {register: i for i, operation in enumerate(operations) for register in _reads(operation).values()}
    allocated: dict[int, int] = {}
    free: list[int] = []
    result: list[Operation] = []
    for i, operation in enumerate(operations):
        reads = _reads(operation)
        changes = {name: allocated[register] for name, register in reads.items()}
        done = [register for register in set(reads.values()) if last_reader[register] == i]
        residual = reads.get("residual")
        if residual in done and residual != reads.get("input"):  # each element is read before it is written
            done.remove(residual)
            free.append(allocated[residual])
        if not isinstance(operation, Vocabulary):
            out = free.pop() if free else len(set(allocated.values()))
            allocated[operation.out] = changes["out"] = out
        free.extend(allocated[register] for register in done)
        result.append(replace(operation, **changes))  # type: ignore[arg-type]
    return result


def _reads(operation: Operation) -> dict[str, int]:
    """The registers that an operation reads, by field."""
    registers = ((name, getattr(operation, name, None)) for name in ("input", "residual"))
    return {name: register for name, register in registers if register is not None}
