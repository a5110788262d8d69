"""Image networks in native kernels, with the float remainder of a detector in ONNX Runtime.

Any quantized graph that maps onto an `ImageProgram` runs here. Of other graphs native regions run here, and the parts
between them in ONNX Runtime, see `partition`.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.derived import derived
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.engines.agreement import WrongResultsError
from pipelines.engines.contexts import Asynchronous
from pipelines.engines.native import prepared
from pipelines.engines.native.prepared import CLASSES, SUFFIX, PreparedProgram, Program
from pipelines.engines.native.validation import EXACT, NativeModel, Run, textured, validate
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.engines.quickest import Option
from pipelines.engines.session import BatchError, Executed, Port
from pipelines.kernels import extension, program_file
from pipelines.kernels.arrays import contiguous
from pipelines.kernels.images.native import PackedProgram, pack
from pipelines.kernels.images.parts.program import Part, Partition
from pipelines.kernels.images.program import ImageProgram, split_values

if TYPE_CHECKING:
    import onnx_ir as ir

# Version of the files of `store`: bump it when `from_graph`, the packed weights or the native object's methods change.
VERSION = 62
SIZES = 8  # of images with a program of their own
CHECKED = (1, 2)  # samples that are compared with ONNX Runtime
REPEATED = 9  # samples that are compared with one alone: more than 8 do not pass through layers of many weights at once
logger = logging.getLogger(__name__)


class FreeSizesError(RequestError):
    """An image network takes images of any size, and no size is given."""


def store(source: Path, path: Path, sizes: Sequence[int] = ()) -> None:
    """Writes the packed program of an ONNX file, or none where no sizes are given and they are free.

    Args:
        source: ONNX file.
        path: File to write.
        sizes: See `packed`.

    Raises:
        RequestError: The graph cannot be mapped; the message names the operator.
    """
    model, free = _fixed(source, sizes)
    program_file.save(path, () if free and not sizes else (_packed(_mapped(model)),), CLASSES, VERSION)


def _packed(program: ImageProgram | Partition[ImageProgram]) -> Program:
    if isinstance(program, ImageProgram):
        return pack(program)
    parts = [
        Part(part.feeds, None if part.program is None else pack(part.program), part.model) for part in program.parts
    ]
    return Partition(program.inputs, program.outputs, program.batch, tuple(parts), program.reason)


def packed(path: Path, sizes: Sequence[int] = ()) -> Program:
    """Returns the packed program of an ONNX file, memory-mapped from the cache, where it is built at first use.

    Args:
        path: ONNX file.
        sizes: Sizes of the input beside its first axis, if they are free.

    Raises:
        RequestError: The kernels are missing, or the graph cannot be mapped.
        FreeSizesError: The sizes are free, and none are given.
    """
    extension.required()
    form = f"images {VERSION} {extension.isas()[0]}{''.join(f' {size}' for size in sizes)}"
    make = functools.partial(store, sizes=sizes)
    programs = program_file.load(derived(path, [], "images", form, make, SUFFIX), CLASSES, VERSION)
    if not programs:
        raise FreeSizesError(f"the sizes of the input of {path} are free")
    program: Program = programs[0]
    return program


def prepare(path: Path, batch: Batch) -> Path | None:
    """Writes the packed program of an ONNX file beside it, see `prepared`, if its results agree with ONNX Runtime's.

    Where the sizes of the input are free, the program is for those of the example.

    Args:
        path: ONNX file.
        batch: Example batch.

    Returns:
        Path of the program; None if the native kernels do not run the file as it is, or the folder is not writable.
    """
    if not extension.isas():
        return None
    try:
        sizes = _sizes(batch) if _is_free(path) else ()
        if validate(_native_model(path, 1, sizes), textured(batch)):
            return prepared.save(path, packed(path, sizes), VERSION, sizes)
    except ZooError as error:
        logger.info("no program is prepared for %s: %s", path, error)
    prepared.path_of(path).unlink(missing_ok=True)
    return None


def _is_free(path: Path) -> bool:
    try:
        packed(path)
    except FreeSizesError:
        return True
    return False


def _native_model(path: Path, threads: int, sizes: Sequence[int] = ()) -> NativeModel:
    return NativeModel(
        unvalidated, path, path, threads, [tuple(sizes)], sizes=CHECKED, repeated=(REPEATED,), limit=EXACT
    )


def form(path: Path) -> dict[str, Any]:
    """Describes the native form of a quantized graph; writes nothing.

    Args:
        path: ONNX file.

    Returns:
        {"steps": count by kind}, with {"rest": count by operator} for the operators in ONNX Runtime, and {"parts": the
        parts in the order in which they run, "reason": why the graph cannot be mapped whole} for a graph in several
        parts; or {"reason": why the graph cannot be mapped}.
    """
    try:
        program = _mapped(_fixed(path)[0])
    except ZooError as error:
        return {"reason": str(error)}
    if isinstance(program, ImageProgram):
        remainder = _operators(program.remainder) if program.remainder else {}
        return {"steps": _kinds(program)} | ({"rest": remainder} if remainder else {})
    steps: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    parts = []
    for part in program.parts:
        counts = _operators(part.model.tobytes()) if part.program is None else _kinds(part.program)
        (operators if part.program is None else steps).update(counts)
        unit = "operators" if part.program is None else "steps"
        parts.append(f"{'onnxruntime' if part.program is None else 'native'}: {sum(counts.values())} {unit}")
    if len(parts) == 1:  # other inputs than one image
        return {"steps": dict(steps)}
    return {"steps": dict(steps), "rest": dict(operators.most_common()), "parts": parts, "reason": program.reason}


def _kinds(program: ImageProgram) -> dict[str, int]:
    """The number of steps by kind."""
    return dict(Counter(type(step).__name__ for step in program.steps))


def _operators(model: bytes) -> dict[str, int]:
    """The number of operators by type."""
    import onnx
    import onnx_ir as ir

    from pipelines.graph import query

    return query.op_counts(ir.from_proto(onnx.load_from_string(model)))


class _NetworkSession(Asynchronous):
    """An image network in native kernels.

    Threads and forked processes may share it.

    Args:
        path: ONNX file, which is the reference in ONNX Runtime too.
        threads: Intra-op threads.
        sizes: See `packed`.
        validate: Whether the kernels are validated before the first batch, see `validation.validate`.
        program: The packed program of the file, if it is open.

    Raises:
        RequestError: The kernels are missing, or the graph cannot be mapped.
    """

    engine = "native"

    def __init__(
        self, path: Path, threads: int, sizes: Sequence[int] = (), *, validate: bool = True,
        program: Program | None = None,
    ) -> None:  # fmt: skip
        machine.require_threads(threads)
        self._unvalidated = _native_model(path, threads, sizes) if validate else None
        self.path, self.threads = path, threads
        try:
            self.inputs = self._open(program or packed(path, sizes))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(error) from error

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Computes the outputs of a batch, see `Runnable.run`."""
        self._require(batch)
        if self._unvalidated is not None:
            validate(self._unvalidated, textured({name: batch[name] for name in self.inputs}))
            self._unvalidated = None
        try:
            return self._outputs(batch)
        except ZooError:  # of onnxruntime, about the batch
            raise
        except (ValueError, KeyError) as error:
            raise self._damaged(error) from error

    def executed(self, batch: Batch) -> list[Executed]:
        """Lists the steps and operators that run, see `Session.executed`."""
        raise NotImplementedError

    def _open(self, programs: Any) -> dict[str, Port]:
        """Opens packed programs; returns the inputs of the graph."""
        raise NotImplementedError

    def _outputs(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """The graph's outputs."""
        raise NotImplementedError

    def _require(self, batch: Batch) -> None:
        counts = {len(batch[name]) for name in self.inputs if name in batch and np.ndim(batch[name])}
        for name, port in self.inputs.items():
            x = batch.get(name)
            fits = x is not None and x.shape[1:] == port.shape[1:] and port.shape[0] in (None, len(x))
            if x is None or not fits or x.dtype != port.dtype or len(counts) != 1:
                expected = f"{name} {port.dtype} [{', '.join(str(size or 'n') for size in port.shape)}]"
                actual = {name: f"{np.asarray(array).dtype} {list(np.shape(array))}" for name, array in batch.items()}
                raise BatchError(f"the native kernels cannot run {self.path} on {actual}; expected {expected}")

    def _damaged(self, error: Exception) -> RequestError:
        return RequestError(f"the packed program of {self.path} is damaged: {one_line(error)}")


class ImageSession(_NetworkSession):
    """A whole image network: one call of the native kernels, and one of ONNX Runtime for the float remainder."""

    def _open(self, programs: PackedProgram) -> dict[str, Port]:
        self._program, self._network = programs, programs.open()
        self._remainder = (
            OnnxRuntimeSession(self.path, self.threads, programs.remainder.tobytes())
            if programs.remainder.size
            else None
        )
        return {programs.input: Port(np.dtype(programs.dtype), (programs.batch or None, *programs.shape))}

    def _outputs(self, batch: Batch) -> dict[str, NDArray[Any]]:
        program = self._program
        x = batch[program.input]
        results: NDArray[Any] = self._network(contiguous(x), self.threads)
        if program.parts:
            values = split_values(results, program.parts)
            if self._remainder is not None:
                values |= self._remainder.run({name: values[name] for name in self._remainder.inputs})
            return {name: values[name] for name in program.outputs}
        if program.ending == "Sigmoid":
            results = 1 / (1 + np.exp(-results))
        if program.ending == "Softmax":
            powers = np.exp(results - results.max(axis=1, keepdims=True))
            results = powers / powers.sum(axis=1, keepdims=True)
        if program.ending == "LogSoftmax":
            results = results - results.max(axis=1, keepdims=True)
            results -= np.log(np.exp(results).sum(axis=1, keepdims=True))
        return {program.outputs[0]: results.reshape(len(x), *program.result_shape)}

    def executed(self, batch: Batch) -> list[Executed]:
        """Lists the steps and operators that run, see `Session.executed`."""
        steps = _steps(self._program)
        if self._remainder is not None:
            parts, count = self._program.parts, len(batch[self._program.input])
            values = split_values(np.zeros((count, sum(math.prod(shape) for _, shape, _ in parts)), np.float32), parts)
            steps += self._remainder.executed({name: values[name] for name in self._remainder.inputs})
        return steps


class PartsSession(_NetworkSession):
    """An image network in parts, which run one after the other: native regions, and operators in ONNX Runtime."""

    def _open(self, programs: Partition[PackedProgram]) -> dict[str, Port]:
        self._names = programs.outputs
        self._parts: list[tuple[Part[PackedProgram], Any]] = [
            (
                part,
                part.program.open()
                if part.program is not None
                else OnnxRuntimeSession(self.path, self.threads, part.model.tobytes()),
            )
            for part in programs.parts
        ]
        batch = programs.batch or None
        return {name: Port(np.dtype(dtype), (batch, *shape)) for name, dtype, shape in programs.inputs}

    def _outputs(self, batch: Batch) -> dict[str, NDArray[Any]]:
        values = dict(batch)
        for part, opened in self._parts:
            values |= self._computed(part, opened, values)
        return {name: values[name] for name in self._names}

    def _computed(
        self, part: Part[PackedProgram], opened: Any, values: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """The outputs of a part."""
        fed = {name: values[value] for name, value in part.feeds}
        program = part.program
        if program is None:
            outputs: dict[str, NDArray[Any]] = opened.run(fed)
            return outputs
        arrays = [fed[name] for name, _ in program.inputs] or [fed[program.input]]
        flat = [array.reshape(len(array), -1) for array in arrays]
        x = arrays[0] if len(arrays) == 1 else np.concatenate(flat, axis=1)
        return split_values(opened(contiguous(x), self.threads), program.parts)

    def executed(self, batch: Batch) -> list[Executed]:
        """Lists the steps and operators that run, see `Session.executed`."""
        values, steps = dict(batch), list[Executed]()
        for part, opened in self._parts:
            if part.program is None:
                steps += opened.executed({name: values[value] for name, value in part.feeds})
            else:
                steps += _steps(part.program, len(steps))
            values |= self._computed(part, opened, values)
        return steps


def _steps(program: PackedProgram, first: int = 0) -> list[Executed]:
    """The native steps of a program, numbered from `first` on."""
    steps = [method for method, _ in program.calls if method not in ("tensor", "finish")]
    return [Executed(f"{i}", f"{step} {program.isa}", "u8") for i, step in enumerate(steps, first)]


class FreeSizeSession(Asynchronous):
    """An image network of free height and width, or length: a session for each of the first `SIZES` sizes of images.

    Further sizes, and those without a native form or with wrong results, run in ONNX Runtime. Threads may share it.

    Args:
        path: ONNX file.
        threads: Intra-op threads.
        program: The prepared program of one size, if there is any.
    """

    engine = "native"

    def __init__(self, path: Path, threads: int, program: PreparedProgram | None = None) -> None:
        self.path, self.threads = path, threads
        self._sessions: dict[tuple[int, ...], ImageSession | PartsSession | OnnxRuntimeSession] = {}
        if program is not None:
            own = opened(path, threads, program.sizes, validate=False, program=program.program)
            self._sessions[tuple(program.sizes)] = own
        self._stock: OnnxRuntimeSession | None = None
        self._lock = threading.Lock()  # one thread opens

    @property
    def inputs(self) -> dict[str, Port]:
        """Element type and shape of every input, by name."""
        return self._opened().inputs

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Computes the outputs of a batch, see `Runnable.run`."""
        try:
            return self._session(batch).run(batch)
        except WrongResultsError as error:
            logger.warning("%s; images of this size run there", error)
            with self._lock:
                self._sessions[_sizes(batch)] = self._opened()
            return self._opened().run(batch)

    def executed(self, batch: Batch) -> list[Executed]:
        """Lists the steps that run, see `Session.executed`."""
        return self._session(batch).executed(batch)

    def _session(self, batch: Batch) -> ImageSession | PartsSession | OnnxRuntimeSession:
        sizes = _sizes(batch)
        session = self._sessions.get(sizes)
        if session is not None:
            return session
        with self._lock:
            if sizes not in self._sessions:
                if len(self._sessions) >= SIZES or len(sizes) not in (2, 3) or 0 in sizes:
                    return self._opened()
                try:
                    self._sessions[sizes] = opened(self.path, self.threads, sizes)
                except RequestError as error:
                    logger.info("images of %s run in onnxruntime: %s", list(sizes), error)
                    self._sessions[sizes] = self._opened()
            return self._sessions[sizes]

    def _opened(self) -> OnnxRuntimeSession:
        if self._stock is None:
            self._stock = OnnxRuntimeSession(self.path, self.threads)
        return self._stock


def _sizes(batch: Batch) -> tuple[int, ...]:
    """Sizes of the inputs beside their first axes."""
    return tuple(size for x in batch.values() for size in np.shape(x)[1:])


def opened(
    path: Path, threads: int, sizes: Sequence[int] = (), *, validate: bool = True, program: Program | None = None
) -> ImageSession | PartsSession:
    """Opens an image network, entirely native or in parts.

    Args:
        path: ONNX file.
        threads: Intra-op threads.
        sizes: See `packed`.
        validate: See `ImageSession`.
        program: See `ImageSession`.
    """
    program = program or packed(path, sizes)
    kind = ImageSession if isinstance(program, PackedProgram) else PartsSession
    return kind(path, threads, sizes, validate=validate, program=program)


def unvalidated(path: Path, threads: int, sizes: Sequence[int] = ()) -> Run:
    """Opens an image network for `validation.compare`.

    Args:
        path: ONNX file.
        threads: Intra-op threads.
        sizes: See `packed`.

    Returns:
        Its `run`.
    """
    return opened(path, threads, sizes, validate=False).run


def options(path: Path, threads: int) -> dict[str, Option]:
    """Returns the way to run a quantized image network, for `QuickestSession`.

    Args:
        path: ONNX file.
        threads: Intra-op threads.

    Raises:
        RequestError: The kernels are missing, or the graph cannot be mapped.
    """
    if (own := prepared.load(path, VERSION)) is not None:
        if own.sizes:
            return {"native": Option(functools.partial(FreeSizeSession, path, threads, own), 0)}
        return {"native": Option(functools.partial(opened, path, threads, validate=False, program=own.program), 0)}
    try:
        program = packed(path)
    except FreeSizesError:
        return {"native": Option(functools.partial(FreeSizeSession, path, threads), 0)}
    return {"native": Option(functools.partial(opened, path, threads, program=program), 0)}


def _fixed(path: Path, sizes: Sequence[int] = ()) -> tuple[ir.Model, bool]:
    """A graph with these sizes, or nominal ones where they are free, and whether they are free."""
    from pipelines.graph import io  # with onnx, which only the first use of a file needs
    from pipelines.kernels.images.mapping.from_graph import fix_sizes

    model = io.load(path)
    return model, fix_sizes(model, sizes)


def _mapped(model: ir.Model) -> ImageProgram | Partition[ImageProgram]:
    """The program or parts of a graph of fixed sizes."""
    from pipelines.kernels.images.mapping.from_graph import image_program
    from pipelines.kernels.images.parts.partition import partition

    if constants := [value.name for value in model.graph.outputs if value.name in model.graph.initializers]:
        raise RequestError(f"the output {constants[0]} is a constant, which no native step computes")
    try:
        return image_program(model)
    except RequestError as error:
        return partition(model, error)
