"""What `pipelines.report.explain` found, for people: rows for a terminal, JSON, one HTML page that needs nothing else, with plots (SVG)."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines import files
from pipelines.errors import RequestError

FORMATS = (".json", ".html")


def save(found: Mapping[str, Any], path: str | Path) -> Path:
    """Write what `explain` found as .json or .html, by the suffix. Raises RequestError for another one."""
    require_format(path)
    return files.write_json(path, found) if Path(path).suffix == ".json" else files.write_text(path, page(found))


def require_format(path: str | Path) -> None:
    """Raise RequestError unless a report can be written to `path`; to be asked before the work."""
    if Path(path).suffix not in FORMATS:
        raise RequestError(f"a report ends in {' or '.join(FORMATS)}, not {Path(path).name}; choose another name")


def rows(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) for a terminal: every operator in the graph's order."""
    columns = ["operator", "type", "precision", "SQNR dB", "own dB", "note"]
    return columns, [
        [each["name"], each["type"], each["precision"], _db(each["sqnr_db"]), _db(each["own_db"]), each["reason"]]
        for each in found["operators"]
    ]


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;font-size:13px}td,th{padding:.15em .7em;text-align:left;border-bottom:1px solid #e4e4e4}
td.n{text-align:right;font-variant-numeric:tabular-nums}h2{margin-top:1.8em}svg{background:#fafafa;border:1px solid #e4e4e4}
svg text{font:11px system-ui,sans-serif;fill:#444}.t{display:inline-block;margin:.4em;vertical-align:top;width:17em;font-size:12px}
.t b{display:block;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}.float{color:#a33}.int8{color:#274}"""
BLUE, RED, GREY = "#2b6cb0", "#c53030", "#999"


def page(found: Mapping[str, Any]) -> str:
    """One self-contained HTML page of what `explain` found."""
    counts = ", ".join(f"{number} {precision}" for precision, number in found["counts"].items())
    outputs = ", ".join(f"{name} {_db(each['sqnr_db']) or 'exact'} dB" for name, each in found["outputs"].items()) or "none compared"
    parts = [
        f"<p>Operators: {_text(counts)}. SQNR of the outputs: {_text(outputs)}. Measured on {found['samples']} samples; "
        f"graph {_text(found['graph'][:12])}, ranges by {_text(found['recipe'].get('observer', '?'))}.</p>",
        "<h2>The most damaging layers</h2><p>Own: error that the layer itself adds, its inputs being the float model's. "
        "Chain: error of its output in the int8 model as it runs.</p>",
        _damaging(found),
        "<h2>SQNR per layer</h2>",
        _layers_plot(found["operators"]),
    ]
    if found["trials"]:
        parts += ["<h2>Recipes tried</h2>", _trials_plot(found["trials"])]
    parts += ["<h2>Engines</h2>", *(_engine(name, each) for name, each in found["engines"].items())]
    parts += ["<h2>Ranges</h2><p>Values of each tensor (height: log of the count); red lines: what the int8 codes reach.</p>"]
    parts += [_tensor(name, each) for name, each in found["tensors"].items()]
    columns, table = rows(found)
    parts += ["<h2>Operators</h2>", _html_table(columns, table)]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>INT8 report</title><style>{STYLE}</style></head>\n'
        f"<body><h1>INT8 report</h1>\n{body}\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _html_table(columns: Sequence[str], table: Iterable[Sequence[str]]) -> str:
    def cell(text: str) -> str:
        kind = "n" if re.fullmatch(r"-?[\d.,]+%?", text) else text if text in ("int8", "float") else ""
        return f'<td class="{kind}">{_text(text)}</td>' if kind else f"<td>{_text(text)}</td>"

    head = "".join(f"<th>{_text(each)}</th>" for each in columns)
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in table) + "</table>"


def _damaging(found: Mapping[str, Any], most: int = 12) -> str:
    by_name = {each["name"]: each for each in found["operators"]}
    worst = [by_name[name] for name in found["damaging"][:most]]
    return _html_table(
        ["layer", "type", "own dB", "chain dB"], [[each["name"], each["type"], _db(each["own_db"]), _db(each["sqnr_db"])] for each in worst]
    )


def _axes(width: int, height: int, xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]], x_title: str, y_title: str) -> str:
    """Ticks ([position, label]) and titles of a plot whose frame leaves 60 pixels to the left and 36 below."""
    marks = [f'<text x="{x:.1f}" y="{height - 20}" text-anchor="middle">{_text(label)}</text>' for x, label in xs]
    for y, label in ys:
        marks.append(f'<line x1="60" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        marks.append(f'<text x="55" y="{y + 4:.1f}" text-anchor="end">{_text(label)}</text>')
    marks.append(f'<text x="{width / 2}" y="{height - 5}" text-anchor="middle">{_text(x_title)}</text>')
    marks.append(f'<text transform="translate(11 {height / 2 - 15}) rotate(-90)" text-anchor="middle">{_text(y_title)}</text>')
    return "".join(marks)


def _scale(values: Sequence[float], start: float, end: float) -> tuple[Any, list[tuple[float, str]]]:
    """(value -> pixel, ticks) of a linear axis that holds all values with a little room."""
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = low - room, high + room

    def place(value: float) -> float:
        return start + (value - low) / (high - low) * (end - start)

    rough = (high - low) / 5
    step = next(each * 10.0 ** np.floor(np.log10(rough)) for each in (1, 2, 5, 10) if each * 10.0 ** np.floor(np.log10(rough)) >= rough)
    return place, [(place(each), f"{each:.6g}") for each in np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step]


def _layers_plot(operators: Sequence[Mapping[str, Any]]) -> str:
    """SQNR along the graph: of the chain as a line, of every layer alone as dots; what stayed float is hollow."""
    shown = [each for each in operators if each["sqnr_db"] is not None]
    if not shown:
        return "<p>No layer could be compared.</p>"
    width, height = 1000, 300
    values = [value for each in shown for value in (each["sqnr_db"], each["own_db"]) if value is not None]
    y, ticks = _scale(values, height - 40, 10)
    step = (width - 80) / max(len(shown) - 1, 1)
    points = [(65 + index * step, each) for index, each in enumerate(shown)]
    line = " ".join(f"{x:.1f},{y(each['sqnr_db']):.1f}" for x, each in points)
    dots = []
    for x, each in points:
        said = f"chain {_db(each['sqnr_db'])} dB, own {_db(each['own_db']) or '-'} dB"
        title = f"<title>{_text(each['name'])} ({_text(each['type'])}, {each['precision']}): {said}</title>"
        dots.append(f'<circle cx="{x:.1f}" cy="{y(each["sqnr_db"]):.1f}" r="2" fill="{BLUE}">{title}</circle>')
        if each["own_db"] is not None:
            fill = RED if each["precision"] == "int8" else "none"
            dots.append(f'<circle cx="{x:.1f}" cy="{y(each["own_db"]):.1f}" r="3" stroke="{RED}" fill="{fill}">{title}</circle>')
    axes = _axes(
        width,
        height,
        [(points[0][0], "first"), (points[-1][0] - 8, "last")],
        ticks,
        "operators in the graph's order (line: chain; dots: own error of the layer, hollow where it is float)",
        "SQNR, dB",
    )
    chain = f'<polyline points="{line}" fill="none" stroke="{BLUE}"/>'
    return f'<svg viewBox="0 0 {width} {height}" width="100%">{axes}{chain}{"".join(dots)}</svg>'


def _trials_plot(trials: Sequence[Mapping[str, Any]]) -> str:
    """Quality lost against latency of every recipe that was tried."""
    shown = [each for each in trials if each.get("drop") is not None and each.get("milliseconds")]
    if not shown:
        return "<p>No recipe was measured.</p>"
    width, height = 1000, 320
    goal = next((each["max_drop"] for each in shown if each.get("max_drop") is not None), None)
    x, x_ticks = _scale([each["milliseconds"] for each in shown], 75, width - 30)
    y, y_ticks = _scale([100 * each["drop"] for each in shown] + ([100 * goal] if goal is not None else []), 12, height - 40)
    marks = []
    for each in shown:
        title = f"{each['name']}: {100 * each['drop']:.3f}% lost, {each['milliseconds']:.3f} ms"
        place = f'cx="{x(each["milliseconds"]):.1f}" cy="{y(100 * each["drop"]):.1f}"'
        best = f' stroke="{RED}" stroke-width="3"' if each.get("best") else ""
        marks.append(f'<circle {place} r="5" fill="{BLUE}" fill-opacity=".6"{best}><title>{_text(title)}</title></circle>')
    if goal is not None:
        marks.append(
            f'<line x1="60" x2="{width - 10}" y1="{y(100 * goal):.1f}" y2="{y(100 * goal):.1f}" stroke="{RED}" stroke-dasharray="5 4"/>'
        )
    axes = _axes(width, height, x_ticks, y_ticks, "latency, ms (ringed: the one kept)", "lost, % (best: upper left; dashed: goal)")
    table = [
        [each["name"], f"{100 * each['drop']:.3f}%", f"{each['milliseconds']:.3f}", "kept" if each.get("best") else ""]
        for each in sorted(shown, key=lambda each: each["milliseconds"])
    ]
    return f'<svg viewBox="0 0 {width} {height}" width="100%">{axes}{"".join(marks)}</svg>' + _html_table(
        ["recipe", "lost", "ms", ""], table
    )


def _engine(name: str, found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"<p><b>{_text(name)}</b>: {_text(found['error'])}</p>"
    ran = ", ".join(f"{count} {kind}" for kind, count in found["ran"].items())
    fallen = found["fallbacks"]
    said = (
        "every int8 operator ran in integers, or as a part of one that did" if not fallen else f"{len(fallen)} int8 operators ran in float:"
    )
    table = _html_table(["operator", "kernel", "precision"], [[each["name"], each["type"], each["precision"]] for each in fallen])
    return f"<p><b>{_text(name)}</b>: {said}</p>{table if fallen else ''}<p>It ran {_text(ran)}.</p>"


def _tensor(name: str, found: Mapping[str, Any]) -> str:
    """A small histogram with the chosen range."""
    width, height = 220, 70
    low, high = min(found["minimum"], found["low"]), max(found["maximum"], found["high"])
    span = (high - low) or 1.0
    heights = np.log1p(np.array(found["counts"], np.float64))
    heights *= (height - 6) / max(float(heights.max(initial=0)), 1e-9)
    place = (np.array(found["edges"]) - low) / span * width
    bars = "".join(f"V{height - each:.1f}H{right:.1f}" for each, right in zip(heights, place[1:], strict=False))
    path = f"M{place[0]:.1f} {height}{bars}V{height}Z" if bars else ""
    bounds = "".join(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="{RED}"/>'
        for x in ((found[key] - low) / span * width for key in ("low", "high"))
    )
    return (
        f'<div class="t"><b title="{_text(name)}">{_text(name)}</b><svg viewBox="0 0 {width} {height}" width="100%">'
        f'<path d="{path}" fill="{BLUE}"/>{bounds}</svg>{found["low"]:.4g} to {found["high"]:.4g}, '
        f"step {found['scale']:.3g} {_text(found['method'])}<br/>"
        f"seen {found['minimum']:.4g} to {found['maximum']:.4g}<br/>{100 * found['saturated']:.3f}% saturated, "
        f"rounding {_db(found['sqnr_db']) or '-'} dB</div>"
    )
