"""The native text encoder for users: tokens to vectors or scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.errors import RequestError, one_line
from pipelines.kernels.transformer import native, program_file
from pipelines.kernels.transformer.text.program import TextProgram

if TYPE_CHECKING:
    import onnx_ir as ir


def store(source: Path, path: Path) -> None:
    """Write the program of an ONNX file to `path`, for `NativeTexts`. Raises RequestError for a graph that cannot be
    mapped.
    """
    program_file.save(path, (_mapped(source),))


class NativeTexts:
    """Computes texts of any lengths, one after the other in memory: nothing is padded, and a result depends on its own
    text alone.

    path: a file that `store` wrote, an ONNX file or a model. threads: so many batches are computed side by side, over
    one copy of the weights. isa: see `kernels`. Raises RequestError for a graph that cannot be mapped, or without
    kernels.
    """

    def __init__(self, path: str | Path | ir.Model, threads: int = 1, isa: str = "") -> None:
        machine.require_threads(threads)
        if isinstance(path, str | Path) and Path(path).suffix == program_file.SUFFIX:
            (program,) = program_file.load(path)
        else:
            program = _mapped(path)
        self.threads, self.longest, self.width = threads, program.longest, program.width
        self._types = program.types
        self._encoder = native.compile_texts(program, isa)

    def compute(
        self, tokens: NDArray[np.int32], types: NDArray[np.int32], lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The results of texts, float32 [texts, width].

        tokens, types: int32 [n], of all texts one after the other; types count for a network of several;
        lengths: int64 [texts], 1 to `longest` each. Python
        runs on meanwhile. Raises RequestError for others.
        """
        kinds = types if self._types > 1 else np.zeros_like(types)
        arrays = [np.ascontiguousarray(each, np.int32) for each in (tokens, kinds)]
        try:
            found: NDArray[np.float32] = self._encoder.compute(
                *arrays, np.ascontiguousarray(lengths, np.int64), self.threads
            )
        except (TypeError, ValueError) as error:
            raise RequestError(f"the native encoder cannot compute this: {one_line(error)}") from error
        return found


def _mapped(model: str | Path | ir.Model) -> TextProgram:
    """The program of a frozen graph. Needs onnx and onnxruntime, which a stored one does not."""
    from pipelines.graph import io
    from pipelines.kernels.transformer.text.from_graph import text_program

    return text_program(io.load(model) if isinstance(model, str | Path) else model)
