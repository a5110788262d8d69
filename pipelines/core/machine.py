"""The machine: CPU, instruction set flags, processors, memory, and versions of libraries."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import hashlib
import logging
import math
import mmap
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core import settings
from pipelines.core.batches import whole_number
from pipelines.core.errors import RequestError
from pipelines.core.files import FULL, DiskFull, mapped

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

logger = logging.getLogger(__name__)
BLOCK_ROWS = 2**16  # rows of a large table that are read, made or changed at once
THREADS = 1024  # maximum number of threads
ISA = ("avx2", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
PROCESSORS = Path("/sys/devices/system/cpu")
EFFICIENT_PROCESSORS = Path("/sys/devices/cpu_atom/cpus")  # E-cores of Intel's hybrid CPUs
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
PACKAGES = ("int8-zoo", "onnxruntime", "openvino", "onnx-ir", "onnx", "numpy", "pyarrow")

VNNI = "int8 products are summed in 32 bits (VNNI): int8 models run at full speed and accuracy"
NO_VNNI = (
    "no VNNI: int8 gains little speed, and OpenVINO sums its products in pairs of 16 bits, which can saturate and "
    "cost accuracy; "
    "quantize with --reduced-range, use onnxruntime, or --precision fp32"
)


WITHOUT_VNNI = (
    "the CPU has VNNI, which onnxruntime and OpenVINO use; the native kernels run in {}, exact but slower: this build "
    "has no VNNI kernels for this CPU, or ZOO_ISA excludes them"
)


@functools.cache
def cpu() -> dict[str, Any]:
    """Returns {"name", "family", "model", "flags"} of the first processor; "flags" are a subset of `ISA`."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
            if not line:
                break
    except OSError:
        pass  # not Linux: no flags, and doctor says so
    flags = set(fields.get("flags", "").split())
    return {
        "name": fields.get("model name", platform.processor() or platform.machine()),
        "family": fields.get("cpu family", ""),
        "model": fields.get("model", ""),
        "flags": [flag for flag in ISA if flag in flags],
    }


def has_vnni() -> bool:
    """Whether the CPU multiplies uint8 by int8 into 32-bit sums (AVX512-VNNI or AVX-VNNI)."""
    return any(flag in cpu()["flags"] for flag in ("avx512_vnni", "avx_vnni"))


def advice(kernels: Sequence[str], vnni: bool) -> str:
    """Describes in one line how the instruction sets of this CPU affect int8 models.

    Args:
        kernels: The instruction sets of the native kernels that run here, quickest first; none without kernels.
        vnni: Whether the first of them has VNNI.
    """
    if not has_vnni():
        return NO_VNNI
    return WITHOUT_VNNI.format(kernels[0]) if kernels and not vnni else VNNI


