"""Markdown of report files for rendered pages: reports, tables, links."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core import files

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, whose pages show the reports
MODELS = ROOT / "MODELS.md"
BENCHMARKS = ROOT / "docs" / "benchmarks" / "index.md"  # links of all pages in its folder are relative to it
PEERS = ROOT / "scripts" / "peers" / "reports"
TERMINAL = 120  # columns of a terminal


class Report(NamedTuple):
    """A report file.

    Attributes:
        path: Path of the file.
        content: JSON document of the file.
    """

    path: Path
    content: dict[str, Any]


def reports(folder: Path, kind: str) -> list[Report]:
    """Reads the reports of a kind, sorted by name; timings have one per CPU.

    Args:
        folder: Folder of reports.
        kind: Beginning of the file names.

    Returns:
        The reports.
    """
    return [Report(path, files.read_json(path)) for path in sorted(folder.glob(f"{kind}*.json"))]


def newest(candidates: Sequence[Report]) -> Report:
    """Returns the report measured with the newest engines.

    Args:
        candidates: Reports.
    """

    def versions(report: Report) -> list[list[int]]:
        stated = report.content["environment"]["versions"]
        return [
            [int(digits) for digits in re.findall(r"\d+", stated[engine])] for engine in ("onnxruntime", "openvino")
        ]

    return max(candidates, key=versions)


def cpu_name(report: Report) -> str:
    """Returns the CPU of a report without trademarks, e.g. "AMD EPYC"; "Intel Xeon with AMX" if it has tiles.

    Args:
        report: Report.
    """
    environment = report.content["environment"]
    name = re.sub(r"\((R|TM)\)| Processor\b| CPU\b| @ .*", "", environment["cpu"])
    return f"{name} with AMX" if "amx_int8" in environment["isa"] else name


def cpu(report: Report) -> str:
    """Returns name, family and model of the CPU of a report, e.g. "AMD EPYC 25/17".

    Args:
        report: Report.
    """
    return f"{cpu_name(report)} {report.content['environment']['cpu_model']}"


def cpu_column(report: Report) -> str:
    """Returns maker, family and model of the CPU of a report for a narrow column head, e.g. "AMD 25/17".

    Args:
        report: Report.
    """
    return f"{cpu_name(report).split()[0]} {report.content['environment']['cpu_model']}"


def link(path: Path, page: Path, text: str = "") -> str:
    """Returns a link "[text](relative path)".

    Args:
        path: File to link to.
        page: File of the page.
        text: Text of the link; "" for the stem of the file.
    """
    return f"[{text or path.stem}]({os.path.relpath(path, page.parent)})"


def source(report: Report, page: Path) -> str:
    """Returns the origin of a report's figures: "CPU, threads, link to the report".

    Args:
        report: The report.
        page: File of the page.
    """
    threads = report.content["environment"].get("threads", 1)
    return f"{cpu(report)}, {threads} thread{'s' * (threads > 1)}, {link(report.path, page)}"


def earlier(models: Iterable[Mapping[str, Any]]) -> str:
    """Returns sentences that name the models measured at an earlier commit than their report's.

    Args:
        models: Models of a report; those with a "commit" are earlier ones.
    """
    names: dict[str, list[str]] = {}
    for model in models:
        if "commit" in model:
            names.setdefault(model["commit"], []).append(model["model"])
    return "".join(f" Measured at commit {commit}: {', '.join(chosen)}." for commit, chosen in names.items())


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Renders a table; columns are aligned if its lines fit into a terminal of 120 columns.

    Args:
        columns: The heads.
        rows: Cells; every row has as many as there are columns.
    """
    cells = [columns, *rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    if sum(widths) + 3 * len(widths) + 1 > TERMINAL:
        widths = [0] * len(widths)
    lines = [cells[0], ["-" * max(width, 3) for width in widths], *cells[1:]]
    padded = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "".join(f"| {line} |\n" for line in padded)


def reason(error: str) -> str:
    """Returns the first clear sentence of an error message, without places in source files, in at most 130 characters.

    Args:
        error: Message of a failed peer.
    """
    text = re.sub(r"Exception from \S+:\d+: |Check '[^']*' failed at \S+:\d+: |\w+ API failed with \w+: ", "", error)
    return textwrap.shorten(
        re.split(r"(?<=[^.])\. | Set [A-Z_]+=| Name:", text)[0].rstrip("."), 130, placeholder=" ..."
    )


def outside_brackets(text: str) -> str:
    """Returns the text without its parts in brackets.

    Args:
        text: Any text.
    """
    return re.sub(r"\s*\([^)]*\)", "", text)


def stored_megabytes(folder: Path) -> str:
    """Returns the size "fp32 / int8" of a model that ships as fp16.onnx (half of fp32) and int8.onnx.

    Args:
        folder: Folder of the model.
    """
    half, int8 = (files.unzipped_size(folder / name) for name in ("fp16.onnx", "int8.onnx"))
    return f"{2 * half / 1e6:.1f} / {int8 / 1e6:.1f}"
