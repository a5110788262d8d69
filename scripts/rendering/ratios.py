"""Speed of this project over that of its peers, from the report files: for docs/benchmarks/ and docs/compared-with/.

A section of the benchmarks begins with its ratios to the fastest peer of each case; the pages of peers have the ratios
to one peer. Both show the minimum, the median and the maximum of a group of cases, so that a case in which a peer is
faster is on the page.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import zoo
from pipelines.analysis import markdown
from pipelines.analysis.markdown import PEERS, ROOT, Report
from scripts.peers.quantization.opening import EMPTY

PAGES = ROOT / "docs" / "compared-with"
OURS = "zoo-native"
LOADS = {  # of scripts/peers/vision/image_networks.py: titles of the keys of a model
    "batch_1": "batch 1",
    "batch_16": "batch 16",
    "avx2": "AVX2 only, 7-bit weights",
    "avx2_8_bits": "AVX2 only, 8-bit weights",
}
COLUMNS = ("workload", "peer", "CPU", "cases", "minimum", "median", "maximum", "report")
LEGEND = "Speed-up over the fastest peer, or over the baseline of a row: median (minimum to maximum of its cases).\n\n"


class Case(NamedTuple):
    """Speed of this project over that of each peer in one case.

    Attributes:
        report: The report.
        section: Heading of the section of docs/benchmarks/ that shows the case; "" for cases of other pages.
        workload: What was timed; the cases of one workload are one row of a table.
        over: Ratio by peer.
    """

    report: Report
    section: str
    workload: str
    over: dict[str, float]


def _case(report: Report, section: str, workload: str, over: Mapping[str, Any]) -> Iterator[Case]:
    """Yields the case, if a peer was measured."""
    measured = {peer: times for peer, times in over.items() if times is not None and not peer.startswith("zoo")}
    if measured:
        yield Case(report, section, workload, measured)


def _shipped(kind: str) -> Iterator[tuple[str, Report]]:
    """Yields the reports of a kind of all models that ship, with the name of the model."""
    for folder in sorted(zoo.SHIPPED.iterdir()):
        for report in markdown.reports(folder / "reports", kind):
            yield folder.name, report


def clicks() -> Iterator[Case]:
    """Yields rankers: Wide & Deep on Criteo's rows, every family on a custom log, and files of rows."""
    for name, report in _shipped("speed"):
        results = report.content["results"]
        for size in sorted({result["batch_size"] for result in results}, reverse=True):
            rates = {
                precision: max(
                    result["samples_per_second"]
                    for result in results
                    if (result["precision"], result["batch_size"]) == (precision, size)
                )
                for precision in ("int8", "fp32")
            }
            over = {"fp32": rates["int8"] / rates["fp32"]}
            yield from _case(report, f"{name}: engines", f"{name}, int8 over fp32, batches of {size}", over)
    for name, report in _shipped("peers"):
        for row in report.content["ratios"]:
            if row["engine"] == OURS:
                title = f"{name}: native kernels and other engines"
                yield from _case(report, title, f"Wide & Deep, batches of {row['batch_size']}", row["over"])
    for name, report in _shipped("runs"):
        rates = {row["way"]: row["rows_per_second"] for row in report.content["results"]}
        ours = max((way for way in rates if way.startswith("zoo run") and "rows" not in way), key=rates.__getitem__)
        yield from _rates(report, f"{name}: raw rows to scores", f"{name}, file to file", ours, rates)
    for report in markdown.reports(PEERS, "click-models"):
        for model in report.content["models"]:
            for row in model.get("ratios", ()):
                if row["engine"] == OURS:
                    workload = f"recommender families, batches of {row['batch_size']}"
                    yield from _case(report, "Families", workload, row["over"])


