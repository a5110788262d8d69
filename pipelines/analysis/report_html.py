"""Presentation of `pipelines.analysis.report.explain`: terminal rows, JSON, or a self-contained HTML page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.quantization.recipe import QuantRecipe

FORMATS = (".json", ".html")


def save(report: Mapping[str, Any], path: str | Path) -> Path:
    """Writes a report of `explain` as .json or .html, by the suffix.

    Args:
        report: Result of `explain`.
        path: File to write.

    Returns:
        The path.

    Raises:
        RequestError: The suffix is unknown.
    """
    require_format(path)
    return files.write_json(path, report) if Path(path).suffix == ".json" else files.write_text(path, page(report))


def require_format(path: str | Path) -> None:
    """Checks the suffix of a report, before the work begins.

    Args:
        path: Path of the report, .json or .html.

    Raises:
        RequestError: The suffix is unknown.
    """
    if Path(path).suffix not in FORMATS:
        raise RequestError(f"a report ends in {' or '.join(FORMATS)}, not {Path(path).name}; choose another name")


def rows(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows for a terminal: every operator in graph order.

    Args:
        report: Result of `explain`.
    """
    columns = ["operator", "type", "precision", "chain dB", "own dB", "note"]
    return columns, [
        [op["name"], op["type"], op["precision"], _db(op["sqnr_db"]), _db(op["own_db"]), op["reason"]]
        for op in report["operators"]
    ]


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


STYLE = """:root{color-scheme:light dark;--ink:#222;--paper:#fff;--plot:#fafafa;--line:#ddd;--blue:#2b6cb0;--red:#c53030;--green:#274}
@media (prefers-color-scheme:dark){:root{--ink:#ddd;--paper:#151515;--plot:#1d1d1d;--line:#444;--blue:#6cb0f5;--red:#ff7b72;--green:#7ecb94}}
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:76em;padding:0 1em}
body{color:var(--ink);background:var(--paper)}h2{margin-top:1.8em}p{max-width:60em}table{border-collapse:collapse;font-size:13px;margin:.6em 0}
td,th{padding:.15em .7em;text-align:left;border-bottom:1px solid var(--line)}th{position:sticky;top:0;background:var(--paper)}
.n{text-align:right;font-variant-numeric:tabular-nums}.long{max-height:40em;overflow:auto;border:1px solid var(--line)}.wide{overflow-x:auto}.wide svg{min-width:50em}
svg{background:var(--plot);border:1px solid var(--line);display:block;box-sizing:border-box}svg text{font:11px system-ui,sans-serif;fill:var(--ink)}
svg text.m{font-weight:bold}.all{display:grid;grid-template-columns:repeat(auto-fill,minmax(17em,1fr));gap:1em}
.t{font-size:12px;min-width:0}.t b,.t span{display:block;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.float{color:var(--red)}.int8{color:var(--green)}.b{color:var(--blue)}.r{color:var(--red)}summary{cursor:pointer;margin:1em 0}"""
BLUE, RED = "var(--blue)", "var(--red)"
WORST_LAYERS = 12  # layers in the table of largest errors, numbered in the plot
SHOWN_TENSORS = 24  # tensors that are shown initially


def page(report: Mapping[str, Any]) -> str:
    """Returns a self-contained HTML page of a report of `explain`.

    Args:
        report: Result of `explain`.
    """
    columns, table = rows(report)
    parts = [
        *(
            f"<p><b>Wrong in {html.escape(name)}</b>: {html.escape(run['wrong'])}; run the file in another engine.</p>"
            for name, run in report["engines"].items()
            if "wrong" in run
        ),
        _summary(report),
        "<h2>SQNR per layer</h2><p>SQNR: power of the float model's tensor over that of the error; 20 dB are 10% of "
        "error, 40 dB 1%. "
        "Operators stand in the graph's order. <span class='b'>\u25cf chain</span>: the operator's output in the int8 "
        "model as it runs, "
        "with all error that came before. <span class='r'>\u25cf own</span>: what the operator adds alone, its inputs "
        "being the float "
        f"model's (\u25cb where it computes in float); the {min(WORST_LAYERS, len(report['damaging']))} lowest are numbered "
        "as in the table.</p>",
        _layers_plot(report["operators"], report["damaging"][:WORST_LAYERS]),
        "<h3>The most damaging layers</h3>",
        _damaging(report),
    ]
    if report["trials"]:
        parts += ["<h2>Recipes tried</h2>", _trials(report["trials"])]
    parts += ["<h2>Engines</h2>", *(_engine(name, run) for name, run in report["engines"].items())]
    parts += [
        _ranges(report["tensors"]),
        "<h2>Operators</h2>",
        f'<div class="long">{_html_table(columns, table)}</div>',
    ]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"/>'
        f"<title>INT8 report</title><style>{STYLE}</style></head>\n"
        f"<body><h1>INT8 report</h1>\n{body}\n</body></html>\n"
    )


