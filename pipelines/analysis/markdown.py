"""Markdown of report files, for the pages that are rendered from them: reports, tables, links."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core import files


class Report(NamedTuple):
    """A report file: its path and the JSON document in it."""

    path: Path
    content: dict[str, Any]


def reports(folder: Path, kind: str) -> list[Report]:
    """The reports `kind`*.json of a folder by name; timings have one per CPU."""
    return [Report(path, files.read_json(path)) for path in sorted(folder.glob(f"{kind}*.json"))]


def newest(candidates: Sequence[Report]) -> Report:
    """The report measured with the newest engines."""

    def versions(report: Report) -> list[list[int]]:
        stated = report.content["environment"]["versions"]
        return [
            [int(digits) for digits in re.findall(r"\d+", stated[engine])] for engine in ("onnxruntime", "openvino")
        ]

    return max(candidates, key=versions)


def cpu_name(report: Report) -> str:
    """The CPU of a report without marks of its maker, e.g. "AMD EPYC"; "Intel Xeon with AMX" where it has tiles."""
    environment = report.content["environment"]
    name = re.sub(r"\((R|TM)\)| Processor\b| CPU\b| @ .*", "", environment["cpu"])
    return f"{name} with AMX" if "amx_int8" in environment["isa"] else name


def cpu(report: Report) -> str:
    """The CPU of a report, e.g. "AMD EPYC 25/17": its name, family and model."""
    return f"{cpu_name(report)} {report.content['environment']['cpu_model']}"


def by_cpu(said: Iterable[tuple[Report, str]]) -> str:
    """A table's cell of what the reports of several CPUs say: "text (CPU); text (CPU)"."""
    return "; ".join(f"{text} ({cpu(report)})" for report, text in said)


def link(path: Path, page: Path) -> str:
    """A link to a file from a page (both paths of files): "[stem](relative path)"."""
    return f"[{path.stem}]({os.path.relpath(path, page.parent)})"


def source(report: Report, page: Path) -> str:
    """Where the figures of a report were measured: "CPU, threads, link to the report"."""
    threads = report.content["environment"].get("threads", 1)
    return f"{cpu(report)}, {threads} thread{'s' * (threads > 1)}, {link(report.path, page)}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; every row has as many cells as there are columns."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def outside_brackets(text: str) -> str:
    """The text without what stands in brackets."""
    return re.sub(r"\s*\([^)]*\)", "", text)


def stored_megabytes(sizes: dict[str, int]) -> str:
    """Size of a model that ships as fp16.onnx (half of fp32) and int8.onnx, from bytes by file name: "fp32 / int8"."""
    return f"{2 * sizes['fp16.onnx'] / 1e6:.1f} / {sizes['int8.onnx'] / 1e6:.1f}"
