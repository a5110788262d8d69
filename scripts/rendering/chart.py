"""The chart of docs/benchmarks/: this project and the fastest int8 peer of each task, from the report files, as SVG.

`scripts/render.py` writes it to docs/speed.svg and the same loads into README.md. A row is one load, measured
interleaved within one run; every CPU has a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import NamedTuple

import zoo
from pipelines.analysis import markdown
from pipelines.analysis.markdown import PEERS
from scripts.rendering.ratios import request_rates

WIDTH, LEFT, BAR, ROW, HEAD = 480, 12, 15, 68, 34
KEYS = ("results", "ratios")
MAX_BAR = 240  # length of a bar; its figures stand behind it
LEGEND = {"z": "int8-zoo", "o": "fastest peer"}
STYLE = """text{font:13px system-ui,sans-serif;fill:#1f2328}.t{font-weight:600}.p{fill:#59636e}
.z{fill:#0969da}.o{fill:#c2c9d1}.b{fill:#fff}
@media (prefers-color-scheme:dark){text{fill:#f0f6fc}.p{fill:#9198a1}
.z{fill:#4493f8}.o{fill:#484f58}.b{fill:#0d1117}}"""


class Load(NamedTuple):
    """A measured load: the rates of this project and of the fastest peer, in `unit` per second, and their ratio."""

    cpu: str
    task: str
    unit: str
    ours: float
    peer: str
    theirs: float
    times: float


def best(times: dict[str, float]) -> str:
    """Returns the fastest peer; times: the ratio of this project's rate to the rate of every peer."""
    return min(times, key=times.__getitem__)


def load(report: markdown.Report, task: str, unit: str, ours: str, rates: Mapping[str, float], **over: float) -> Load:
    """Returns a load beside its fastest peer.

    Args:
        report: The report.
        task: Title of the load.
        unit: Unit of the rates.
        ours: This project's system.
        rates: Rate of every system.
        over: The ratio to the rate of every peer; those of `rates` where the report has none.
    """
    over = over or {name: rates[ours] / rate for name, rate in rates.items() if not name.startswith("zoo")}
    peer = best(over)
    return Load(markdown.cpu(report), task, unit, rates[ours], peer, rates[peer], over[peer])


def clicks() -> Iterator[Load]:
    """Yields rows of a click log with Zipf-distributed ids, native kernels."""
    case = {"ids": "zipf", "batch_size": 512}
    for report in markdown.reports(zoo.SHIPPED / "wide-deep-criteo" / "reports", "peers"):
        results, ratios = ([row for row in report.content[key] if case.items() <= row.items()] for key in KEYS)
        rates = {row["engine"]: row["samples_per_second"] for row in results}
        for row in ratios:
            if row["engine"] == "zoo-native":
                yield load(report, "CTR: Wide & Deep, batches of 512", "rows", "zoo-native", rates, **row["over"])


def translation() -> Iterator[Load]:
    """Yields sentences, text to text."""
    for report in markdown.reports(PEERS, "translation-amd") + markdown.reports(PEERS, "translation-intel"):
        for case in report.content["cases"]:
            rates = {row["engine"]: row["sentences_per_second"]["median"] for row in case["results"]}
            over = case["ratios"].get("zoo-native", {})
            if (case["model"], case["task"]) == ("multi30k-en-de", "text") and "zoo-native" in rates and over:
                task = f"Translation: Transformer, beam {case['beam']}"
                yield load(report, task, "sentences", "zoo-native", rates, **over)


def images() -> Iterator[Load]:
    """Yields photos, JPEG to label."""
    for report in markdown.reports(PEERS, "images"):
        for model in report.content["models"]:
            if model["model"] == "mobilenet-v2-imagenet":
                rates = {row["system"]: row["images_per_second"] for row in model["results"]}
                over = {peer: row["times_as_fast"] for peer, row in model["ours"].items() if not peer.startswith("zoo")}
                yield load(report, "Images: MobileNet V2, JPEG to label", "images", "zoo-int8", rates, **over)


def texts() -> Iterator[Load]:
    """Yields embeddings of sentences in batches of 32, sorted by length for engines that pad."""
    for report in markdown.reports(PEERS, "texts"):
        for case in report.content["loads"]:
            if case["load"] == "sentences":
                rates = {way: figures["median"] for way, figures in case["results"]["sorted"].items()}
                yield load(report, "Embeddings: MiniLM-L6, sentences", "texts", "zoo", rates)


def serving() -> Iterator[Load]:
    """Yields requests of one row over HTTP, 64 connections, the server on one core."""
    for report, rates in request_rates():
        yield load(report, "Serving: Wide & Deep, single rows", "requests", "zoo serve", rates)


def loads() -> list[Load]:
    """Returns the loads of all tasks."""
    return [load for task in (clicks, translation, images, texts, serving) for load in task()]


def svg(loads: list[Load]) -> str:
    """Returns the chart: a part per CPU, in the order of their names; the bars of a row share a scale, by `times`."""
    parts, x, y = [], LEFT, BAR + 10
    for kind, words in LEGEND.items():
        parts.append(_bar(kind, x, 8, BAR))
        parts.append(_text(x + BAR + 6, 5 + BAR, words))
        x += BAR + 100
    for cpu in sorted({load.cpu for load in loads}):
        parts.append(_text(LEFT, y + 22, f"{cpu}, one core", "t"))
        y += HEAD
        for row in (one for one in loads if one.cpu == cpu):
            parts.append(_text(LEFT, y + 13, row.task))
            theirs = max(2, round(MAX_BAR / row.times)) if row.times >= 1 else MAX_BAR
            ours = MAX_BAR if row.times >= 1 else max(2, round(MAX_BAR * row.times))
            for kind, top, length, words in (
                ("z", y + 20, ours, f"{row.times:.2f}x, {row.ours:,.0f} {row.unit}/s"),
                ("o", y + 20 + BAR + 2, theirs, f"{row.peer}, {row.theirs:,.0f}"),
            ):
                parts.append(_bar(kind, LEFT, top, length))
                parts.append(_text(LEFT + length + 6, top + BAR - 3, words, "t" if kind == "z" else "p"))
            y += ROW
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    words = "; ".join(f"{load.task}: {load.times:.2f} times {load.peer} ({load.cpu})" for load in loads)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(words)}</title>\n'
        f'<style>{STYLE}</style>\n<rect class="b" width="{WIDTH}" height="{y}" rx="6"/>\n{body}\n</svg>\n'
    )


def _bar(kind: str, x: int, y: int, length: int) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{length}" height="{BAR}" rx="2"/>'


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x}" y="{y}">{escape(words)}</text>'
