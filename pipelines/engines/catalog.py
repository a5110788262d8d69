"""All engines by name, and plan files: `load` opens a session of either."""

from __future__ import annotations

import contextlib
import mmap
import zipfile
from pathlib import Path

from pipelines.core import files, machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines import plan, stock
from pipelines.engines.quickest import Option, QuickestSession
from pipelines.engines.session import BF16, Session
from pipelines.kernels import extension
from pipelines.kernels.recommenders.operators import DOMAIN

ENGINES = (*stock.STOCK, "native")
AUTO = "auto"
NATIVE = "native.onnx"  # file of a model folder, lowered for the native kernels


def load(
    path: str | Path, engine: str = AUTO, threads: int = 1, precision: str = "", model: bytes | None = None
) -> Session:
    """Opens a model file, or a plan file of `zoo plan`.

    Args:
        path: Model file or plan file. "native" takes the native.onnx of a model folder or a quantized image network.
        engine: "onnxruntime", "openvino", "native", or "auto" for the fastest engine per batch size
            (`QuickestSession`). A plan has already chosen its engines.
        threads: Intra-op threads; a plan has its own.
        precision: "bf16" computes the float operators in bfloat16; other values only name the precision of the file.
        model: Serialized model to open instead of the file, which then only serves as its name.

    Returns:
        The session.

    Raises:
        RequestError: The engine is unknown, missing or refuses the model, the file is missing, or the CPU or engine has
            no bf16.
    """
    path = Path(path)
    if model is None and path.is_file() and zipfile.is_zipfile(path):
        if engine != AUTO:
            raise RequestError(f"{path} is a plan file, which determines the engine; leave out the engine {engine}")
        return plan.open_plan(path, load)
    if engine not in (*ENGINES, AUTO):
        raise RequestError(f"unknown engine {engine!r}; choose auto, {', '.join(ENGINES[:-1])} or {ENGINES[-1]}")
    machine.require_threads(threads)
    if engine in ("native", AUTO) and not path.is_file():
        raise RequestError(f"no model file at {path}")
    if engine == "native":
        return QuickestSession(f"native {files.digest(path)}", native_options(path, threads), threads)
    if engine == AUTO:
        openers = stock.candidates(path, threads, precision)
        options = {name: Option(opener) for name, opener in openers.items()}
        if precision != BF16 and extension.isas():
            with contextlib.suppress(ZooError):  # the native kernels support few graphs
                options |= native_options(path, threads)
        return QuickestSession(files.digest(path), options, threads)
    return stock.open_session(path, engine, threads, precision, model)


def native_options(path: Path, threads: int) -> dict[str, Option]:
    """Returns the ways to run a native.onnx or a quantized image network in native kernels.

    Args:
        path: Model file.
        threads: Intra-op threads.

    Returns:
        Options by name, for `QuickestSession`.

    Raises:
        RequestError: The kernels are missing, or the graph cannot be mapped; the message names the operator.
    """
    if path.name == NATIVE or _names(path, DOMAIN):
        from pipelines.engines.native import recommenders  # imports onnx, unlike the other native engines

        return recommenders.options(path, threads)
    from pipelines.engines.native import images

    return images.options(path, threads)


def _names(path: Path, text: str) -> bool:
    """Whether a file holds a text."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text.encode()) >= 0
