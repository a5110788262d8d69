"""What the parts of scripts/reproduce.py share: where reports lie, processes that are timed and watched."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import zoo
from pipelines.core import files, machine
from pipelines.core.errors import ZooError

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("ZOO_SHARED", ROOT.parent / "shared"))
MODEL = "wide-deep-criteo"
ROUNDS = 9


def cpu_slug() -> str:
    """The CPU as part of a file name, e.g. amd-epyc-25-17 (family and model tell apart what shares a name)."""
    cpu = machine.cpu()
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu['name']} {cpu['family']} {cpu['model']}".lower()).strip("-")


def report(name: str, value: Any, model: str = MODEL) -> None:
    path = files.write_json(zoo.SHIPPED / model / "reports" / f"{name}.json", value)
    print(f"wrote {path.relative_to(ROOT)}")


def watched(command: list[str], more: dict[str, str] | None = None) -> tuple[str, dict[str, float]]:
    """What a process prints, and its seconds and peak resident memory. Raises ZooError where it fails."""
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | (more or {}))
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, peak_mb(process.pid))
        time.sleep(0.2)
    out = process.communicate()[0]
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise ZooError(f"{' '.join(command)} ended with {process.returncode}")
    processor = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return out, {
        "process_seconds": round(seconds, 2),
        "processor_seconds": round(processor, 2),
        "peak_memory_mb": round(peak, 1),
    }


def measure_together(name: str, *arguments: str, path: Path | None = None, more: dict[str, str] | None = None) -> None:
    """A report of several models among those of the peers, by the script of that name there, or by `path`; more: what
    its environment has beside this process's.
    """
    script, target = (
        path or ROOT / "scripts" / "peers" / f"{name}.py",
        ROOT / "scripts" / "peers" / "reports" / f"{name}-{cpu_slug()}.json",
    )
    command = ["taskset", "-c", "0,1", sys.executable, script, *arguments, "-o", target]
    subprocess.run(command, check=True, env=os.environ | (more or {}))
    print(f"wrote {target.relative_to(ROOT)}")


def measure_by(script: str, name: str, model: str = MODEL) -> None:
    path = zoo.SHIPPED / model / "reports" / f"{name}.json"
    subprocess.run([sys.executable, ROOT / "scripts" / "peers" / script, "-o", path], check=True)
    print(f"wrote {path.relative_to(ROOT)}")


def peak_mb(pid: int) -> float:
    """Peak resident memory so far of a running process, in MB (10^6 bytes); 0 once it has ended.

    Not from the resource usage of ended children: that starts from the memory of the process that forked them.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)