def custom_logs() -> Iterator[Case]:
    """Yields readers of logs, lookups in tables, and rankings of many candidates."""
    for report in markdown.reports(PEERS, "log-reading"):
        for shape in report.content["shapes"]:
            log = "Criteo's rows" if shape["shape"] == "criteo" else "custom columns"
            yield from _case(report, "Reading logs", f"reading {log}", shape["over"])
    for report in markdown.reports(PEERS, "tables"):
        for table in report.content["tables"]:
            for row in table["lookups"]:
                rates = {engine: figures["median"] for engine, figures in row["million_per_second"].items()}
                workload = f"{table['features']} tables of {table['bits']} bits"
                yield from _rates(report, "Embedding tables", workload, "zoo", rates)
    for report in markdown.reports(PEERS, "beyond-memory"):
        for lookups in report.content["lookups"]:
            yield from _case(report, "Tables larger than memory", "tables on disk", lookups["ratios"])
    for report in markdown.reports(PEERS, "dlrm-v2"):
        for compared in report.content["engines"]:
            for row in compared["ratios"]:
                if row["engine"] == OURS:
                    yield from _case(report, "DLRM-v2", f"DLRM-v2, batches of {row['batch_size']}", row["over"])
    for report in markdown.reports(PEERS, "ranking"):
        for model in report.content["models"]:
            for way, title in (("rank rows", "rows of items"), ("rank ids", "ids of a catalogue")):
                over = {"full rows": model["ratios"][way]}
                yield from _case(report, "Ranking", f"rank over full rows, {title}", over)
    for report in markdown.reports(PEERS, "retrieval"):
        over = {way["way"]: way["cpu_ratio"] for way in report.content["ways"] if "zoo" not in way["way"]}
        yield from _case(report, "Retrieval", "retrieval and ranking of 1,000,000 items", over)


def translation() -> Iterator[Case]:
    """Yields Transformers: decoding of a fixed length, text to text, two threads, and decoding without caches."""
    for report in markdown.reports(PEERS, "translation"):
        for case in report.content["cases"]:
            task = {"steps": "decoding", "text": "text to text"}.get(case["task"], case["task"])
            workload = f"{task}, batches of {case['batch_size']}"
            yield from _case(report, "Engines", workload, case["ratios"].get(OURS, {}))
    for _, report in _shipped("threads"):
        over = {"one thread": report.content["times_as_fast"]}
        yield from _case(report, "Threads", "translation, two threads over one", over)
    for report in markdown.reports(PEERS, "steps"):
        for model in report.content["models"]:
            for case in model["rows"][0]["cases"]:
                over = {"without": case["times"]}
                yield from _case(report, "Rewrites", f"decoding with {model['rows'][0]['rewrite']}", over)


def images() -> Iterator[Case]:
    """Yields image classifiers: JPEG to label, and networks alone."""
    for _, report in _shipped("images"):
        times = {
            precision: min(
                row["latency_ms"]["p50"] for row in report.content["results"] if row["precision"] == precision
            )
            for precision in ("int8", "fp32")
        }
        workload = "image classifiers, JPEG to label, int8 over fp32"
        yield from _case(report, "From JPEG to label", workload, {"fp32": times["fp32"] / times["int8"]})
    for report in markdown.reports(PEERS, "images"):
        for model in report.content["models"]:
            over = {peer: row["times_as_fast"] for peer, row in model["ours"].items()}
            yield from _case(report, "Peer pipelines", "image classifiers, JPEG to label", over)
    for report in markdown.reports(PEERS, "image-networks"):
        for model in report.content["models"]:
            for key, load in LOADS.items():
                over = {peer: row["native_is"] for peer, row in model.get(key, {}).items() if peer != "native"}
                yield from _case(report, "Networks", f"image networks, {load}", over)


def texts() -> Iterator[Case]:
    """Yields sentence encoders, and text encoders by architecture: streams, and single texts."""
    for report in markdown.reports(PEERS, "texts"):
        for load in report.content["loads"]:
            results = load["results"]
            rates = {way: figures["median"] for way, figures in results["sorted"].items()}
            yield from _rates(report, "Sentence encoders", "texts, sorted by length", "zoo", rates)
            times = {way: figures["median"] for way, figures in results["single"].items()}
            yield from _times(report, "Sentence encoders", "single texts", "zoo", times)
    for report in markdown.reports(PEERS, "text-networks"):
        for load in (load for network in report.content["networks"] for load in network["loads"]):
            figures = {way: result["median"] for way, result in load["results"].items()}
            ratios = _rates if load["load"] == "stream" else _times
            yield from ratios(report, "Text encoders by architecture", f"text encoders, {load['load']}", "zoo", figures)


