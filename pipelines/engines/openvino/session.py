"""OpenVINO's CPU plugin as a `Session`."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core import settings
from pipelines.core.batches import Batch, length
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines.contexts import Asynchronous
from pipelines.engines.openvino import forms
from pipelines.engines.openvino.functions import read_exact_results
from pipelines.engines.session import BF16, Executed, Port, brief

logger = logging.getLogger(__name__)

PROBE_BATCH = 1009  # batch size of a probe; a prime that no other axis has


def library() -> Any:
    """Imports OpenVINO with its telemetry disabled.

    Returns:
        The module `openvino`.
    """
    try:
        from openvino_telemetry.utils.opt_in_checker import ConsentCheckResult, OptInChecker
    except ImportError:
        pass  # there is none
    else:
        OptInChecker.check = lambda *_, **__: ConsentCheckResult.DECLINED
    import openvino

    return openvino


class Requests:
    """Infer requests of a compiled model; a request has the tensors of one run and belongs to one thread at a time.

    Args:
        compiled: Compiled model.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._idle = [compiled.create_infer_request()]  # appending to a list and popping from it are atomic

    @contextlib.contextmanager
    def one(self) -> Iterator[Any]:
        """Context with a request that no other thread uses.

        Yields:
            The infer request.
        """
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        try:
            yield request
        finally:
            self._idle.append(request)


