"""The log of a tuner's trials, and the digests that its entries belong to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.core.batches import Batch

Trial = dict[str, Any]  # a line of the log


def log_path(output: str | Path) -> Path:
    """Returns the path of the log of the trials for a model at `output`.

    Args:
        output: Path of the model.
    """
    return Path(output).with_suffix(".trials.jsonl")


def read_log(path: Path) -> tuple[Trial, list[Trial]]:
    """Reads a log; a truncated last line is dropped.

    Args:
        path: The log.

    Returns:
        What the log belongs to, and its entries.
    """
    lines = []
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            lines.append(json.loads(text))
    except (OSError, ValueError, RecursionError):
        pass
    return (lines[0], lines[1:]) if lines and isinstance(lines[0], dict) else ({}, [])


def structure(model: ir.Model, symmetric: bool) -> str:
    """Returns the SHA-256 of a graph without the values of weights, biases, scales and zero points.

    Of these, latency depends only on whether they are symmetric.

    Args:
        model: Int8 model.
        symmetric: Whether activations are symmetric.
    """
    sha, numbers = hashlib.sha256(str(symmetric).encode()), dict[ir.Value, int]()
    for node in model.graph:
        sha.update(f"\n{node.domain} {node.op_type} {sorted(map(str, node.attributes.values()))}".encode())
        for value in (*node.inputs, *node.outputs):
            sha.update(f" {None if value is None else numbers.setdefault(value, len(numbers))}".encode())
            tensor = None if value is None else value.const_value
            if tensor is not None:
                sha.update(f" {tensor.dtype} {list(tensor.shape)}".encode())
                if tensor.dtype == ir.DataType.INT64:  # shapes, axes, indices
                    sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def samples_digest(samples: Iterable[Batch]) -> str:
    """Returns the SHA-256 of calibration samples, independent of their batches.

    Args:
        samples: Batches.
    """
    digests: dict[str, Any] = {}
    for batch in samples:
        for name, array in batch.items():
            sha = digests.setdefault(name, hashlib.sha256(f"{array.dtype} {array.shape[1:]}".encode()))
            sha.update(np.ascontiguousarray(array).tobytes())
    text = "".join(f"{name} {sha.hexdigest()}" for name, sha in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()