def quantizers() -> Iterator[Case]:
    """Yields third-party ONNX models: int8 files in the same engine, and engines with their own fastest file."""
    origins = {"own-models": "third-party", "detectors": "third-party", "exported": "exported"}  # by kind of report
    reports = ((origin, report) for kind, origin in origins.items() for report in markdown.reports(PEERS, kind))
    for origin, report in reports:
        for model in report.content["models"]:
            fastest: dict[str, float] = {}
            for engine, settings in model.get("milliseconds", {}).items():
                times = {setting: figures["median"] for setting, figures in settings.items() if setting != "fp32"}
                fastest = {name: min(times.get(name, inf), fastest.get(name, inf)) for name in {**fastest, **times}}
                yield from _files(report, f"in {engine}", times)
            yield from _files(report, "each in its fastest engine", fastest)
            first = {str(model.get("batch", 1)): model.get("milliseconds", {})}
            for size, engines in {**first, **model.get("larger", {})}.items():
                yield from _case(report, "Speed and quality", f"{origin} networks, batch {size}", rivals(engines))
            yield from _opened(report, model.get("opening", {}))


def _opened(report: Report, engines: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[Case]:
    """Yields the CPU time from the name of a file to its first result, with a program of the native engine or without.

    engines: {engine: {file: {"cpu_milliseconds"}}}.
    """
    others = {
        f"{name} in {engine}": cost["cpu_milliseconds"]
        for engine, costs in engines.items()
        for name, cost in costs.items()
        if engine not in ("native", EMPTY)
    }
    for engine, title in (("native", "opening a file"), (EMPTY, "opening a file, empty cache")):
        if own := engines.get(engine, {}).get("zoo"):
            yield from _times(report, "Opening a file", title, "zoo", {**others, "zoo": own["cpu_milliseconds"]})


def rivals(engines: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Returns the speed of this project's file in its fastest engine over every other file in a stock engine.

    Args:
        engines: {engine: {file: {"median": milliseconds}}}.

    Returns:
        Ratio by "FILE in ENGINE", float32 included; {} without a file of this project.
    """
    ours = min((files["zoo"]["median"] for files in engines.values() if "zoo" in files), default=None)
    if ours is None:
        return {}
    return {
        f"{name} in {engine}": figures["median"] / ours
        for engine, files in engines.items()
        for name, figures in files.items()
        if engine != "native" and name != "zoo"
    }


def request_rates() -> Iterator[tuple[Report, dict[str, float]]]:
    """Yields the reports of servers, with the requests of one row per second that each server answered."""
    for report in markdown.reports(PEERS, "serving"):
        for part in report.content["parts"]:
            if part["part"] == "peers":
                measured = [row for row in part["found"] if "left_out" not in row]
                yield report, {row["server"]: row["requests_per_second"]["median"] for row in measured}


def servers() -> Iterator[Case]:
    """Yields requests of one row over HTTP, and scoring in shards."""
    for report, rates in request_rates():
        yield from _rates(report, "Servers", "requests of one row, 64 connections", "zoo serve", rates)
    for report in markdown.reports(PEERS, "cluster"):
        rates = {way: row["rows_per_second"] for way, row in report.content["results"].items()}
        peers = ("one process", "ray data, onnxruntime, a running cluster")
        for way in ("two shards", "ray, a running cluster"):
            over = {peer: rates[way] / rates[peer] for peer in peers if peer in rates and way in rates}
            yield from _case(report, "Scoring", f"20,000,000 rows, {way}", over)


def smaller() -> Iterator[Case]:
    """Yields models before and after pruning, in their fastest engines, and two contexts of a session."""
    for report in markdown.reports(PEERS, "smaller"):
        for model in report.content["models"]:
            engines = [engine for name, engine in model["engines"].items() if not name.startswith("peer")]
            before, after = (min(row[key]["median"] for row in engines) for key in ("before_ms", "after_ms"))
            yield from _case(report, "Pruning", "int8, pruned over not pruned", {"not pruned": before / after})
    for report in markdown.reports(PEERS, "contexts"):
        for model in report.content["models"]:
            yield from _case(report, "Parallel contexts", "two contexts over one", {"one context": model["times"]})


def _rates(report: Report, section: str, workload: str, ours: str, rates: Mapping[str, float]) -> Iterator[Case]:
    """Yields a case of rates."""
    yield from _case(report, section, workload, {peer: rates[ours] / rate for peer, rate in rates.items()})


def _times(report: Report, section: str, workload: str, ours: str, times: Mapping[str, float]) -> Iterator[Case]:
    """Yields a case of times."""
    yield from _case(report, section, workload, {peer: time / times[ours] for peer, time in times.items()})


def _files(report: Report, where: str, times: Mapping[str, float]) -> Iterator[Case]:
    """Yields the case of the int8 files of one model; `times` are milliseconds by setting."""
    if "zoo" in times:
        yield from _times(report, "", f"int8 files of third-party models, {where}", "zoo", times)


SOURCES = (images, texts, translation, clicks, custom_logs, quantizers, servers, smaller)
# page: beginnings of the names of its peers
NAMED = {
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino", "nncf"),
    "ctranslate2": ("ctranslate2",),
    "sentence-transformers": ("sentence-transformers", "st-"),
    "fbgemm": ("fbgemm",),
}


@functools.cache
def cases() -> tuple[Case, ...]:
    """Returns the cases of all reports."""
    return tuple(case for source in SOURCES for case in source())


def answer(sections: Iterable[str]) -> str:
    """Returns the ratios of sections to the fastest peer of each case: a row a workload, a column a CPU.

    Args:
        sections: Headings of the sections.

    Returns:
        Markdown; "" without cases.
    """
    headings = {*sections}
    groups: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for case in (case for case in cases() if case.section in headings):
        best = min(case.over, key=case.over.__getitem__)
        groups.setdefault(case.workload, {}).setdefault(markdown.cpu(case.report), []).append((case.over[best], best))
    cpus = sorted({cpu for row in groups.values() for cpu in row})
    rows = [[workload, *(_cell(row.get(cpu, [])) for cpu in cpus)] for workload, row in groups.items()]
    return markdown.table(["workload", *cpus], rows) if rows else ""


def _cell(best: list[tuple[float, str]]) -> str:
    """The ratios of one workload on one CPU; of a single case with the name of the peer."""
    if not best:
        return ""
    times = sorted(ratio for ratio, _ in best)
    if len(times) == 1:
        return f"{times[0]:.2f}x {best[0][1]}"
    return f"{statistics.median(times):.2f}x ({times[0]:.2f} to {times[-1]:.2f})"


def table(name: str) -> str:
    """Returns the table of a page of docs/compared-with/, in the order of the minimum ratios.

    Args:
        name: Name of the page, a key of `NAMED`.
    """
    groups: dict[tuple[str, str, Path], list[float]] = {}
    reports: dict[Path, Report] = {}
    for case in cases():
        reports[case.report.path] = case.report
        for peer, times in case.over.items():
            if peer.startswith(NAMED[name]) and " in " not in peer:
                groups.setdefault((case.workload, peer, case.report.path), []).append(times)
    rows = []
    for (workload, peer, path), ratios in sorted(groups.items(), key=lambda item: min(item[1])):
        cells = [f"{factor:.2f}x" for factor in (min(ratios), statistics.median(ratios), max(ratios))]
        link = markdown.link(path, PAGES / f"{name}.md")
        rows.append([workload, peer, markdown.cpu(reports[path]), str(len(ratios)), *cells, link])
    return markdown.table(COLUMNS, rows)
