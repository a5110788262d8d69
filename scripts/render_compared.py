"""The tables of docs/compared-with/: speed of this project over that of one peer, from the report files.

`scripts/render.py` writes them between the markers of each page. A row is a group of cases of one report: the minimum,
the median and the maximum of the ratios, so that a case in which the peer is faster is on the page.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import zoo
from pipelines.analysis import markdown
from pipelines.analysis.markdown import Report

PEERS = Path(__file__).resolve().parent / "peers" / "reports"
PAGES = Path(__file__).resolve().parents[1] / "docs" / "compared-with"
OURS = "zoo-native"
LOADS = {  # of scripts/peers/vision/image_networks.py: titles of the keys of a model
    "batch_1": "batch 1",
    "batch_16": "batch 16",
    "avx2": "AVX2 only, 7-bit weights",
    "avx2_8_bits": "AVX2 only, 8-bit weights",
}
COLUMNS = ("workload", "peer", "CPU", "cases", "minimum", "median", "maximum", "report")


class Ratio(NamedTuple):
    """Speed of this project over that of a peer in one case; cases with one `group` and `peer` are one row."""

    report: Report
    group: str
    peer: str
    times: float


def _over(report: Report, group: str, ratios: Mapping[str, Any]) -> Iterator[Ratio]:
    """Yields the ratios to all peers that were measured."""
    for peer, times in ratios.items():
        if times is not None and not peer.startswith("zoo"):
            yield Ratio(report, group, peer, times)


def clicks() -> Iterator[Ratio]:
    """Yields rankers: Wide & Deep on Criteo's rows, and every family on a custom log."""
    for report in markdown.reports(zoo.SHIPPED / "wide-deep-criteo" / "reports", "peers"):
        for row in report.content["ratios"]:
            if row["engine"] == OURS:
                group = f"Wide & Deep, batches of {row['batch_size']}"
                yield from _over(report, group, row["over"])
    for report in markdown.reports(PEERS, "click-models"):
        for model in report.content["models"]:
            for row in model.get("ratios", ()):
                if row["engine"] == OURS:
                    yield from _over(report, f"recommender families, batches of {row['batch_size']}", row["over"])


def translation() -> Iterator[Ratio]:
    """Yields Transformers: decoding of a fixed length, and text to text."""
    for report in markdown.reports(PEERS, "translation"):
        for case in report.content["cases"]:
            task = {"steps": "decoding", "text": "text to text"}.get(case["task"], case["task"])
            yield from _over(report, f"{task}, batches of {case['batch_size']}", case["ratios"].get(OURS, {}))


def images() -> Iterator[Ratio]:
    """Yields image classifiers: JPEG to label, and networks alone."""
    for report in markdown.reports(PEERS, "images"):
        for model in report.content["models"]:
            over = {peer: row["times_as_fast"] for peer, row in model["ours"].items()}
            yield from _over(report, "image classifiers, JPEG to label", over)
    for report in markdown.reports(PEERS, "image-networks"):
        for model in report.content["models"]:
            for key, load in LOADS.items():
                over = {peer: row["native_is"] for peer, row in model.get(key, {}).items() if peer != "native"}
                yield from _over(report, f"image networks, {load}", over)


def texts() -> Iterator[Ratio]:
    """Yields sentence encoders: a stream sorted by length, and single texts."""
    for report in markdown.reports(PEERS, "texts"):
        for load in report.content["loads"]:
            results = load["results"]
            rates = {way: figures["median"] for way, figures in results["sorted"].items()}
            yield from _over(
                report, "texts, sorted by length", {way: rates["zoo"] / rate for way, rate in rates.items()}
            )
            times = {way: figures["median"] for way, figures in results["single"].items()}
            yield from _over(report, "single texts", {way: time / times["zoo"] for way, time in times.items()})


def tables() -> Iterator[Ratio]:
    """Yields lookups in quantized embedding tables."""
    for report in markdown.reports(PEERS, "tables"):
        for table in report.content["tables"]:
            for row in table["lookups"]:
                rates = {engine: figures["median"] for engine, figures in row["million_per_second"].items()}
                group = f"{table['features']} tables of {table['bits']} bits"
                yield from _over(report, group, {peer: rates["zoo"] / rate for peer, rate in rates.items()})


def quantizers() -> Iterator[Ratio]:
    """Yields third-party ONNX models: each tool's int8 file in the same engine, and in its fastest engine."""
    for report in (file for kind in ("own-models", "detectors", "exported") for file in markdown.reports(PEERS, kind)):
        for model in report.content["models"]:
            fastest: dict[str, float] = {}
            for engine, settings in model.get("milliseconds", {}).items():
                times = {setting: figures["median"] for setting, figures in settings.items() if setting != "fp32"}
                fastest = {name: min(times.get(name, inf), fastest.get(name, inf)) for name in {**fastest, **times}}
                yield from _files(report, f"in {engine}", times)
            yield from _files(report, "each in its fastest engine", fastest)


def _files(report: Report, where: str, times: Mapping[str, float]) -> Iterator[Ratio]:
    """Yields the ratios of the int8 files of one model; `times` are milliseconds by setting."""
    if "zoo" in times:
        over = {setting: time / times["zoo"] for setting, time in times.items()}
        yield from _over(report, f"int8 files of third-party models, {where}", over)


RATIOS = (clicks, translation, images, texts, tables, quantizers)
# page: beginnings of the names of its peers
NAMED = {
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino", "nncf"),
    "ctranslate2": ("ctranslate2",),
    "sentence-transformers": ("sentence-transformers", "st-"),
    "fbgemm": ("fbgemm",),
}


def table(name: str) -> str:
    """Returns the table of a page, in the order of the minimum ratios.

    Args:
        name: Name of the page, a key of `NAMED`.
    """
    groups: dict[tuple[str, str, Path], list[Ratio]] = {}
    for member in (ratio for of_task in RATIOS for ratio in of_task()):
        if member.peer.startswith(NAMED[name]):
            groups.setdefault((member.group, member.peer, member.report.path), []).append(member)
    rows = []
    for (group, peer, path), members in sorted(groups.items(), key=lambda item: min(ratio.times for ratio in item[1])):
        times = sorted(ratio.times for ratio in members)
        cells = [f"{factor:.2f}x" for factor in (times[0], statistics.median(times), times[-1])]
        link = markdown.link(path, PAGES / f"{name}.md")
        rows.append([group, peer, markdown.cpu(members[0].report), str(len(times)), *cells, link])
    return markdown.table(COLUMNS, rows)
