"""The few native kernels that no library has (C++), each with a numpy reference beside it (`reference`).

`operators` says what they compute. Every kernel exists for AVX-512 VNNI, for AVX2 and in plain C++; the best that the CPU runs is chosen
when an object is made, or the one named by `isa`. All return the same bits.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.kernels.decoder import EncoderProgram, Program, build
from pipelines.kernels.operators import EmbeddingLayer, LinearLayer, Resize


def native() -> Any:
    """The extension module, or None where the installation could not build it (see `missing`)."""
    try:
        return importlib.import_module("pipelines.kernels._native")
    except ImportError:
        return None


def isas() -> list[str]:
    """The versions that this build and this CPU run, quickest first: among "avx512", "avx2", "portable"; [] without the extension."""
    module = native()
    return list(module.isas()) if module is not None else []


def missing() -> str:
    """Why there are no native kernels and what to do, in one line; "" where they are there."""
    if native() is not None:
        return ""
    try:
        reason = importlib.import_module("pipelines.kernels._unbuilt").REASON
    except ImportError:
        reason = f"no extension module for this Python in {__name__}"
    return f"{reason}; install a C++17 compiler (g++ 11 or newer), then run in the repository: pip install --force-reinstall --no-deps ."


def parallel_embedding(layer: EmbeddingLayer, isa: str = "") -> Any:
    """`EmbeddingLayer` as a native object: `(ids int32 or int64 [n, columns], numbers float32 [n, M] or None) -> (hidden, wide)`.

    All arrays C-contiguous and aligned; any n, also 0. The table is used where it lies, all else is copied. Raises, when called,
    IndexError for an id that is no row of its field, before the table is touched, and TypeError or ValueError for other arrays.
    RequestError without kernels.
    """
    columns = (layer.table, layer.columns, layer.offsets, layer.rows, layer.weight, layer.scale, layer.bias, layer.step)
    arrays = [plain(each) for each in columns]
    wide = None if layer.wide is None else plain(layer.wide)
    return _required().ParallelEmbedding(*arrays, layer.shift, wide, isa)


def linear(layer: LinearLayer, isa: str = "") -> Any:
    """`LinearLayer` as a native object, its weights packed: `(x uint8 [n, K], C-contiguous) -> uint8 or float32 [n, N]`."""
    return _required().Linear(plain(layer.weight), plain(layer.bias), plain(layer.scale), layer.zero, layer.low, isa)


def click_network(embedding: Any, layers: list[Any], sigmoid: bool) -> Any:
    """`parallel_embedding`, then `linear` layers of which the last gives one float, plus the wide sum, through a sigmoid if asked.

    Called like the embedding; returns float32 [n, 1]. Activations stay in the cache, nothing of Python runs in between.
    """
    return _required().ClickNetwork(embedding, tuple(layers), sigmoid)  # a tuple keeps its layers alive


def compiled(program: Program | EncoderProgram, isa: str = "", decoder: tuple[Program, Any] | None = None) -> Any:
    """A program as a native object, its weights packed once for all threads; see `translator.NativeTranslator` for what these do.

    decoder: a program and its native object, whose vocabulary may be the table of embeddings too (see `decoder.build`).
    """
    return build(_required(), program, isa, decoder)


def resize(image: Any, resizing: Resize, out: Any, isa: str = "") -> None:
    """`Resize` of image uint8 [H, W, 3] into out uint8 [3, h, w], both C-contiguous; h and w are those of the crop.

    Raises ValueError or TypeError for other arrays or a box that is empty or not within the image, RequestError without kernels.
    """
    _required().resize(plain(image), resizing.size, resizing.crop, resizing.bicubic, resizing.box, out, isa)


def plain(array: Any) -> Any:
    """`array` as the kernels take it, C-contiguous and aligned: itself, or a copy."""
    usable = isinstance(array, np.ndarray) and array.flags.c_contiguous and array.flags.aligned
    return array if usable else np.require(array, requirements=("C_CONTIGUOUS", "ALIGNED"))


def _required() -> Any:
    module = native()
    if module is None:
        raise RequestError(f"there are no native kernels here: {missing()}")
    return module