def _summary(report: Mapping[str, Any]) -> str:
    usual = QuantRecipe().to_json()
    choices = [f"ranges by {report['recipe'].get('observer', '?')}"]
    for name, value in report["recipe"].items():
        if name != "observer" and name in usual and list(np.atleast_1d(value)) != list(np.atleast_1d(usual[name])):
            choices.append(f"{name.replace('_', ' ')}: {', '.join(map(str, np.atleast_1d(value)))}")
    facts = {
        "operators": ", ".join(f"{number} {precision}" for precision, number in report["counts"].items()),
        "SQNR of the outputs": ", ".join(
            f"{name} {_decibels(output['sqnr_db'])}" for name, output in report["outputs"].items()
        )
        or "none compared",
        "recipe": ", ".join(choices),
        "measured on": f"{report['samples']:,} samples",
        "graph": report["graph"][:12],
    }
    return (
        "<table>"
        + "".join(f"<tr><th>{key}</th><td>{_text(value)}</td></tr>" for key, value in facts.items())
        + "</table>"
    )


def _decibels(value: float | None) -> str:
    return f"{_db(value)} dB" if value is not None else "exact"


def _text(value: object) -> str:
    return html.escape(str(value))


def _html_table(columns: Sequence[str], table: Iterable[Sequence[str]]) -> str:
    def cell(text: str) -> str:
        kind = "n" if re.fullmatch(r"-?[\d.,]+%?", text) else text if text in ("int8", "float") else ""
        return f'<td class="{kind}">{_text(text)}</td>' if kind else f"<td>{_text(text)}</td>"

    table = [[cell(text) for text in row] for row in table]
    head = "".join(
        f'<th class="n">{_text(column)}</th>'
        if any(row[i].startswith('<td class="n">') for row in table)
        else f"<th>{_text(column)}</th>"
        for i, column in enumerate(columns)
    )
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{''.join(row)}</tr>" for row in table) + "</table>"


def _damaging(report: Mapping[str, Any]) -> str:
    by_name = {op["name"]: op for op in report["operators"]}
    worst = enumerate((by_name[name] for name in report["damaging"][:WORST_LAYERS]), 1)
    cells = [[str(rank), op["name"], op["type"], _db(op["own_db"]), _db(op["sqnr_db"])] for rank, op in worst]
    return (
        _html_table(["#", "layer", "type", "own dB", "chain dB"], cells)
        if cells
        else "<p>No int8 layer loses anything.</p>"
    )