class OpenVinoSession(Asynchronous):
    """Session of OpenVINO's CPU plugin with static shapes, one compilation per batch size; threads may share it.

    Dynamic shapes cost a third of the speed. The size of the first batch is compiled as it is, later sizes as the next
    power of two, and a batch is padded to a compiled size of up to twice its own, so few sizes are compiled. A graph
    whose inputs share no sample axis, or whose samples depend on each other, is compiled once, as it is. Compiled
    models are cached on disk.

    OpenVINO computes some graphs wrongly, or crashes, with static shapes. So every graph is validated against ONNX
    Runtime before its first use on a machine, in a child process, and runs in the first form that agrees, see
    `forms.correct_form`.

    Args:
        path: ONNX file.
        threads: Intra-op threads.
        model: Serialized model to open instead of the file, which then only serves as its name.
        precision: "bf16" computes float operators in bfloat16, other values in float32.
        form: One of `forms.FORMS`, which is not checked; "" chooses the first one that is correct.

    Raises:
        RequestError: OpenVINO refuses the model.
    """

    engine = "openvino"
    cached = True
    sizes: ClassVar[Sequence[int]] = forms.SIZES  # batch sizes that a graph is checked at, beside those in use

    def __init__(
        self, path: Path, threads: int, model: bytes | None = None, precision: str = "", *, form: str = ""
    ) -> None:
        ov = library()
        self.path, self.threads = path, threads
        self.graph = forms.Graph(path, model, threads, precision if precision == BF16 else "", self.cached)
        self._form, self._checked = form or forms.STATIC, bool(form)
        self._float_type = precision if precision == BF16 else "f32"  # the default is bf16 on CPUs that support it
        self._model: str | bytes = model if model is not None else str(path)
        self._core = ov.Core()
        try:
            if self.cached:
                self._core.set_property({"CACHE_DIR": self._cache()})
        except RuntimeError as error:
            logger.warning("openvino compiles without a cache: %s", brief(error))
        try:
            network = self._core.read_model(self._model)
        except Exception as error:  # openvino raises RuntimeError with a page of text
            raise RequestError(f"openvino cannot load {path}: {brief(error)}") from error
        self.inputs = {
            port.any_name: Port(
                np.dtype(port.element_type.to_dtype()),
                tuple(None if d.is_dynamic else d.get_length() for d in port.partial_shape),
            )
            for port in network.inputs
        }
        self._outputs = [port.any_name for port in network.outputs]  # a compiled one may have names of others, too
        firsts = {port.shape[:1] for port in self.inputs.values()}
        self.batched = len(firsts) == 1 and () not in firsts  # inputs such as states and scalars share no axis
        self._lock = threading.Lock()  # one thread compiles
        self._compiled: dict[int, Requests] = {}

    def _cache(self) -> str:
        """Folder of compiled models, whose own key does not hold all options; "" for dynamic shapes, see `forms`."""
        if self._form == forms.DYNAMIC:
            return ""
        place = settings.home() / "openvino"
        return str(place if self._form == forms.STATIC else place / str(forms.FORMS.index(self._form)))

    @functools.cached_property
    def _samples_first(self) -> bool:
        """Whether the first axis of every output may be the sample axis, so that padding can be cut off."""
        model = self._core.read_model(self._model)
        try:
            model.reshape(self._shapes(PROBE_BATCH))
        except RuntimeError:  # reported by the compilation
            return True
        return all(_first_size(port.partial_shape) in (None, PROBE_BATCH) for port in model.outputs)

    @property
    def pads(self) -> bool:
        """Whether a batch may be padded to a compiled size."""
        return self.batched and self._samples_first and self._form != forms.DYNAMIC

    def _size(self, count: int) -> int:
        """Returns the static batch size for `count` samples; 0 if the inputs share no sample axis, or stay dynamic."""
        if not self.batched or (count and self._form == forms.DYNAMIC):
            return 0
        if not self._compiled or not self._samples_first:
            return max(count, 1)
        compiled_sizes = [size for size in self._compiled if count <= size <= 2 * count]
        if compiled_sizes:
            return min(compiled_sizes)
        return 1 << max(count - 1, 0).bit_length()

    def _compile(self, batch: Batch) -> tuple[int, Requests]:
        """Returns the static batch size for a batch (0: none) and the requests of its compiled model."""
        count = length(batch) if self.batched else 0
        with self._lock:
            size = self._size(count)
            if size not in self._compiled:
                if not self._checked and self._take(forms.correct_form(self.graph, batch, size, self.sizes)):
                    size = self._size(count)
                if size not in self._compiled:
                    self._compiled[size] = Requests(self._made(self._core, size))
            return size, self._compiled[size]

    def _take(self, form: str) -> bool:
        """Runs the graph in another form from now on; returns whether it differs."""
        if form == self._form:
            return False
        self._form, self._compiled = form, {}
        if self.cached:
            with contextlib.suppress(RuntimeError):  # compiles without a cache
                self._core.set_property({"CACHE_DIR": self._cache()})
        return True

    def _made(self, core: Any, size: int) -> Any:
        model = core.read_model(self._model)
        read_exact_results(model)
        try:
            if size:
                model.reshape(self._shapes(size))
            return core.compile_model(model, "CPU", self._options() | forms.OPTIONS[self._form])
        except RuntimeError as error:
            shapes = f"batch size {size}" if size else "its own shapes"
            raise ZooError(f"openvino cannot compile {self.path} for {shapes}: {brief(error)}") from error

    def _shapes(self, size: int) -> dict[str, list[int]]:
        return {name: [size, *(-1 if d is None else d for d in port.shape[1:])] for name, port in self.inputs.items()}

    def _options(self) -> dict[str, Any]:
        return {
            "INFERENCE_NUM_THREADS": self.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": self._float_type,
            "ENABLE_CPU_PINNING": False,  # keeps the pinning of the caller (taskset)
        }

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Computes the outputs of a batch, see `Runnable.run`; batches shorter than a compiled size are padded."""
        if set(batch) != set(self.inputs):
            raise RequestError(f"found inputs {', '.join(batch) or 'none'}; {self.path} takes {', '.join(self.inputs)}")
        count, *others = {len(array) for array in batch.values()} if self.batched else {0}
        if others:  # padding would hide the difference
            raise RequestError(
                f"the inputs for {self.path} hold {count} and {others[0]} samples; expected the same number in each"
            )
        size, requests = self._compile(batch)
        if self.batched and not size and not count:  # engines differ on dynamic axes of size 0
            return {name: array[:0] for name, array in self.run({k: _pad(v, 1) for k, v in batch.items()}).items()}
        padded = {name: array if size in (0, count) else _pad(array, size) for name, array in batch.items()}
        try:
            with requests.one() as request:
                results = request.infer(padded, share_inputs=True)  # outputs are copied
        except RuntimeError as error:
            raise RequestError(f"openvino cannot run {self.path} on this batch: {brief(error)}") from error
        outputs = dict(zip(self._outputs, results.values(), strict=True))
        if size in (0, count):
            return outputs
        odd = [name for name, array in outputs.items() if array.shape[:1] != (size,)]
        if count and odd:
            self._samples_first = False
            return self.run(batch)
        return {name: array if name in odd else array[:count] for name, array in outputs.items()}

    def as_opened(self) -> Callable[[Batch], dict[str, NDArray[Any]]] | None:
        """Compiles the file as users open it, with dynamic shapes and no changes.

        Returns:
            A function from a batch to outputs, which raises ZooError if OpenVINO refuses the batch. None if no shape is
            dynamic or no operator is int8.

        Raises:
            ZooError: OpenVINO cannot compile the file.
        """
        core = library().Core()  # separate core: with two models of one core, later runs of the first crashed (2026.4)
        network = core.read_model(self._model)
        if not network.is_dynamic() or not any(op.get_type_name() == "FakeQuantize" for op in network.get_ops()):
            return None
        try:
            compiled = core.compile_model(network, "CPU", self._options())
        except RuntimeError as error:
            raise ZooError(f"openvino cannot compile {self.path} as it is: {brief(error)}") from error

        def run(batch: Batch) -> dict[str, NDArray[Any]]:
            try:
                return dict(zip(self._outputs, compiled.infer_new_request(dict(batch)).values(), strict=True))
            except RuntimeError as error:
                raise ZooError(f"openvino cannot run {self.path} as it is: {brief(error)}") from error

        return run

    def exported(self, size: int) -> bytes:
        """Returns the model compiled for this machine.

        Args:
            size: Batch size.

        Raises:
            ZooError: The graph does not run in the form that can be imported.
        """
        if self._form != forms.STATIC:
            raise ZooError(f"openvino runs {self.path} with {self._form}, which a plan does not hold")
        compiled = self._made(library().Core(), size)  # exports of cached models cannot be read (2026.4)
        blob: bytes = compiled.export_model().getvalue()
        return blob

    def executed(self, batch: Batch) -> list[Executed]:
        """Lists the operators of the compiled model, without constants and shape arithmetic, see `Session.executed`.

        Args:
            batch: Batch whose size is compiled.
        """
        _, requests = self._compile(batch)
        operators = []
        with requests.one() as request:
            runtime_model = request.get_compiled_model().get_runtime_model()
        for op in runtime_model.get_ordered_ops():
            info = op.get_rt_info()
            kind, precision = _text(info, "layerType"), _text(info, "runtimePrecision")
            if kind not in ("Const", "Input", "Output"):
                operators.append(
                    Executed(op.get_friendly_name(), kind, {"i8": "s8", "i32": "s32"}.get(precision, precision))
                )
        return operators


def _first_size(shape: Any) -> int | None:
    """Returns the first size of a partial shape; None if it is dynamic, 0 for a scalar."""
    if shape.rank.is_dynamic or (len(shape) and shape[0].is_dynamic):
        return None
    return int(shape[0].get_length()) if len(shape) else 0


def _text(info: Any, key: str) -> str:
    value = info[key] if key in info else ""  # noqa: SIM401 (openvino's map has no get)
    return str(value.astype(str) if hasattr(value, "astype") else value)


def _pad(array: NDArray[Any], size: int) -> NDArray[Any]:
    """Pads an array with zeros along the first axis up to `size`."""
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])
