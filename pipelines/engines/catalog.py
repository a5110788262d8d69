"""All engines by name, and plan files: `load` opens a session of either."""

from __future__ import annotations

import contextlib
import mmap
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.core import files, machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines import plan, stock
from pipelines.engines.quickest import Option, QuickestSession
from pipelines.engines.session import BF16, Session
from pipelines.kernels import extension
from pipelines.kernels.recommenders.operators import DOMAIN

ENGINES = (*stock.STOCK, "native")
AUTO = "auto"
FORM = ":"  # between the engine native and the name of a form
NATIVE = "native.onnx"  # file of a model folder, lowered for the native kernels


def load(
    path: str | Path, engine: str = AUTO, threads: int = 1, precision: str = "", model: bytes | None = None
) -> Session:
    """Opens a model file, or a plan file of `zoo plan`.

    Args:
        path: Model file or plan file. "native" takes the native.onnx of a model folder or a quantized image network.
        engine: "onnxruntime", "openvino", "native", or "auto" for the fastest engine per batch size
            (`QuickestSession`). "native:FORM" is one form of a recommender. A plan has already chosen its engines.
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
    if base_engine(engine) not in (*ENGINES, AUTO) or engine.startswith(AUTO + FORM):
        raise RequestError(f"unknown engine {engine!r}; choose auto, {', '.join(ENGINES[:-1])} or {ENGINES[-1]}")
    machine.require_threads(threads)
    if base_engine(engine) in ("native", AUTO) and not path.is_file():
        raise RequestError(f"no model file at {path}")
    if base_engine(engine) == "native":
        return QuickestSession("", native_options(path, threads, engine), threads)  # one option, which is not timed
    if engine == AUTO:
        openers = stock.candidates(path, threads, precision)
        options = {name: Option(opener) for name, opener in openers.items()}
        if precision != BF16 and extension.isas():
            with contextlib.suppress(ZooError):  # the native kernels support few graphs
                options |= native_options(path, threads)
        return QuickestSession(files.digest(path), options, threads)
    return stock.open_session(path, engine, threads, precision, model)


def base_engine(engine: str) -> str:
    """Returns the name of an engine without a form: "native" of "native:int8".

    Args:
        engine: Name of the engine.
    """
    base, _, form = engine.partition(FORM)
    return base if base == "native" and form else engine


def native_options(path: Path, threads: int, engine: str = "native") -> dict[str, Option]:
    """Returns the ways to run a native.onnx or a quantized image network in native kernels.

    Args:
        path: Model file.
        threads: Intra-op threads.
        engine: "native", or "native:FORM" for one form.

    Returns:
        Options by name, for `QuickestSession`.

    Raises:
        RequestError: The kernels are missing, the graph cannot be mapped (the message names the operator), or it has no
            such form.
    """
    form = engine.partition(FORM)[2]
    if _is_recommender(path):
        from pipelines.engines.native import forms  # imports onnx, unlike the other native engines

        return forms.options(path, threads, form)
    from pipelines.engines.native import images

    if form:
        raise RequestError(f"found the form {form} for {path}, which has one form; leave --form out")
    return images.options(path, threads)


def prepare(path: Path, batch: Batch) -> Path | None:
    """Writes the native engine's program of an image network beside its file, see `pipelines.engines.native.prepared`.

    Args:
        path: ONNX file.
        batch: Example batch.

    Returns:
        Path of the program; None if the native kernels do not run the file, or not as ONNX Runtime does.
    """
    if _is_recommender(path):
        return None
    from pipelines.engines.native import images

    return images.prepare(path, batch)


def chosen_form(path: Path) -> str:
    """Returns the engine native with the form of a file that runs on this machine; "native" if it has one form.

    Args:
        path: Model file.
    """
    if path.name != NATIVE:
        return "native"
    from pipelines.engines.native.forms import Forms

    forms = Forms(path)
    return f"native{FORM}{forms.chosen}" if len(forms.names) > 1 else "native"


def _forms(path: Path) -> list[str]:
    """The names of the forms of a native.onnx; [] for other files."""
    if path.name != NATIVE:
        return []
    from pipelines.engines.native.forms import Forms

    return Forms(path).names


def native_candidates(
    path: Path | Callable[[], Path], precision: str, names: Sequence[str]
) -> tuple[list[plan.Candidate], list[str]]:
    """Returns the candidates of the native kernels for a plan, one a form.

    Args:
        path: Model file, or a function that makes it.
        precision: Precision of the file.
        names: Requested engines.

    Returns:
        (candidates, why requested ones do not support the file).
    """
    by_name: dict[str, plan.Candidate] = {}
    failed = []
    for name in names:
        if base_engine(name) != "native":
            continue
        try:
            path = path if isinstance(path, Path) else path()
            native_options(path, 1, name)
            forms = [f"native{FORM}{form}" for form in _forms(path)] if name == "native" else []
            by_name |= {form: plan.Candidate(form, precision, path) for form in (forms if len(forms) > 1 else [name])}
        except ZooError as error:
            failed.append(f"{name}: {error}")
    return list(by_name.values()), failed


def _is_recommender(path: Path) -> bool:
    """Whether a file holds a click program."""
    if path.name == NATIVE:
        return True
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(DOMAIN.encode()) >= 0