def _axes(
    width: int,
    height: int,
    xs: Sequence[tuple[float, str]],
    ys: Sequence[tuple[float, str]],
    x_title: str,
    y_title: str,
) -> str:
    """Renders ticks ([position, label]) and titles of a plot with margins of 60 pixels left and 36 below."""
    marks = [f'<text x="{x:.1f}" y="{height - 20}" text-anchor="middle">{_text(label)}</text>' for x, label in xs]
    for y, label in ys:
        marks.append(f'<line x1="60" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        marks.append(f'<text x="55" y="{y + 4:.1f}" text-anchor="end">{_text(label)}</text>')
    marks.append(f'<text x="{width / 2}" y="{height - 5}" text-anchor="middle">{_text(x_title)}</text>')
    marks.append(
        f'<text transform="translate(11 {height / 2 - 15}) rotate(-90)" text-anchor="middle">{_text(y_title)}</text>'
    )
    return "".join(marks)


def _scale(values: Sequence[float], start: float, end: float) -> tuple[Any, list[tuple[float, str]]]:
    """Returns (value -> pixel, ticks) of a linear axis with a small margin."""
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = low - room, high + room

    def place(value: float) -> float:
        return start + (value - low) / (high - low) * (end - start)

    rough = (high - low) / 8
    step = next(
        digit * 10.0 ** np.floor(np.log10(rough))
        for digit in (1, 2, 5, 10)
        if digit * 10.0 ** np.floor(np.log10(rough)) >= rough
    )
    return place, [
        (place(tick), f"{tick + 0.0:.6g}") for tick in np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step
    ]


def _layers_plot(operators: Sequence[Mapping[str, Any]], worst: Sequence[str]) -> str:
    """Plots the SQNR along the graph: the chain as a line, single layers as dots, `worst` numbered.

    Float operators are hollow.
    """
    shown = [op for op in operators if op["sqnr_db"] is not None]
    if not shown:
        return "<p>No layer could be compared.</p>"
    width, height = 1000, 300
    values = [value for op in shown for value in (op["sqnr_db"], op["own_db"]) if value is not None]
    y, ticks = _scale(values, height - 40, 10)
    step = (width - 80) / max(len(shown) - 1, 1)
    points = [(65 + index * step, op) for index, op in enumerate(shown)]
    line = " ".join(f"{x:.1f},{y(op['sqnr_db']):.1f}" for x, op in points)
    dots = []
    for x, node in points:
        figures = f"chain {_db(node['sqnr_db'])} dB, own {_db(node['own_db']) or '-'} dB"
        title = f"<title>{_text(node['name'])} ({_text(node['type'])}, {node['precision']}): {figures}</title>"
        dots.append(f'<circle cx="{x:.1f}" cy="{y(node["sqnr_db"]):.1f}" r="2" fill="{BLUE}">{title}</circle>')
        if node["own_db"] is not None:
            fill = RED if node["precision"] == "int8" else "var(--plot)"
            dots.append(
                f'<circle cx="{x:.1f}" cy="{y(node["own_db"]):.1f}" r="3" stroke="{RED}" fill="{fill}">{title}</circle>'
            )
            if node["name"] in worst:
                dots.append(_mark(x, y(node["own_db"]) - 7, str(worst.index(node["name"]) + 1)))
    every = max(len(shown) // 10, 1)
    numbers = [(x, str(index + 1)) for index, (x, _) in enumerate(points) if index % every == 0]
    axes = _axes(width, height, numbers, ticks, "operator, in the graph's order", "SQNR, dB")
    chain = f'<polyline points="{line}" fill="none" stroke="{BLUE}"/>'
    return _wide(width, height, f"{axes}{chain}{''.join(dots)}")


def _wide(width: int, height: int, content: str) -> str:
    """Renders a plot as wide as the page; narrow pages scroll it."""
    return f'<div class="wide"><svg viewBox="0 0 {width} {height}" width="100%">{content}</svg></div>'


def _mark(x: float, y: float, text: str) -> str:
    return f'<text class="m" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{text}</text>'


def _trials(trials: Sequence[Mapping[str, Any]]) -> str:
    """Renders quality drop against latency of all trials, as a plot and a table."""
    shown = sorted(
        (run for run in trials if run.get("drop") is not None and run.get("milliseconds")),
        key=lambda t: t["milliseconds"],
    )
    failed = [["", run["name"], "", "", "", "", str(run.get("error", ""))] for run in trials if run.get("drop") is None]
    if not shown:
        return "<p>No recipe was measured.</p>"
    width, height = 1000, 320
    goal, fp32_ms = (
        next((run[key] for run in shown if run.get(key) is not None), None) for key in ("max_drop", "fp32_ms")
    )
    metric = next((run["metric"] for run in shown if run.get("metric")), "the metric")
    x, x_ticks = _scale([run["milliseconds"] for run in shown], 75, width - 30)
    y, y_ticks = _scale(
        [100 * run["drop"] for run in shown] + ([100 * goal] if goal is not None else []), 12, height - 40
    )
    marks, table = [], []
    for number, trial in enumerate(shown, 1):
        title = f"{trial['name']}: {100 * trial['drop']:.3f}% lost, {trial['milliseconds']:.3f} ms"
        at_x, at_y = x(trial["milliseconds"]), y(100 * trial["drop"])
        best = f' stroke="{RED}" stroke-width="3"' if trial.get("best") else ""
        dot = (
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="5" fill="{BLUE}" '
            f'fill-opacity=".6"{best}><title>{_text(title)}</title></circle>'
        )
        marks += [dot, _mark(at_x + 12, at_y + 4, str(number))]
        ratio = f"{fp32_ms / trial['milliseconds']:.2f}" if fp32_ms else ""
        figures = [f"{100 * trial['drop']:.3f}%", _db(trial.get("sqnr_db")), f"{trial['milliseconds']:.3f}", ratio]
        table.append([str(number), trial["name"], *figures, "kept" if trial.get("best") else ""])
    caption = (
        f"Lost of {_text(metric)} against fp32, less is better, and the latency of one batch; the recipe "
        "kept has a red ring."
    )
    if goal is not None:
        marks.append(
            f'<line x1="60" x2="{width - 10}" y1="{y(100 * goal):.1f}" y2="{y(100 * goal):.1f}" stroke="{RED}" '
            'stroke-dasharray="5 4"/>'
        )
        caption += f" The dashed line is the goal, at most {100 * goal:.3g}% lost."
    if fp32_ms:
        caption += f" fp32 takes {fp32_ms:.3f} ms."
    axes = _axes(width, height, x_ticks, y_ticks, "latency, ms", f"{_text(metric)} lost, %")
    columns = ["#", "recipe", "lost", "SQNR dB", "ms", "x fp32", ""]
    return f"<p>{caption}</p>{_wide(width, height, axes + ''.join(marks))}" + _html_table(columns, [*table, *failed])


def _engine(name: str, engine_report: Mapping[str, Any]) -> str:
    if "error" in engine_report:
        return f"<p><b>{_text(name)}</b>: {_text(engine_report['error'])}</p>"
    ran = ", ".join(f"{count} {kind}" for kind, count in engine_report["ran"].items())
    near = ", ".join(f"{output} {_decibels(db)}" for output, db in engine_report["outputs"].items())
    run = f"It ran {ran}." + (f" SQNR of its outputs: {near}." if near else "")
    fallen = engine_report["fallbacks"]
    verdict = (
        "every int8 operator ran in integers, or as a part of one that did"
        if not fallen
        else f"{len(fallen)} int8 operators ran in float:"
    )
    table = _html_table(
        ["operator", "kernel", "precision"], [[op["name"], op["type"], op["precision"]] for op in fallen]
    )
    return f"<p><b>{_text(name)}</b>: {verdict}</p>{table if fallen else ''}<p>{_text(run)}</p>"


def _ranges(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """Renders the ranges of all quantized tensors, sorted by rounding error."""
    order = sorted(tensors, key=lambda name: (tensors[name]["sqnr_db"] is None, tensors[name]["sqnr_db"]))
    drawn = [_tensor(name, tensors[name]) for name in order]
    first = f'<div class="all">{"".join(drawn[:SHOWN_TENSORS])}</div>'
    hidden = (
        f"<details><summary>{len(drawn) - SHOWN_TENSORS} more</summary>"
        f'<div class="all">{"".join(drawn[SHOWN_TENSORS:])}</div></details>'
    )
    return (
        "<h2>Ranges</h2><p>The values of each quantized tensor in the calibration (height: logarithm of their number) "
        "and the range "
        "chosen for it (<span class='r'>red lines</span>: what its codes reach; values beyond saturate). The tensors "
        "that lose most by "
        f"their own rounding come first.</p>{first}{hidden if len(drawn) > SHOWN_TENSORS else ''}"
    )


def _tensor(name: str, tensor: Mapping[str, Any]) -> str:
    """Renders a small histogram with the range."""
    width, height, margin = 220, 70, 4
    low, high = min(tensor["minimum"], tensor["low"]), max(tensor["maximum"], tensor["high"])
    span = (high - low) or 1.0
    heights = np.log1p(np.array(tensor["counts"], np.float64))
    heights *= (height - 6) / max(float(heights.max(initial=0)), 1e-9)
    place = (np.array(tensor["edges"]) - low) / span * width
    bars = "".join(f"V{height - bar:.1f}H{right:.1f}" for bar, right in zip(heights, place[1:], strict=False))
    path = f"M{place[0]:.1f} {height}{bars}V{height}Z" if bars else ""
    bounds = "".join(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="{RED}" stroke-width="2"/>'
        for x in ((tensor[key] - low) / span * width for key in ("low", "high"))
    )
    method = f" ({_text(tensor['method'])})" if tensor["method"] else ""
    lines = [
        f"range {tensor['low']:.4g} to {tensor['high']:.4g}{method}",
        f"seen {tensor['minimum']:.4g} to {tensor['maximum']:.4g}",
        f"step {tensor['scale']:.3g}, saturated {100 * tensor['saturated']:.3f}%, {_decibels(tensor['sqnr_db'])}",
    ]
    return (
        f'<div class="t"><b title="{_text(name)}">{_text(name)}</b>'
        f'<svg viewBox="{-margin} 0 {width + 2 * margin} {height}" width="100%"><path d="{path}" '
        f'fill="{BLUE}"/>{bounds}</svg>' + "".join(f"<span>{line}</span>" for line in lines) + "</div>"
    )
