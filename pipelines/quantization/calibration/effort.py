"""How much work `auto_calibrate` does, from "fast" to "best", and the samples that it draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pipelines.core.batches import Batch, length
from pipelines.core.errors import RequestError
from pipelines.graph import query
from pipelines.quantization.calibration.calibrate import Observation
from pipelines.quantization.calibration.layerwise import sample_chunks
from pipelines.quantization.ptq import HELD_OUT

HELD_BACK = 3  # one of three samples is held out, up to HELD_OUT
CHEAP = 2**22  # elements of activations up to which a step takes more samples than its effort says
SMALL = 2**19  # bytes of weights of networks that are observed on all samples
MAX_HELD_OUT_ELEMENTS = 2**24  # maximum input elements of held-out samples
RESULTS = 2**26  # bytes of results of the float model that are kept
COMPUTED = 2**29  # elements of activations on the samples among which the worst ones are searched


@dataclass(frozen=True)
class Effort:
    """Work of an automatic calibration.

    Attributes:
        observed: Maximum number of samples that ranges are observed on; None: all, as for networks below `SMALL`.
        evaluated: Maximum number of samples that candidates of ranges are evaluated on.
        lowest: Maximum number of samples among which the worst ones of close candidates are searched; 0: not searched.
        counted: Maximum number of samples of the statistics of channels, see `channel_statistics`; None: all but the
            held-out ones.
        corrected: Maximum number of samples of the corrections; None: all but the held-out ones; 0: biases alone
            are corrected, from mean inputs (`mean_bias`).
        positions: Maximum number of positions per channel of the corrections; None: the default of `correct_layers`.
        thorough: Evaluate every candidate on all samples, each operator computed as the graph states it. Otherwise
            candidates are evaluated on a part until they are close, in onnxruntime's optimized graphs.
    """

    observed: int | None
    evaluated: int
    lowest: int
    counted: int | None
    corrected: int | None
    positions: int | None
    thorough: bool

    def at_least(self, max_samples: int, elements: float) -> int:
        """Returns a maximum number of samples, raised where samples are small, as in networks without positions.

        Args:
            max_samples: Maximum number of samples; 0: none.
            elements: Number of elements of the activations of one sample.
        """
        return max(max_samples, int(CHEAP / max(elements, 1))) if max_samples else 0

    def observed_of(self, model: ir.Model) -> int | None:
        """Returns the maximum number of samples that the ranges of a model are observed on; None: all.

        Args:
            model: Float model.
        """
        return self.observed if query.weight_bytes(model) >= SMALL else None

    def lowest_of(self, model: ir.Model, observation: Observation) -> int:
        """Returns `lowest`, or fewer: as many samples as results may be kept of, and computed unless it is thorough.

        Args:
            model: Float model.
            observation: Observation of the model.
        """
        kept = 4 * sum(
            observation.histograms[str(output.name)].count / observation.samples
            for output in model.graph.outputs
            if str(output.name) in observation.histograms
        )
        computed = np.inf if self.thorough else COMPUTED / max(elements(observation), 1)
        return int(min(self.lowest, RESULTS / max(kept, 1), computed))


EFFORTS = {
    "fast": Effort(observed=64, evaluated=16, lowest=0, counted=32, corrected=0, positions=None, thorough=False),
    "default": Effort(
        observed=None, evaluated=64, lowest=256, counted=32, corrected=32, positions=2**12, thorough=False
    ),
    "best": Effort(
        observed=None, evaluated=128, lowest=1024, counted=None, corrected=None, positions=None, thorough=True
    ),
}


def elements(observation: Observation) -> float:
    """Returns the number of elements of the activations of one sample.

    Args:
        observation: Observation of the model.
    """
    return sum(histogram.count for histogram in observation.histograms.values()) / observation.samples


def effort_of(name: str) -> Effort:
    """Returns an effort by name.

    Args:
        name: "fast", "default" or "best".

    Returns:
        The effort.

    Raises:
        RequestError: There is none of this name.
    """
    if name not in EFFORTS:
        raise RequestError(f"found the effort {name!r}, expected one of {', '.join(EFFORTS)}")
    return EFFORTS[name]


@dataclass(frozen=True)
class _Fitting:
    """Fitting samples in chunks for repeated iteration: all but one of every `stride` chunks."""

    model: ir.Model
    samples: Iterable[Batch]
    stride: int

    def __iter__(self) -> Iterator[Batch]:
        return (
            chunk
            for index, chunk in enumerate(sample_chunks(self.model, self.samples))
            if index % self.stride != self.stride // 2
        )


def split_held_out(model: ir.Model, samples: Iterable[Batch], count: int) -> tuple[list[Batch], Iterable[Batch]]:
    """Splits samples into held-out and fitting samples, in chunks; with a single chunk both are the same.

    Held-out samples are drawn evenly, because neighbouring samples may be alike.

    Args:
        model: Float model.
        samples: Batches, iterated several times.
        count: Number of samples.

    Returns:
        Held-out samples, in memory, and the remaining samples.
    """
    stride = stride_of(model, samples, count, min(count // HELD_BACK, HELD_OUT))
    held_out = _drawn(model, samples, stride)
    return held_out, _Fitting(model, samples, stride) if stride > 1 else held_out


def stride_of(model: ir.Model, samples: Iterable[Batch], count: int, max_samples: int) -> int:
    """Returns the stride of chunks that draws evenly.

    Args:
        model: Float model.
        samples: Batches.
        count: Number of samples.
        max_samples: Maximum number of samples to draw; fewer if they have more than `MAX_HELD_OUT_ELEMENTS` elements.

    Returns:
        The stride, at least 1.
    """
    first = next(iter(sample_chunks(model, samples)))
    size, elements = length(first), max(sum(array.size for array in first.values()), 1)
    chunks = -(-count // size)
    return max(chunks // max(min(max_samples // size, MAX_HELD_OUT_ELEMENTS // elements), 1), 1)


def _drawn(model: ir.Model, samples: Iterable[Batch], stride: int) -> list[Batch]:
    """Returns one of every `stride` chunks of the samples."""
    return [chunk for index, chunk in enumerate(sample_chunks(model, samples)) if index % stride == stride // 2]


def fitting_head(fitting: Iterable[Batch]) -> list[Batch]:
    """Returns the first chunks of `fitting`, at most `HELD_OUT` samples.

    Args:
        fitting: Batches of fitting samples.

    Returns:
        The chunks, in memory.
    """
    head: list[Batch] = []
    for chunk in fitting:
        if head and sum(map(length, head)) + length(chunk) > HELD_OUT:
            break
        head.append(chunk)
    return head
