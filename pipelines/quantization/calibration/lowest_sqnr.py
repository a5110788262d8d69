"""SQNR of the worst samples, which a mean hides: a range that clips one sample of a hundred looks good on the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from pipelines.core.batches import Batch
from pipelines.core.progress import progress
from pipelines.graph import reference_session
from pipelines.quantization.calibration.compared_outputs import Array, ComparedOutputs, decibel, per_sample
from pipelines.quantization.calibration.layerwise import sample_chunks

FEWEST, SHARE = 2, 64  # the worst samples: one of `SHARE`, at least `FEWEST`
ROOM = 2**26  # bytes of kept outputs of the float model


class LowestSqnr:
    """Mean SQNR of the worst samples of int8 models.

    Args:
        model: Float model.
        samples: Batches, array [samples, ...] for every graph input; iterated several times.
        optimized: Run the models with onnxruntime's optimizations, which is quicker.
    """

    def __init__(self, model: ir.Model, samples: Iterable[Batch], optimized: bool = False) -> None:
        self._model, self._samples, self._compared = model, samples, ComparedOutputs.of(model)
        self._options = reference_session.options(optimized, lean=True, prepack=optimized)
        self._exact: list[list[Array]] = []  # outputs of the float model for the first batches, up to `ROOM` bytes

    def _session(self, model: ir.Model) -> ort.InferenceSession:
        return reference_session.session(self._compared.cut(model), "its evaluation needs", self._options)

    def __call__(self, candidates: Sequence[ir.Model]) -> list[float]:
        """Computes the SQNR of int8 models; the memory does not grow with the samples.

        Args:
            candidates: Int8 models.

        Returns:
            For every candidate the mean SQNR in dB of its samples of lowest SQNR, one of `SHARE`.
        """
        exact: ort.InferenceSession | None = None
        sessions = [self._session(each) for each in candidates]
        sqnr: list[list[float]] = [[] for _ in candidates]
        with progress("evaluating the worst samples") as advance:
            for number, batch in enumerate(sample_chunks(self._model, self._samples)):
                if number < len(self._exact):
                    outputs = self._exact[number]
                else:
                    exact = exact or self._session(self._model)
                    outputs = reference_session.run(exact, batch)
                    if number == len(self._exact) and (number + 1) * sum(x.nbytes for x in outputs) <= ROOM:
                        self._exact.append(outputs)
                for session, single in zip(sessions, sqnr, strict=True):
                    pairs = per_sample(batch, outputs, reference_session.run(session, batch))
                    single += [decibel(self._compared.error([pair])) for pair in pairs]
                advance(1)
        return [float(np.sort(single)[: max(len(single) // SHARE, FEWEST)].mean()) for single in sqnr]
