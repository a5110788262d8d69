"""The chart of docs/benchmarks.md: this project and the fastest int8 peer of each task, from the report files, as SVG.

`scripts/render.py` writes it to docs/speed.svg and the same loads into README.md. A row is one load, measured
interleaved within one run; every CPU has a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import zoo
from pipelines.analysis import markdown

PEERS = Path(__file__).resolve().parent / "peers" / "reports"
WIDTH, LEFT, BAR, ROW, HEAD = 480, 12, 15, 68, 34
LONGEST = 240  # of a bar; its figures stand behind it
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
    """The fastest peer; times: the ratio of this project's rate to the rate of every peer."""
    return min(times, key=times.__getitem__)


def clicks() -> Iterator[Load]:
    """Rows of a click log with Zipf-distributed ids, native kernels."""
    for report in markdown.reports(zoo.SHIPPED / "wide-deep-criteo" / "reports", "peers"):
        at = {"ids": "zipf", "batch_size": 512}
        found = {
            each["engine"]: each["samples_per_second"]
            for each in report.content["results"]
            if at.items() <= each.items()
        }
        for each in report.content["ratios"]:
            if at.items() <= each.items() and each["engine"] == "zoo-native":
                peer = best(each["over"])
                task = "CTR: Wide & Deep, batches of 512"
                yield Load(
                    markdown.cpu(report), task, "rows", found["zoo-native"], peer, found[peer], each["over"][peer]
                )


def translation() -> Iterator[Load]:
    """Sentences, text to text."""
    for report in markdown.reports(PEERS, "translation-amd") + markdown.reports(PEERS, "translation-intel"):
        for case in report.content["cases"]:
            if (case["model"], case["task"]) != ("multi30k-en-de", "text"):
                continue
            rates = {each["engine"]: each["sentences_per_second"]["median"] for each in case["results"]}
            over = case["ratios"].get("zoo-native", {})
            if "zoo-native" in rates and over:
                peer = best(over)
                task = f"Translation: Transformer, beam {case['beam']}"
                yield Load(markdown.cpu(report), task, "sentences", rates["zoo-native"], peer, rates[peer], over[peer])


def images() -> Iterator[Load]:
    """Photos, JPEG to label."""
    for report in markdown.reports(PEERS, "images"):
        for model in report.content["models"]:
            if model["model"] != "mobilenet-v2-imagenet":
                continue
            rates = {each["system"]: each["images_per_second"] for each in model["results"]}
            over = {peer: each["times_as_fast"] for peer, each in model["ours"].items() if not peer.startswith("zoo")}
            peer = best(over)
            task = "Images: MobileNet V2, JPEG to label"
            yield Load(markdown.cpu(report), task, "images", rates["zoo-int8"], peer, rates[peer], over[peer])


def texts() -> Iterator[Load]:
    """Embeddings of sentences in batches of 32, sorted by length for engines that pad."""
    for report in markdown.reports(PEERS, "texts"):
        for load in report.content["loads"]:
            if load["load"] != "sentences":
                continue
            rates = {way: each["median"] for way, each in load["results"]["sorted"].items()}
            over = {way: rates["zoo"] / rate for way, rate in rates.items() if not way.startswith("zoo")}
            peer = best(over)
            task = "Embeddings: MiniLM-L6, sentences"
            yield Load(markdown.cpu(report), task, "texts", rates["zoo"], peer, rates[peer], over[peer])


def serving() -> Iterator[Load]:
    """Requests of one row over HTTP, 64 connections, the server on one core."""
    for report in markdown.reports(PEERS, "serving"):
        for part in report.content["parts"]:
            if part["part"] != "peers":
                continue
            rates = {
                each["server"]: each["requests_per_second"]["median"]
                for each in part["found"]
                if "left_out" not in each
            }
            over = {name: rates["zoo serve"] / rate for name, rate in rates.items() if name != "zoo serve"}
            peer = best(over)
            task = "Serving: Wide & Deep, single rows"
            yield Load(markdown.cpu(report), task, "requests", rates["zoo serve"], peer, rates[peer], over[peer])


def loads() -> list[Load]:
    """Returns the loads of all tasks."""
    return [load for task in (clicks, translation, images, texts, serving) for load in task()]


def svg(found: list[Load]) -> str:
    """The chart: a part per CPU, in the order of their names; the bars of a row share a scale, by `times`."""
    parts, y = [], 0
    for cpu in sorted({each.cpu for each in found}):
        parts.append(_text(LEFT, y + 22, f"{cpu}, one core: int8-zoo, fastest peer", "t"))
        y += HEAD
        for each in (load for load in found if load.cpu == cpu):
            parts.append(_text(LEFT, y + 13, each.task))
            theirs = max(2, round(LONGEST / each.times)) if each.times >= 1 else LONGEST
            ours = LONGEST if each.times >= 1 else max(2, round(LONGEST * each.times))
            for kind, top, length, words in (
                ("z", y + 20, ours, f"{each.times:.2f}x, {each.ours:,.0f} {each.unit}/s"),
                ("o", y + 20 + BAR + 2, theirs, f"{each.peer}, {each.theirs:,.0f}"),
            ):
                parts.append(f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{length}" height="{BAR}" rx="2"/>')
                parts.append(_text(LEFT + length + 6, top + BAR - 3, words, "t" if kind == "z" else "p"))
            y += ROW
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    words = "; ".join(f"{each.task}: {each.times:.2f} times {each.peer} ({each.cpu})" for each in found)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(words)}</title>\n'
        f'<style>{STYLE}</style>\n<rect class="b" width="{WIDTH}" height="{y}" rx="6"/>\n{body}\n</svg>\n'
    )


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x}" y="{y}">{escape(words)}</text>'
