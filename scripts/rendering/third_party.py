"""Page docs/benchmarks/third-party.md: ONNX models of others, quantized by every tool, and the scans of all engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipelines.analysis import markdown
from pipelines.analysis.markdown import BENCHMARKS, PEERS, Report
from scripts.peers.quantization import opening
from scripts.peers.quantization.settings import RUNS

Row = Mapping[str, Any]
KINDS = ("own-models", "detectors", "exported")
LEGEND = """Models are quantized by each tool's default command on the same samples, by
`scripts/peers/quantization/own_models.py`; files are interleaved, on one thread.

- SQNR: of all outputs against fp32 in ONNX Runtime, in dB. Shapes stay dynamic.
- agreement: percentage of samples with the same class (largest value, or side of 0.5); see the mean cosine for other
  outputs.
- ms: one batch. OV computes float operators in float32, OV default in bfloat16 (on CPUs that have it).
- s, peak MB: CPU time and memory of quantization, on one core.
- Names ending in -shaped: networks of that shape with random weights (`scripts/peers/quantization/exported.py`).
"""
COLUMNS = (
    *("model", "setting", "SQNR ORT", "SQNR OV", "agreement", "cosine", "MB"),
    *("ORT ms", "OV ms", "OV default ms", "native ms", "s", "peak MB"),
)
BEST_COLUMNS = ("model", "batch", "zoo, ms", "SQNR", "fastest other, ms", "SQNR", "speed-up", "highest SQNR of others")
OPENING = """CPU milliseconds from the name of the file to the first result / MB (10^6 bytes) of peak resident memory,
in new processes on one core, without imports. OpenVINO compiles at every start, as by default. With an empty cache, the
native engine packs and validates the file (including the child process that validates); `zoo quantize` does both for
the file that it writes, and stores the result beside it.
"""
OPENING_COLUMNS = ("model", "setting", *("ORT", "OV", "OV default", "native", opening.EMPTY))
SCANS = """Largest difference from ONNX Runtime at batch sizes from 1 to 128, relative to the power of the output (batch
size in brackets), and the fallback form that OpenVINO needed, if any; by `scripts/peers/scan/scan.py`.
"""


def page() -> str:
    """Returns the page."""
    reports = [report for kind in KINDS for report in markdown.reports(PEERS, kind)]
    parts = ["# Third-party ONNX models\n", "## Speed and quality\n", LEGEND]
    for report in reports:
        parts.append(f"On {markdown.source(report, BENCHMARKS)}.{markdown.earlier(report.content['models'])}\n")
        parts.append(markdown.table(BEST_COLUMNS, best(report.content)))
        parts.append(f"All files:\n\n{markdown.table(COLUMNS, rows(report.content))}")
        parts += failures(report.content)
    parts += ["## Opening a file\n", OPENING]
    for report in reports:
        if cells := opening_rows(report.content):
            parts.append(f"On {markdown.source(report, BENCHMARKS)}:\n\n{markdown.table(OPENING_COLUMNS, cells)}")
    parts += ["## Engines at every batch size\n", SCANS, *map(_scan, markdown.reports(PEERS, "scan"))]
    return "\n".join(parts)


def best(report: Row) -> list[list[str]]:
    """Returns, for each model and batch size, this project's file beside the fastest other one in a stock engine.

    Args:
        report: Report of `scripts/peers/quantization/own_models.py`.

    Returns:
        Cells of `BEST_COLUMNS`.
    """
    table = []
    for model in report["models"]:
        quality = {row["setting"]: dict(_sqnr(row)) for row in model["results"]}
        for size, engines in {str(model.get("batch", 1)): model["milliseconds"], **model.get("larger", {})}.items():
            times = {
                (name, engine): figures["median"]
                for engine, files in engines.items()
                for name, figures in files.items()
            }
            ours = min((pair for pair in times if pair[0] == "zoo"), key=times.__getitem__, default=None)
            others = [pair for pair in times if pair[0] != "zoo" and pair[1] != "native"]
            if ours is None or not others:
                continue
            peer = min(others, key=times.__getitem__)
            highest = [(value, name) for name in quality if name != "zoo" for value in quality[name].values()]
            row = [model["model"], size]
            for name, engine in (ours, peer):
                label = engine if name == "zoo" else f"{name} in {engine}"
                row += [f"{times[name, engine]:.2f} ({label})", _cell(quality.get(name, {}).get(engine))]
            best_other = "{:.1f} ({})".format(*max(highest)) if highest else ""
            table.append([*row, f"{times[peer] / times[ours]:.2f}x", best_other])
    return table


def _sqnr(row: Row) -> Iterator[tuple[str, float]]:
    """Yields the SQNR of a file in every engine."""
    for engine, figures in row.get("accuracy", {}).items():
        if "sqnr_db" in figures:
            yield engine, figures["sqnr_db"]


def _cell(decibels: float | None) -> str:
    return "" if decibels is None else f"{decibels:.1f}"


def rows(report: Row) -> list[list[str]]:
    """Returns the rows of the table of a report.

    Args:
        report: Report of `scripts/peers/quantization/own_models.py`.

    Returns:
        Cells of `COLUMNS`: SQNR in onnxruntime and OpenVINO, agreement and cosine (in onnxruntime where it runs the
        file), milliseconds in all engines, seconds and MB of quantizing.
    """
    table = []
    for model in report["models"]:
        for row in model["results"]:
            judged = row.get("accuracy", {})
            first: Row = next((figures for figures in judged.values() if "sqnr_db" in figures), {})
            speed = [model["milliseconds"].get(e, {}).get(row["setting"], {}).get("median") for e in RUNS]
            values: list[Any] = [model["model"], row["setting"]]
            values += [judged.get(engine, {}).get("sqnr_db") for engine in ("onnxruntime", "openvino")]
            values += [first.get("agreement"), first.get("cosine"), round(row["bytes"] / 1e6, 2), *speed]
            values += [row.get("seconds"), row.get("peak_mb")]
            table.append(["" if cell is None else str(cell) for cell in values])
        for size, engines in model.get("larger", {}).items():
            names = {name: None for figures in engines.values() for name in figures}
            for name in names:
                cells = [engines.get(engine, {}).get(name, {}).get("median", "") for engine in RUNS]
                table.append([model["model"], f"{name}, batch {size}", *[""] * 5, *map(str, cells), "", ""])
    return table


def failures(report: Row) -> list[str]:
    """Returns the list of settings that failed, by their reason; [] if none did.

    Args:
        report: Report of `scripts/peers/quantization/own_models.py`.
    """
    reasons: dict[str, list[str]] = {}
    for model in report["models"]:
        for setting, why in model["left_out"].items():
            reasons.setdefault(markdown.reason(why), []).append(f"{setting} of {model['model']}")
    if not reasons:
        return []
    return ["Failed:\n", *(f"- {', '.join(names)}: {why}" for why, names in reasons.items()), ""]


def opening_rows(report: Row) -> list[list[str]]:
    """Returns the rows of the table of openings: cells of `OPENING_COLUMNS`, CPU ms / peak MB.

    Args:
        report: Report of `scripts/peers/quantization/own_models.py`.
    """
    table = []
    for model in report["models"]:
        engines = model.get("opening", {})
        for name in {name: None for figures in engines.values() for name in figures}:
            costs = [engines.get(engine, {}).get(name) for engine in (*RUNS, opening.EMPTY)]
            cells = [f"{cost['cpu_milliseconds']:.0f} / {cost['peak_mb']:.0f}" if cost else "" for cost in costs]
            table.append([model["model"], name, *cells])
    return table


def _scan(report: Report) -> str:
    """The table of a scan: a row a model and precision, a column an engine."""
    results = report.content["results"]
    engines = list(dict.fromkeys(row["engine"] for row in results))
    table: dict[tuple[str, str], dict[str, str]] = {}
    for row in results:
        cell = row["verdict"].replace("left out", "")
        if row["verdict"] == "ok":
            cell = f"{row['largest']:g} ({row['at']})" + (f", {row['reason']}" if row["reason"] else "")
        table.setdefault((row["model"], row["precision"]), {})[row["engine"]] = cell
    cells = [[*key, *(row.get(engine, "") for engine in engines)] for key, row in table.items()]
    right = sum(row["verdict"] == "ok" for row in results)
    wrong = sum(row["verdict"] not in ("ok", "left out") for row in results)
    head = f"{right} of {right + wrong} pairs of a model and an engine agree at all batch sizes"
    return f"{head} ({markdown.source(report, BENCHMARKS)}):\n\n" + markdown.table(
        ["model", "precision", *engines], cells
    )