def has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 (AVX512-BF16 or AMX)."""
    return any(flag in cpu()["flags"] for flag in ("avx512_bf16", "amx_bf16"))


@dataclasses.dataclass(frozen=True)
class Processors:
    """The processors that this process may use.

    Attributes:
        performance: Logical processors of each core; of each performance core of a hybrid CPU.
        efficient: Logical processors of each efficiency core of a hybrid CPU.
        quota: Processor time a second that the control groups allow, in processors; infinite without a limit.
    """

    performance: tuple[tuple[int, ...], ...]
    efficient: tuple[tuple[int, ...], ...]
    quota: float

    @property
    def cores(self) -> tuple[tuple[int, ...], ...]:
        """Logical processors of each core, performance cores first."""
        return self.performance + self.efficient

    @property
    def count(self) -> int:
        """Logical processors, at most as many as the quota pays for."""
        return _paid(sum(map(len, self.cores)), self.quota)

    @property
    def threads(self) -> int:
        """The number of threads for `--threads auto`: one for each performance core, within the quota.

        Threads share a model's rows equally, so that an efficiency core, or a core that two threads share, delays all.
        """
        return min(len(self.performance or self.efficient), self.count)

    @property
    def order(self) -> list[int]:
        """Logical processors in the order of their use: performance cores, efficiency cores, then SMT siblings."""
        return [core[0] for core in self.cores] + sorted(sibling for core in self.cores for sibling in core[1:])


def processors() -> Processors:
    """Returns the processors that affinity and control groups (cpusets and CPU quotas, versions 1 and 2) allow."""
    allowed, quota = _allowed()
    capacity = {number: max(_numbers(PROCESSORS / f"cpu{number}" / "cpu_capacity"), default=0) for number in allowed}
    largest = max(capacity.values())
    slow = _numbers(EFFICIENT_PROCESSORS) | {number for number in allowed if capacity[number] < largest}
    found_cores: dict[tuple[int, ...], None] = {}
    for processor in sorted(allowed):
        siblings = _numbers(PROCESSORS / f"cpu{processor}" / "topology" / "thread_siblings_list") & allowed
        found_cores.setdefault(tuple(sorted(siblings | {processor})))
    fast = tuple(core for core in found_cores if core[0] not in slow)
    return Processors(fast, tuple(core for core in found_cores if core[0] in slow), quota)


def _paid(count: int, quota: float) -> int:
    """Returns the number of processors, at most as many as a quota pays for."""
    return max(1, min(count, int(min(quota, THREADS))))


def _allowed() -> tuple[set[int], float]:
    """Returns the numbers of the allowed processors, and `Processors.quota`."""
    allowed = set(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    quota = math.inf
    for folder in _control_groups("cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            allowed = allowed & _numbers(folder / name) or allowed
    for folder in _control_groups("cpu"):
        limits = " ".join(_lines(folder / "cpu.max")).split()
        limits = limits or [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max", or no pair
            time, period = map(int, limits)
            quota = min(quota, time / period) if time > 0 else quota  # -1: no limit
    return allowed, quota


def _control_groups(controller: str) -> Iterator[Path]:
    """Yields the folders of the control groups of this process that have a controller, each with those above it."""
    for line in _lines(OWN_GROUPS):
        _, kinds, folder = line.split(":", 2)
        if kinds and controller not in kinds.split(","):
            continue
        root = CONTROL_GROUPS / (controller if kinds else "")
        group = root / folder.strip("/")
        yield from (parent for parent in (group, *group.parents) if parent == root or root in parent.parents)


def _numbers(path: Path) -> set[int]:
    """Returns the numbers of a list of the system such as "0-3,8"; none without the file."""
    spans = [span.split("-") for span in ",".join(_lines(path)).split(",") if span.strip()]
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}


def cores() -> int:
    """Returns the number of processors that this process may use, see `Processors.count`."""
    allowed, quota = _allowed()
    return _paid(len(allowed), quota)


def require_threads(threads: int) -> None:
    """Checks a number of threads, and warns once where some would share a core (SMT siblings).

    Args:
        threads: Number of intra-op threads.

    Raises:
        RequestError: There are more threads than the machine can run: engines would start all of them and hang.
    """
    try:
        whole_number("threads", threads, THREADS)
    except RequestError as error:
        raise RequestError(f"{error}; this machine has {cores()} core(s)") from None
    _warn_of_siblings(threads)


@functools.cache
def _warn_of_siblings(threads: int) -> None:
    available = processors()
    physical = len(available.cores)
    if physical < threads <= len(available.order):
        logger.warning(
            "found %d threads for %d core(s): some share a core (SMT siblings) and are slower; --threads auto takes %d",
            threads,
            physical,
            available.threads,
        )


def caches() -> dict[str, int]:
    """Returns the sizes in bytes of the first processor's data caches, {"L1d", "L2", "L3"}; 0 if unknown."""
    sizes = {"L1d": 0, "L2": 0, "L3": 0}
    for index in CACHES.glob("index*"):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            key = "L1d" if level == "1" else f"L{level}"
            if kind in ("Data", "Unified") and key in sizes:
                sizes[key] = int(size[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[size[-1]]
        except (OSError, ValueError, LookupError):
            continue
    return sizes


def available_memory() -> int:
    """Returns the memory limit of this process and its page cache in bytes, by the system and its control group."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        sizes.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for folder in _control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            sizes += [int(text) for text in _lines(folder / name) if text.isdigit()]
    return min(sizes)


def table_memory() -> int:
    """Returns the memory limit of embedding tables in bytes: $ZOO_TABLE_MEMORY, or half of `available_memory`."""
    return settings.table_memory() or available_memory() // 2


def beyond_memory(path: Path) -> bool:
    """Returns whether the weights of a model file may take more than `table_memory`.

    Args:
        path: The file; those of a large model are in a file beside it, see `files.mapped`.
    """
    return sum(file.stat().st_size for file in (path, mapped(path)) if file.is_file()) > table_memory()


def read_single_pages(path: Path) -> None:
    """Makes the system read single pages of a file that this process maps (MADV_RANDOM), not 128 KB around each.

    Libraries map the weights of large models; rows of tables are at places of no order.

    Args:
        path: The file.
    """
    places = (line.split(maxsplit=5) for line in _lines(Path("/proc/self/maps")))
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for span in (place[0] for place in places if place[5:] == [str(path.resolve())]):
            begin, end = (int(address, 16) for address in span.split("-"))
            advise(begin, end - begin, mmap.MADV_RANDOM)


def large_zeros(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Returns an array of zeros; above a quarter of `table_memory`, it is mapped from an unnamed file.

    The file is in the folder of temporary files ($TMPDIR). The system keeps as much of it in memory as it has.

    Args:
        shape: Shape of the array.
        dtype: Type of its elements.

    Raises:
        DiskFull: The disk has no room for the file.
    """
    import numpy as np

    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= table_memory() // 4:
        return np.zeros(shape, dtype)
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a disk that is full later would end the process
            return np.asarray(np.memmap(file, dtype, "r+", shape=tuple(shape)))
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(f"an array of {size:,} bytes to {folder} ($TMPDIR)", error) from error
        raise


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect measurements."""
    from importlib import metadata  # slow to import, and an answer needs none

    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


@functools.cache
def commit() -> str | None:
    """Returns the commit of the checkout, with "+" if Python or C++ files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        run = functools.partial(subprocess.run, cwd=root, capture_output=True, text=True, timeout=10, check=True)
        dirty = bool(run(["git", "status", "--porcelain", "--", "*.py", "*.cpp", "*.h"]).stdout.strip())
        return run(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip() + ("+" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None


def environment(**more: Any) -> dict[str, Any]:
    """Returns the environment for reports: CPU, ISA, cores, versions, commit, and further facts.

    Args:
        **more: Facts of the run.
    """
    return {
        "cpu": cpu()["name"],
        "cpu_model": f"{cpu()['family']}/{cpu()['model']}",
        "isa": cpu()["flags"],
        "cores": cores(),
        **({"isa_limit": limit} if (limit := settings.isa()) else {}),
        "versions": versions(),
        "commit": commit(),
        **more,
    }


def fingerprint() -> str:
    """Returns a short digest of CPU, cores and library versions, on which timings depend."""
    return hashlib.sha256(repr((cpu(), cores(), versions())).encode()).hexdigest()[:12]


def trim() -> None:
    """Returns freed memory to the system (malloc_trim of glibc); parsing a graph leaves several times its size."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def return_large_arrays() -> None:
    """Returns arrays of a megabyte and more to the system as they are freed (mallopt of glibc).

    The threshold otherwise rises to 32 MB, and work on many large arrays keeps a third more memory than it uses.
    """
    m_mmap_threshold = -3  # malloc.h
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 20)


@contextlib.contextmanager
def single_blas_thread() -> Iterator[None]:
    """Computes numpy's linear algebra in one thread within the context.

    OpenBLAS's idle threads spin for 20 ms after every product, and its sums depend on the number of threads.
    """
    import threadpoolctl

    with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
        yield
