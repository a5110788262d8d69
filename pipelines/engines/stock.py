"""The stock engines ONNX Runtime and OpenVINO: availability, precisions, sessions."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.engines.openvino.session import OpenVinoSession
from pipelines.engines.session import BF16, Session

STOCK: dict[str, type[OnnxRuntimeSession] | type[OpenVinoSession]] = {
    "onnxruntime": OnnxRuntimeSession,
    "openvino": OpenVinoSession,
}


def available() -> list[str]:
    """Returns the installed stock engines, in order of preference."""
    return [name for name in STOCK if importlib.util.find_spec(name) is not None]


def require_installed(*engines: str) -> None:
    """Checks that stock engines are installed.

    Args:
        *engines: Names of engines; others than stock engines are ignored.

    Raises:
        RequestError: A stock engine is not installed.
    """
    for engine in engines:
        if engine in STOCK and engine not in available():
            package = "int8-zoo[openvino]" if engine == "openvino" else engine  # OpenVINO is an extra
            raise RequestError(f"the engine {engine} is not installed; run: pip install '{package}'")


def exact(engine: str) -> bool:
    """Returns whether an engine sums int8 products without saturation on this CPU.

    Args:
        engine: Name of the engine; OpenVINO saturates without VNNI.
    """
    return engine != "openvino" or machine.has_vnni()


def computes(engine: str, precision: str) -> bool:
    """Returns whether an engine has a precision: only OpenVINO has bfloat16.

    Args:
        engine: Name of the engine.
        precision: Name of the precision.
    """
    return precision != BF16 or engine == "openvino"


def require_precision(precision: str, engine: str = "openvino") -> None:
    """Checks that an engine and this CPU compute in a precision.

    Args:
        precision: Name of the precision.
        engine: Name of the engine.

    Raises:
        RequestError: The engine or the CPU does not have the precision, or the engine is not installed.
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
    """Opens a model file in a stock engine.

    Args:
        path: Model file.
        engine: "onnxruntime" or "openvino".
        threads: Intra-op threads.
        precision: "bf16" computes float operators in bfloat16; other values only name the precision of the file.
        model: Serialized model to open instead of the file, which then only serves as its name.

    Returns:
        The session.

    Raises:
        RequestError: The engine is unknown, missing or refuses the model, the file is missing, or the CPU or engine has
            no bf16.
    """
    if engine not in STOCK:
        raise RequestError(f"unknown engine {engine!r}; choose auto, {' or '.join(STOCK)}")
    require_installed(engine)
    machine.require_threads(threads)
    if not Path(path).is_file():
        raise RequestError(f"no model file at {path}")
    require_precision(precision, engine)
    if engine == OpenVinoSession.engine and model is None and Path(path).is_symlink():  # as in the cache of a hub
        from pipelines.graph import tensor_sizes  # imports onnx

        model = tensor_sizes.without_links(Path(path))
    if precision == BF16:
        return OpenVinoSession(Path(path), threads, model, precision)
    return STOCK[engine](Path(path), threads, model)


def candidates(path: str | Path, threads: int, precision: str = "") -> dict[str, Callable[[], Session]]:
    """Returns the available stock engines that compute a precision exactly on this CPU.

    OpenVINO copies the weights, and is left out where they may take more than the memory for tables.

    Args:
        path: Model file.
        threads: Intra-op threads.
        precision: Name of the precision.

    Returns:
        Opener by engine.
    """
    names = [name for name in available() if computes(name, precision) and (precision != "int8" or exact(name))]
    if precision != BF16 and "onnxruntime" in names and machine.beyond_memory(Path(path)):
        names = ["onnxruntime"]
    return {name: functools.partial(open_session, path, name, threads, precision) for name in names}
