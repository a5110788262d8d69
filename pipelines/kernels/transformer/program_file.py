"""Files of Transformer programs, in the format of `pipelines.kernels.program_file`."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from pipelines.kernels import program_file
from pipelines.kernels.transformer.operations import Disentangled, HeadNorm, Operation, Rotary, RowLinear, StaticQParams
from pipelines.kernels.transformer.program import DecoderProgram, EncoderProgram
from pipelines.kernels.transformer.text.program import HeadStep, TextProgram

# The key under which programs are cached. Bump it when the layout of this file, the dataclasses of `operations` or what
# `from_graph` makes of a graph change; tests/pipelines/kernels/transformer/test_program_file.py fails where that is
# forgotten.
VERSION = 6
SUFFIX = ".zoo"
_PARTS = (EncoderProgram, DecoderProgram, TextProgram, RowLinear, StaticQParams, HeadNorm, Rotary, Disentangled)
CLASSES = {cls.__name__: cls for cls in (*_PARTS, *typing.get_args(Operation), *typing.get_args(HeadStep))}


def save(path: Path, programs: tuple[EncoderProgram, DecoderProgram] | tuple[TextProgram]) -> None:
    """Writes the programs of a model atomically.

    Args:
        path: The file.
        programs: Encoder and decoder, or a text program.
    """
    program_file.save(path, programs, CLASSES, VERSION)


def load(path: str | Path) -> Any:
    """Opens a file of programs.

    Args:
        path: A file that `save` wrote.

    Returns:
        The programs, a tuple; their arrays are read-only views of the file.

    Raises:
        RequestError: The file is missing, damaged or of another version.
    """
    return program_file.load(path, CLASSES, VERSION)
