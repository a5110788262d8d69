"""Cost of opening a file in an engine: the time to the first result, and memory, of a process of its own.

`python -m scripts.peers.quantization.opening ENGINE FILE SAMPLE` prints the fields of `opened`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pipelines.core.batches import Batch
from pipelines.core.errors import ZooError
from scripts.peers import harness, processes
from scripts.peers.quantization import settings

Cost = dict[str, float]
COUNT = 3  # openings; of the native kernels behind the first, which fills the cache
EMPTY = "native, empty cache"
LIBRARIES = {"openvino-default": "openvino", "native": "pipelines.engines.native.images"}  # else the engine's name


def opened(engine: str, path: Path, sample: Path) -> Cost:
    """Opens a file and computes the first result; this process leads a session and has opened nothing before.

    Args:
        engine: Name in `settings.RUNS`.
        path: The file.
        sample: .npz with an array for every input.

    Returns:
        {"milliseconds" from the name of the file to the result, without the engine's imports; "cpu_milliseconds" of
        that; "peak_mb", the peak resident memory of the process and its child processes; "imports_mb", the memory of
        the process behind the imports}.
    """
    importlib.import_module(LIBRARIES.get(engine, engine))
    with np.load(sample) as arrays:
        batch = dict(arrays)
    session, imports = os.getsid(0), processes.memory_mb("VmRSS")
    start, used = time.perf_counter(), processes.cpu_seconds(session)
    settings.RUNS[engine](path, 1)(batch)
    seconds, cpu = time.perf_counter() - start, processes.cpu_seconds(session) - used
    return {
        "milliseconds": round(1000 * seconds, 1),
        "cpu_milliseconds": round(1000 * cpu, 1),
        "peak_mb": round(sum(processes.memory_mb("VmHWM", pid) for pid in processes.session_members(session)), 1),
        "imports_mb": imports,
    }


def costs(paths: Mapping[str, Path], engines: Sequence[str], batch: Batch, folder: Path) -> dict[str, dict[str, Cost]]:
    """Opens files in all engines, each several times in new processes on one core.

    Args:
        paths: Files by setting.
        engines: Names in `settings.RUNS`.
        batch: One sample.
        folder: For the sample and the caches, which are removed.

    Returns:
        {engine: {setting: the opening of median CPU time}}, with `EMPTY` for the first one of the native kernels. A
        file that an engine does not open is missing.
    """
    sample, home = folder / "opening.npz", folder / "opening-cache"
    np.savez(sample, allow_pickle=False, **batch)
    bytecode = folder / "opening-bytecode"  # which installed packages have
    environment = {**processes.ONE_THREAD, "ZOO_HOME": str(home), "PYTHONPATH": str(harness.ROOT)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(bytecode)}
    figures: dict[str, dict[str, Cost]] = {}
    for engine, (name, path) in itertools.product(engines, paths.items()):
        if engine not in settings.engines_of(path):
            continue
        shutil.rmtree(home, ignore_errors=True)
        command = ["taskset", "-c", processes.last_core(), sys.executable, "-m", __name__, engine, path, sample]
        with contextlib.suppress(ZooError):  # the accuracy says why
            if engine not in figures:
                processes.run(command, environment=environment)  # which writes the bytecode
                shutil.rmtree(home, ignore_errors=True)
            native = engine == "native"
            openings = [
                json.loads(processes.run(command, environment=environment).output) for _ in range(native + COUNT)
            ]
            if native:
                figures.setdefault(EMPTY, {})[name] = openings.pop(0)
            openings.sort(key=lambda cost: float(cost["cpu_milliseconds"]))
            figures.setdefault(engine, {})[name] = openings[COUNT // 2]
    sample.unlink()
    for cache in (home, bytecode):
        shutil.rmtree(cache, ignore_errors=True)
    return figures


def main() -> None:
    """Opens what the command line names, in a session of its own."""
    os.setsid()
    engine, path, sample = sys.argv[1:]
    print(json.dumps(opened(engine, Path(path), Path(sample))))


if __name__ == "__main__":
    main()
