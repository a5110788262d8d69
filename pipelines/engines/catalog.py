"""Every engine by its name, and plan files: `load` is the only opener."""

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
NATIVE = "native.onnx"  # of a model folder whose family has a form of its own for the native kernels


def load(
    path: str | Path, engine: str = AUTO, threads: int = 1, precision: str = "", model: bytes | None = None
) -> Session:
    """Open a model file, or a plan file that `zoo plan` wrote, with `threads` intra-op threads.

    engine: "onnxruntime", "openvino", "native", which takes the native.onnx of a model folder or the int8.onnx of an
    image classifier, or "auto": that which is quickest for each batch size (`QuickestSession`). A plan has chosen
    engines and threads itself.
    precision: "bf16" computes in bfloat16 what is float in the model; any other is only a name for what the file holds.
    model: the serialized model, where `path` only names the file that it was made from.
    Raises RequestError for an unknown or missing engine, a missing file, a model that the engine refuses, or a CPU or
    engine without bf16.
    """
    path = Path(path)
    if model is None and path.is_file() and zipfile.is_zipfile(path):
        if engine != AUTO:
            raise RequestError(f"{path} is a plan, which has chosen its engines; leave out the engine {engine}")
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
            with contextlib.suppress(ZooError):  # most graphs have no such form
                options |= native_options(path, threads)
        return QuickestSession(files.digest(path), options, threads)
    return stock.open_session(path, engine, threads, precision, model)


def native_options(path: Path, threads: int) -> dict[str, Option]:
    """The ways to run a native.onnx (`native_recommenders.options`) or a quantized image classifier
    (`native_images.options`) in native kernels.

    Raises RequestError for any other file, with the operator that has no form there, and without kernels.
    """
    if path.name == NATIVE or _names(path, DOMAIN):
        from pipelines.engines import native_recommenders  # with onnx, which the other native engines do without

        return native_recommenders.options(path, threads)
    from pipelines.engines import native_images

    return native_images.options(path, threads)


def _names(path: Path, text: str) -> bool:
    """Whether a file holds a text."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text.encode()) >= 0
