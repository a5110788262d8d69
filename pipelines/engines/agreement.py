"""Validation of engines against ONNX Runtime, with static shapes and with the default settings of the engine.

Sessions of this project fix the shapes of a graph. With dynamic shapes, OpenVINO 2026.4 computes a few graphs wrongly
(`engine_quirks`). So the file itself is validated too, in a child process: at several sizes of all dynamic axes, from 1
to many, see `variants`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import settings
from pipelines.core.batches import Batch, resized, share_axis
from pipelines.core.errors import ZooError
from pipelines.engines.session import Port, Runnable

ALIKE = 0.1  # difference as a share of the power: 10 dB; int8 in two engines was seen to differ by 1e-3 and less
LONG_AXIS = 64  # elements of the dynamic axes of a long batch
NOISY = 0.5  # difference that rounding never explains
ROUNDING = 10  # engines may differ by this multiple of what rounding of the inputs changes
ROUNDED = 6  # batches of rounded inputs
ROWS = 1000  # of a sample that may come in any order


class WrongResultsError(ZooError):
    """An engine does not compute a graph correctly on this machine."""


def require_alike(engine: str, outputs: Batch, expected: Batch, reference: Runnable, batch: Batch) -> None:
    """Checks that the outputs of an engine agree with those of a reference.

    Engines round differently, but an engine that computes something else must not be used.

    Args:
        engine: Name of the engine, for messages.
        outputs: Outputs of the engine, by name.
        expected: Outputs of the reference, by name.
        reference: Session of the reference.
        batch: Inputs of both.

    Raises:
        ZooError: A float output differs by a larger share of its power (sum of squares) than rounding explains, or an
            output has another layout.
    """
    share, name = largest_difference(engine, outputs, expected)
    if share > ALIKE and share > tolerance(reference, batch, expected):
        raise ZooError(difference(engine, name, share))


def tolerance(reference: Runnable, batch: Batch, expected: Batch) -> float:
    """Returns the difference that rounding may explain, as a share of the power: from `ALIKE` to `NOISY`.

    One sample may turn on its last bits, such as a photo between two classes. Inputs that are moved by less than a step
    of 8 bits then change the reference's own results as much as another engine does.

    Args:
        reference: Session of the reference.
        batch: Inputs.
        expected: Outputs of the reference for them, by name.
    """
    return min(NOISY, max(ALIKE, ROUNDING * noise_of_rounding(reference.run, batch, expected)))


def noise_of_rounding(reference: Callable[[Batch], Batch], batch: Batch, expected: Batch) -> float:
    """Returns the largest difference that inputs moved by less than a step of 8 bits make, as a share of the power.

    Args:
        reference: Computes the outputs of a batch.
        batch: Inputs; integers are not moved.
        expected: Outputs of the reference for them, by name.
    """
    rng = np.random.default_rng(0)
    steps = {
        name: (array.max() - array.min()) / 255
        for name, array in batch.items()
        if array.dtype.kind == "f" and array.size and np.isfinite(array).all()
    }
    noise = 0.0
    for _ in range(ROUNDED if steps else 0):
        moved = {name: batch[name] + step * rng.uniform(-0.5, 0.5, batch[name].shape) for name, step in steps.items()}
        rounded = dict(batch) | {name: array.astype(batch[name].dtype) for name, array in moved.items()}
        noise = max(noise, largest_difference("the reference", reference(rounded), expected)[0])
    return noise


def difference(engine: str, name: str, share: float) -> str:
    """Returns the message for an output that differs.

    Args:
        engine: Name of the engine.
        name: Name of the output.
        share: See `largest_difference`.
    """
    precise = f"{share:.0%}" if share >= 0.01 else f"{share:.2g}"
    return f"output {name} of {engine} differs from that of other engines by {precise} of its power"


def largest_difference(engine: str, outputs: Batch, expected: Batch, ordered: bool = True) -> tuple[float, str]:
    """Compares the float outputs of an engine with those of a reference, where the reference is finite.

    Args:
        engine: Name of the engine, for messages.
        outputs: Outputs of the engine, by name.
        expected: Outputs of the reference, by name.
        ordered: Whether the rows of a sample have one order; those that a network chooses by almost equal scores have
            none.

    Returns:
        The largest difference of an output as a share of its power (sum of squares), infinite for NaN; and the output's
        name, "" if none was compared.

    Raises:
        ZooError: An output has another layout.
    """
    largest = (0.0, "")
    for name in sorted(expected.keys() & outputs.keys()):
        x, y = expected[name], outputs[name]
        if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray) or x is y:
            continue
        if x.shape != y.shape:
            if x.ndim != y.ndim or x.size == y.size:  # of another size: as many as were found
                raise ZooError(f"output {name} of {engine} has shape {y.shape}, that of other engines {x.shape}")
        elif x.dtype.kind == "f":
            finite = np.isfinite(x)
            if not ordered and 2 <= x.ndim <= 3 and x.shape[1] <= ROWS and finite.all() and np.isfinite(y).all():
                y = _nearest(x, y)
            if not finite.all():
                x, y = x[finite], y[finite]
            power, apart = (float(np.square(array, dtype=np.float64).sum()) for array in (x, x - y))
            if power > 0:
                largest = max(largest, (apart / power if apart < np.inf else np.inf, name))
    return largest


def _nearest(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Returns of each row of x [n, rows, ...] the nearest row of y, of the same sample."""
    rows = []
    for a, b in zip(x.reshape(*x.shape[:2], -1), y.reshape(*y.shape[:2], -1), strict=True):
        distances = (b * b).sum(1) - 2 * (a @ b.T)
        rows.append(b[distances.argmin(1)])
    return np.reshape(rows, x.shape)


