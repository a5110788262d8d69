"""Every engine by its name: `load` opens a model file in any of them."""

from __future__ import annotations

from pathlib import Path

from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.engines import plan, stock
from pipelines.engines.session import Session

ENGINES = (*stock.STOCK, "native")


def load(path: str | Path, engine: str, threads: int = 1, precision: str = "", model: bytes | None = None) -> Session:
    """Open a model file in one engine with `threads` intra-op threads.

    engine: "onnxruntime", "openvino", or "native", which takes what the build's native.onnx holds. precision: "bf16"
    computes in bfloat16 what is float in the model; any other is only a name for what the file holds. model: the
    serialized model, where `path` only names the file that it was made from. Raises RequestError for an unknown or
    missing engine, a missing file, a model that the engine refuses, or a CPU or engine without bf16.
    """
    if engine not in ENGINES:
        raise RequestError(f"unknown engine {engine!r}; choose auto, {', '.join(ENGINES[:-1])} or {ENGINES[-1]}")
    if engine != "native":
        return stock.load(path, engine, threads, precision, model)
    machine.require_threads(threads)
    from pipelines.engines.native_clicks import NativeSession  # with onnx, which native translation does without

    try:
        return NativeSession(Path(path), threads)
    except ZooError:
        raise
    except Exception as error:  # a damaged graph fails anywhere
        raise RequestError(f"{path} is not readable ({one_line(error)}); remove it, and it is made anew") from error


def open_plan(path: str | Path) -> plan.PlannedSession:
    """Open a plan file that `zoo plan` wrote; see `pipelines.engines.plan.open_plan`."""
    return plan.open_plan(path, load)
