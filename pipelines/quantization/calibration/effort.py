"""How much work `auto_calibrate` does, from "fast" to "best"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.quantization.calibration.layerwise import CHUNK, sample_chunks


@dataclass(frozen=True)
class Effort:
    """Work of an automatic calibration.

    Attributes:
        observed: Maximum number of samples that ranges are observed on; None: all.
        judged: Maximum number of samples that candidates of ranges are evaluated on.
        lowest: Maximum number of samples among which the worst ones of close candidates are searched; 0: not searched.
        counted: Maximum number of samples of the statistics of channels, see `channel_statistics`; None: all but the
            held-out ones.
        corrected: Maximum number of samples of the corrections; None: all but the held-out ones; 0: no corrections.
        positions: Maximum number of positions per channel of the corrections, see `correct_layers`; None: all that it
            takes by itself.
        thorough: Evaluate every candidate on all samples, each operator computed as the graph states it. Otherwise
            candidates are evaluated on a part until they are close, in onnxruntime's optimized graphs.
    """

    observed: int | None
    judged: int
    lowest: int
    counted: int | None
    corrected: int | None
    positions: int | None
    thorough: bool


EFFORTS = {
    "fast": Effort(observed=128, judged=8, lowest=0, counted=None, corrected=0, positions=None, thorough=False),
    "default": Effort(observed=None, judged=64, lowest=256, counted=32, corrected=32, positions=2**12, thorough=False),
    "best": Effort(observed=None, judged=128, lowest=1024, counted=None, corrected=None, positions=None, thorough=True),
}


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
class DrawnSamples:
    """An evenly drawn part of samples, in chunks, for repeated iteration; neighbouring samples may be alike.

    Attributes:
        model: Float model.
        samples: Batches, iterated several times.
        stride: One of so many chunks is drawn.
    """

    model: ir.Model
    samples: Iterable[Batch]
    stride: int

    def __iter__(self) -> Iterator[Batch]:
        return (chunk for at, chunk in enumerate(sample_chunks(self.model, self.samples)) if at % self.stride == 0)


def drawn(model: ir.Model, samples: Iterable[Batch], count: int | None, most: int | None) -> Iterable[Batch]:
    """Draws samples evenly.

    Args:
        model: Float model.
        samples: Batches, iterated several times.
        count: Number of samples; None: unknown, nothing is left out.
        most: Maximum number of samples; None: all.

    Returns:
        `samples`, or a part of them with at least one chunk.
    """
    if most is None or count is None or count <= most:
        return samples
    return DrawnSamples(model, samples, -(-count // max(most, CHUNK)))
