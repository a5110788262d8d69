"""Whether engines compute the same: what they return, and what OpenVINO makes of an int8 file as users open it.

Nobody fixes the shapes of its inputs there. OpenVINO 2026.4 computed a few such graphs wrongly, the same graphs with
static shapes rightly (`engine_quirks`). A session of ours fixes them, so that the file is judged apart: at two batch
sizes and, where another axis is free, at two sizes of it, by what onnxruntime computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pipelines.core.batches import Batch, length
from pipelines.core.errors import ZooError
from pipelines.engines.openvino import OpenVinoSession
from pipelines.engines.session import Port, Runnable

ALIKE = 0.1  # 10 dB; int8 in two engines was seen to differ by 1e-3 and less


def require_alike(engine: str, found: Batch, wanted: Batch) -> None:
    """Raise ZooError where a float output of an engine differs from that of another by more than `ALIKE` of its power
    (sum of squares), or any in how its axes lie.

    Engines round differently, but one that computes something else, as OpenVINO 2026.4 makes of a few quantized graphs,
    is not for use.
    """
    for name in wanted.keys() & found.keys():
        x, y = wanted[name], found[name]
        if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
            continue
        if x.shape != y.shape:
            if x.ndim != y.ndim or x.size == y.size:  # of another size: as many as were found
                raise ZooError(f"output {name} of {engine} has shape {y.shape}, that of other engines {x.shape}")
        elif x is not y and x.dtype.kind == "f":
            power, difference = (float(np.square(each, dtype=np.float64).sum()) for each in (x, x - y))
            if 0 < power < np.inf and not difference <= ALIKE * power:  # NaN is none either
                raise ZooError(
                    f"output {name} of {engine} differs from that of other engines by {difference / power:.0%} of its "
                    "power"
                )


def require_right_as_opened(session: Runnable, reference: Runnable, batch: Batch) -> None:
    """Raise ZooError where the file of an OpenVINO session, opened as it is, computes something else than `reference`.

    Nothing where the session is another's, the graph's shapes are fixed, or none of it is int8. A shape that the
    reference refuses is no test.
    """
    if not isinstance(session, OpenVinoSession) or not (opened := session.as_opened()):
        return
    for variant in variants(session.inputs, batch):
        try:
            wanted = reference.run(variant)
        except ZooError:
            continue
        require_alike("openvino (the file as it is)", opened(variant), wanted)


def why_wrong(engine: str, session: Runnable, reference: Runnable, batch: Batch) -> str:
    """How a session computes something else than `reference`, with static shapes or as opened; "" where it does not.

    Raises ZooError where it does not run.
    """
    found = session.run(batch)
    try:
        require_alike(engine, found, reference.run(batch))
        require_right_as_opened(session, reference, batch)
    except ZooError as error:
        return str(error)
    return ""


def variants(inputs: Mapping[str, Port], batch: Batch) -> Iterator[dict[str, np.ndarray]]:
    """One sample and two of `batch`, and the two at about two thirds of every other free axis; the batch itself where
    its inputs have no axis of samples in common.
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
