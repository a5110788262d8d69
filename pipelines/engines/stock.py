"""The stock engines, onnxruntime and OpenVINO: which are there, what they compute, and how they are opened."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.engines.openvino import OpenVinoSession
from pipelines.engines.session import BF16, Session

STOCK: dict[str, type[OnnxRuntimeSession] | type[OpenVinoSession]] = {
    "onnxruntime": OnnxRuntimeSession,
    "openvino": OpenVinoSession,
}


def available() -> list[str]:
    """The engines whose library is installed, in order of preference."""
    return [name for name in STOCK if importlib.util.find_spec(name) is not None]


def require_installed(*engines: str) -> None:
    """Raise RequestError where one of these is a stock engine whose library is not installed."""
    for engine in engines:
        if engine in STOCK and engine not in available():
            wanted = "int8-zoo[openvino]" if engine == "openvino" else engine  # the one comes as an extra
            raise RequestError(f"the engine {engine} is not installed; run: pip install '{wanted}'")


def exact(engine: str) -> bool:
    """Whether an engine sums int8 products without saturating on this CPU, whatever the weights: without VNNI, OpenVINO
    does not.
    """
    return engine != "openvino" or machine.has_vnni()


def computes(engine: str, precision: str) -> bool:
    """Whether an engine has a precision: bfloat16 is OpenVINO's alone."""
    return precision != BF16 or engine == "openvino"


def require_precision(precision: str, engine: str = "openvino") -> None:
    """Raise RequestError where the engine or this CPU does not compute in `precision`, or the engine that does is not
    installed.
    """
    if not computes(engine, precision):
        raise RequestError(f"the engine {engine} does not compute in {precision}; choose openvino, or fp32 or int8")
    if precision == BF16 and not machine.has_bf16():
        raise RequestError(
            f"{machine.cpu()['name']} does not compute in bf16 (no avx512_bf16, no amx_bf16); choose fp32 or int8"
        )
    if precision == BF16:
        require_installed(engine)


def open_session(
    path: str | Path, engine: str, threads: int = 1, precision: str = "", model: bytes | None = None
) -> Session:
    """Open a model file in one engine ("onnxruntime" or "openvino") with `threads` intra-op threads.

    precision: "bf16" computes in bfloat16 what is float in the model; any other is only a name for what the file holds.
    model: the serialized model, where `path` only names the file that it was made from. Raises RequestError for an
    unknown or missing engine, a missing file, a model that the engine refuses, or a CPU or engine without bf16.
    """
    if engine not in STOCK:
        raise RequestError(f"unknown engine {engine!r}; choose auto, {' or '.join(STOCK)}")
    require_installed(engine)
    machine.require_threads(threads)
    if not Path(path).is_file():
        raise RequestError(f"no model file at {path}")
    require_precision(precision, engine)
    if precision == BF16:
        return OpenVinoSession(Path(path), threads, model, precision)
    return STOCK[engine](Path(path), threads, model)


def candidates(path: str | Path, threads: int, precision: str = "") -> dict[str, Callable[[], Session]]:
    """Every available stock engine that has the precision, exactly on this CPU, and how to open it on one model
    file.
    """
    names = [name for name in available() if computes(name, precision) and (precision != "int8" or exact(name))]
    return {name: functools.partial(open_session, path, name, threads, precision) for name in names}