def require_correct_as_opened(session: Runnable, batch: Batch) -> None:
    """Checks an OpenVINO file as users open it, with dynamic shapes, in a child process.

    Does nothing for other engines, static graphs and graphs without int8 operators.

    Args:
        session: Session of the file.
        batch: Example batch.

    Raises:
        WrongResultsError: The outputs differ from those of ONNX Runtime, or OpenVINO refuses the file, or crashes.
    """
    from pipelines.engines.openvino import child

    if (graph := getattr(session, "graph", None)) is None:
        return
    form = "the file as it is"
    few = {name: array[:LONG_AXIS] for name, array in batch.items()} if share_axis(batch) else dict(batch)
    result = child.probe({"graph": asdict(graph), "form": form, "opened": few, "home": settings.home()})
    if result is not None and result["difference"] > ALIKE:
        raise WrongResultsError(str(result["fault"]))


def fault_of_engine(engine: str, session: Runnable, reference: Runnable, batch: Batch) -> str:
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
        outputs = session.run(batch)
    except WrongResultsError as error:
        return str(error)
    try:
        require_alike(engine, outputs, reference.run(batch), reference, batch)
        require_correct_as_opened(session, batch)
    except ZooError as error:
        return str(error)
    return ""


def variants(
    inputs: Mapping[str, Port], batch: Batch, long: int = LONG_AXIS
) -> Iterator[tuple[dict[str, np.ndarray], bool]]:
    """Yields batches of several shapes for graphs with dynamic axes, from the smallest on.

    An engine may keep buffers of the first shape that it sees, so all dynamic axes begin with one element.

    Args:
        inputs: Inputs of the graph.
        batch: Example batch, whose samples and elements are repeated.
        long: Size of the dynamic axes of the long batches.

    Yields:
        A batch, and whether its outputs are compared; those of the first one are not, since statistics over one element
        may be all rounding. One sample of length 1 along the other dynamic axes; one sample and `long` samples; two
        samples, in full, of length `long`, and of about two thirds of their length. Inputs that share no sample axis
        keep their samples, and other axes vary alone.
    """
    shared = {port.shape[:1] for port in inputs.values()} == {(None,)}
    whole = {name: np.asarray(array, order="C") for name, array in batch.items()}
    free = {
        name: [axis for axis, size in enumerate(port.shape) if size is None and axis >= shared]
        for name, port in inputs.items()
    }
    one, two = (resized(whole, size if shared else 0) for size in (1, 2))
    if any(free.values()):
        yield {name: stretched(array, free[name], 1) for name, array in one.items()}, False
    if shared:
        yield one, True
        yield resized(whole, long), True
    yield two, True
    if any(free.values()):
        yield {name: stretched(array, free[name], long) for name, array in two.items()}, True
        shorter = {}
        for name, array in two.items():
            cuts = [slice(max(size * 2 // 3, 1) if k in free[name] else None) for k, size in enumerate(array.shape)]
            shorter[name] = np.asarray(array[tuple(cuts)], order="C")
        if any(shorter[name].shape != array.shape for name, array in two.items()):
            yield shorter, True


def stretched(array: NDArray[Any], axes: Sequence[int], size: int) -> NDArray[Any]:
    """Returns an array of another size along axes, with its elements repeated.

    Args:
        array: Array.
        axes: Axes, which keep their size where it is 0.
        size: Size of the axes.
    """
    for axis in axes:
        if array.shape[axis]:
            array = np.take(array, np.arange(size) % array.shape[axis], axis)
    return np.asarray(array, order="C")
