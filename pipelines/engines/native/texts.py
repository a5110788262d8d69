"""Native text encoder: tokens to embeddings or scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, one_line
from pipelines.engines.native.validation import Expected, Run, onnxruntime
from pipelines.kernels.transformer import native, program_file
from pipelines.kernels.transformer.text.program import TextProgram

if TYPE_CHECKING:
    import onnx_ir as ir

LENGTHS = "lengths"  # int64 [n]: tokens of each sample for `unvalidated`, with those that the mask excludes


def store(source: Path, path: Path) -> None:
    """Writes the program of an ONNX file, for `NativeTexts`.

    Args:
        source: ONNX file.
        path: File to write.

    Raises:
        RequestError: The graph cannot be mapped.
    """
    program_file.save(path, (_mapped(source),))


class NativeTexts:
    """Encodes texts of any lengths without padding; a result depends on its own text alone.

    Args:
        path: File that `store` wrote, ONNX file or model.
        threads: Number of batches computed in parallel over one copy of the weights.
        isa: Instruction set, see `kernels`; "": the best of the CPU.

    Attributes:
        longest: Largest number of tokens of a text.
        width: Number of values of a result.
        by_token: Whether each token has a result, instead of each text.

    Raises:
        RequestError: The graph cannot be mapped, or the kernels are missing.
    """

    def __init__(self, path: str | Path | ir.Model, threads: int = 1, isa: str = "") -> None:
        machine.require_threads(threads)
        if isinstance(path, str | Path) and Path(path).suffix == program_file.SUFFIX:
            (program,) = program_file.load(path)
        else:
            program = _mapped(path)
        self.threads, self.longest, self.width = threads, program.longest, program.width
        self.by_token = program.by_token
        self._types = program.types
        self._encoder = native.compile_texts(program, isa)

    def compute(
        self,
        tokens: NDArray[np.int32],
        types: NDArray[np.int32],
        lengths: NDArray[np.int64],
        attended: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32]:
        """Computes the results of texts; releases the GIL.

        Args:
            tokens: int32 [n], tokens of all texts, concatenated.
            types: int32 [n], token types; ignored by a network of one type.
            lengths: int64 [texts], 1 to `longest`.
            attended: How many of the first tokens of a text all its tokens attend to, int64 [texts]; None: all.

        Returns:
            float32 [texts, width], or [n, width] where each token has a result.

        Raises:
            RequestError: Tokens, types or lengths are out of range.
        """
        kinds = types if self._types > 1 else np.zeros_like(types)
        arrays = [np.ascontiguousarray(array, np.int32) for array in (tokens, kinds)]
        try:
            counts = [None if array is None else np.ascontiguousarray(array, np.int64) for array in (lengths, attended)]
            result: NDArray[np.float32] = self._encoder.compute(*arrays, counts[0], self.threads, counts[1])
        except (TypeError, ValueError) as error:
            raise RequestError(f"the native encoder cannot compute this: {one_line(error)}") from error
        return result


def unvalidated(path: str | Path | ir.Model, threads: int, output: str, ids: str, mask: str, types: str) -> Run:
    """Opens a text encoder for `validation.compare`.

    Args:
        path: See `NativeTexts`.
        threads: Number of threads.
        output: Name of the output.
        ids: Input of the token ids.
        mask: Input of the attention mask.
        types: Input of the token types, which a graph may lack.

    Returns:
        A function from padded batches, which may have `LENGTHS`, to outputs.
    """
    native = NativeTexts(path, threads)

    def run(batch: Batch) -> dict[str, NDArray[Any]]:
        chosen, attended = _tokens(batch, mask), (batch[mask] != 0).sum(axis=1)
        kinds = batch.get(types, np.zeros_like(batch[ids]))[chosen]
        result = native.compute(batch[ids][chosen], kinds, chosen.sum(axis=1), attended if LENGTHS in batch else None)
        if native.by_token:
            rows = np.zeros((*chosen.shape, native.width), np.float32)
            rows[chosen] = result
            result = rows
        return {output: result}

    return run


def unpadded(path: Path, threads: int, output: str, ids: str, mask: str, *_: str, optimize: bool = True) -> Expected:
    """Opens the reference of `unvalidated`, whose results of padding are zeros.

    Args:
        path: ONNX file.
        threads: Number of threads.
        output: Name of the output.
        ids: Input of the token ids.
        mask: Input of the attention mask.
        optimize: Whether ONNX Runtime optimizes the graph.

    Returns:
        A function to the outputs of a batch.
    """
    expect = onnxruntime(path, threads, optimize=optimize)

    def run(batch: Batch, results: Batch) -> dict[str, NDArray[Any]]:
        outputs = expect({name: array for name, array in batch.items() if name != LENGTHS}, results)
        if outputs[output].ndim == 3:  # a row a token
            outputs[output] = np.where(_tokens(batch, mask)[..., None], outputs[output], np.float32(0))
        return outputs

    return run


def _tokens(batch: Batch, mask: str) -> NDArray[np.bool_]:
    """Returns which columns are tokens: those of the mask, or by `LENGTHS` also those that are not attended to."""
    if LENGTHS not in batch:
        return np.asarray(batch[mask] != 0)
    return np.asarray(np.arange(batch[mask].shape[1]) < batch[LENGTHS][:, None])


def _mapped(model: str | Path | ir.Model) -> TextProgram:
    """Maps a frozen graph to a program; imports onnx and onnxruntime, unlike stored programs."""
    from pipelines.graph import io
    from pipelines.kernels.transformer.text.from_graph import text_program

    return text_program(io.load(model) if isinstance(model, str | Path) else model)
