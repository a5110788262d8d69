"""Prepared programs of image networks, in files beside the ONNX files, to be copied with them.

`zoo quantize` and `zoo plan` write NAME.ISA.zoo beside NAME.onnx: the packed program of this instruction set, whose
results agree with ONNX Runtime's. Its first use on another machine neither packs nor validates. A program of another
file, version or instruction set is not used; copies of a file keep theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.engines.native import validation
from pipelines.kernels import extension, program_file
from pipelines.kernels.images.native import PackedProgram
from pipelines.kernels.images.parts.program import Part, Partition

SUFFIX = ".zoo"
logger = logging.getLogger(__name__)

Program = PackedProgram | Partition[PackedProgram]


@dataclass(frozen=True)
class PreparedProgram:
    """A packed program with validated results.

    Attributes:
        origin: Identity of its ONNX file, see `files.identity`, as pairs.
        validation: Version of the validation.
        program: The program.
        sizes: Sizes of the input that the program is for, if they are free in the file, see `images.packed`.
    """

    origin: tuple[tuple[str, Any], ...]
    validation: int
    program: Program
    sizes: tuple[int, ...]


CLASSES = {cls.__name__: cls for cls in (PackedProgram, Part, Partition, PreparedProgram)}


def path_of(path: Path) -> Path:
    """Returns the path of the prepared program of an ONNX file for the best instruction set of this CPU.

    Args:
        path: ONNX file.
    """
    return path.with_name(f"{path.stem}.{extension.isas()[0]}{SUFFIX}")


def load(path: Path, version: int) -> PreparedProgram | None:
    """Reads the prepared program of an ONNX file; None if there is none for the file as it is now.

    Args:
        path: ONNX file.
        version: Version of packed programs.

    Returns:
        The program, whose arrays are views of the memory-mapped file.
    """
    if not (extension.isas() and path_of(path).is_file()):
        return None
    try:
        own: PreparedProgram
        (own,) = program_file.load(path_of(path), CLASSES, version)
        if own.validation == validation.VERSION and files.same(path, dict(own.origin)):
            return own
        logger.info("%s belongs to another file; it is not used", path_of(path))
    except (RequestError, AttributeError, KeyError, TypeError, ValueError) as error:
        logger.info("the prepared program of %s is not used: %s", path, error)
    return None


def save(path: Path, program: Program, version: int, sizes: Sequence[int] = ()) -> Path:
    """Writes the prepared program of an ONNX file beside it.

    Args:
        path: ONNX file.
        program: Its packed program, whose results were validated.
        version: Version of packed programs.
        sizes: See `PreparedProgram`.

    Returns:
        Path of the program.
    """
    own = PreparedProgram(tuple(files.identity(path).items()), validation.VERSION, program, tuple(sizes))
    program_file.save(path_of(path), (own,), CLASSES, version)
    return path_of(path)
