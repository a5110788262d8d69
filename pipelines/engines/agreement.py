"""Validation of engines against ONNX Runtime, with static shapes and with the file as users open it.

A session of ours fixes the shapes of a graph. Users do not, and OpenVINO 2026.4 computed a few such graphs wrongly that
it computes correctly with static shapes (`engine_quirks`). So the file itself is validated too: at two batch sizes and,
if another axis is dynamic, at two sizes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pipelines.core.batches import Batch, length
from pipelines.core.errors import ZooError
from pipelines.engines.session import Port, Runnable

ALIKE = 0.1  # 10 dB; int8 in two engines was seen to differ by 1e-3 and less


class WrongResultsError(ZooError):
    """An engine does not compute a graph correctly on this machine."""


def require_alike(engine: str, found: Batch, expected: Batch) -> None:
    """Checks that the outputs of an engine agree with those of a reference.

    Engines round differently, but an engine that computes something else must not be used.

    Args:
        engine: Name of the engine, for messages.
        found: Outputs of the engine, by name.
        expected: Outputs of the reference, by name.

    Raises:
        ZooError: A float output differs by more than `ALIKE` of its power (sum of squares), or an output has another
            layout.
    """
    share, name = largest_difference(engine, found, expected)
    if share > ALIKE:
        raise ZooError(difference(engine, name, share))


def difference(engine: str, name: str, share: float) -> str:
    """Returns the message for an output that differs.

    Args:
        engine: Name of the engine.
        name: Name of the output.
        share: See `largest_difference`.
    """
    precise = f"{share:.0%}" if share >= 0.01 else f"{share:.2g}"
    return f"output {name} of {engine} differs from that of other engines by {precise} of its power"


def largest_difference(engine: str, found: Batch, expected: Batch) -> tuple[float, str]:
    """Compares the float outputs of an engine with those of a reference, where the reference is finite.

    Args:
        engine: Name of the engine, for messages.
        found: Outputs of the engine, by name.
        expected: Outputs of the reference, by name.

    Returns:
        The largest difference of an output as a share of its power (sum of squares), infinite for NaN; and the output's
        name, "" if none was compared.

    Raises:
        ZooError: An output has another layout.
    """
    largest = (0.0, "")
    for name in sorted(expected.keys() & found.keys()):
        x, y = expected[name], found[name]
        if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray) or x is y:
            continue
        if x.shape != y.shape:
            if x.ndim != y.ndim or x.size == y.size:  # of another size: as many as were found
                raise ZooError(f"output {name} of {engine} has shape {y.shape}, that of other engines {x.shape}")
        elif x.dtype.kind == "f":
            finite = np.isfinite(x)
            if not finite.all():
                x, y = x[finite], y[finite]
            power, apart = (float(np.square(each, dtype=np.float64).sum()) for each in (x, x - y))
            if power > 0:
                largest = max(largest, (apart / power if apart < np.inf else np.inf, name))
    return largest


def require_right_as_opened(session: Runnable, reference: Runnable, batch: Batch) -> None:
    """Checks an OpenVINO file as users open it, with dynamic shapes.

    Does nothing for other engines, static graphs and graphs without int8 operators. Shapes that the reference refuses
    are skipped.

    Args:
        session: Session to check.
        reference: Session of the reference engine.
        batch: Example batch.

    Raises:
        ZooError: The outputs differ from those of the reference.
    """
    openvino: Any = session if hasattr(session, "as_opened") else None
    if openvino is None or not (opened := openvino.as_opened()):
        return
    for variant in variants(openvino.inputs, batch):
        try:
            expected = reference.run(variant)
        except ZooError:
            continue
        require_alike("openvino (the file as it is)", opened(variant), expected)


def why_wrong(engine: str, session: Runnable, reference: Runnable, batch: Batch) -> str:
    """Returns how a session differs from a reference, with static shapes or as opened, or "".

    Args:
        engine: Name of the engine, for messages.
        session: Session to check.
        reference: Session of the reference engine.
        batch: Example batch.

    Raises:
        ZooError: The session does not run.
    """
    try:
        found = session.run(batch)
    except WrongResultsError as error:
        return str(error)
    try:
        require_alike(engine, found, reference.run(batch))
        require_right_as_opened(session, reference, batch)
    except ZooError as error:
        return str(error)
    return ""


def variants(inputs: Mapping[str, Port], batch: Batch) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of several shapes for graphs with dynamic axes.

    Args:
        inputs: Inputs of the graph.
        batch: Example batch.

    Yields:
        One sample and two samples of the batch, and two samples with about two thirds of every other dynamic axis. If
        the inputs share no sample axis, the batch takes the place of the first two.
    """
    shared = {port.shape[:1] for port in inputs.values()} == {(None,)}
    whole = {name: np.asarray(array, order="C") for name, array in batch.items()}
    if shared:
        yield {name: array[:1] for name, array in whole.items()}
        whole = {name: array[np.arange(2) % max(length(batch), 1)] for name, array in whole.items()}
    yield whole
    shorter = {}
    for name, array in whole.items():
        free = [size is None and axis > 0 for axis, size in enumerate(inputs[name].shape)]
        kept = tuple(slice(max(size * 2 // 3, 1) if cut else None) for size, cut in zip(array.shape, free, strict=True))
        shorter[name] = np.asarray(array[kept], order="C")
    if any(shorter[name].shape != array.shape for name, array in whole.items()):
        yield shorter
