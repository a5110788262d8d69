"""Tables of docs/benchmarks/ on servers, clusters and gradient exchange.

The public functions take the content of a report and its source (CPU and link), and return Markdown.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from pipelines.analysis import markdown

NOTES = """`zoo serve` and its peers, by `scripts/peers/serving/serving.py`.

- Server on one core; load on the other: wrk, 64 connections, one row of wide-deep-criteo per request in the Open
  Inference Protocol. Servers are interleaved and restarted in every round; medians (minimum to maximum).
- Peers run the same int8.onnx in ONNX Runtime, as in their documentation (`scripts/peers/serving/servers/`).
- stop: exit code after SIGTERM, and the number of processes that remain.
- HTTP layers were measured on a machine with other load.
"""
HEADINGS = {  # of the parts of a report
    "peers": "Servers",
    "rows": "Batches of rows",
    "lone": "Single requests",
    "sentences": "Texts",
    "embeddings": "Texts",
    "workers": "Memory",
    "layers": "HTTP layers",
}
LAYERS = "One native session behind each HTTP layer, computed on the server's thread ({source}):"
TEXT_LOADS = {"sentences": ("multi30k-en-de", "sentence"), "embeddings": ("minilm-l6, `/v1/embeddings`", "text")}


def served(part: Mapping[str, Any], source: str) -> str:
    """Renders a part of the report of servers.

    part: {"part", "found"}, see `scripts/peers/serving/serving.py`.
    """
    kind, facts = part["part"], part["found"]
    if kind == "workers":
        sizes = ", ".join(f"{one['workers']}: {one['memory_mb']} MB" for one in facts)
        served_models = "wide-deep-criteo and multi30k-en-de"
        return f"Memory of all processes (PSS) serving {served_models}, by workers: {sizes} ({source}).\n"
    if isinstance(facts, list):
        title = f"One row per request ({source}):"
        if kind == "layers":
            title = _first_layers(facts) + LAYERS.format(source=source)
        return f"{title}\n\n{_servers(facts)}"
    if kind == "rows":
        return (
            f"500 rows per request, TSV to CSV: {facts['served_rows_per_second']['median']:,.0f} rows/s, "
            f"{facts['share']:.2f} of `zoo run` in one process. p99 at 70% of that load: "
            f"{_tail(facts['at_70_percent'])}; with Poisson arrivals {_tail(facts['at_70_percent_poisson'])} "
            f"({source}).\n"
        )
    if kind == "lone":
        texts = [
            f"{name} {case['served_ms']['median']:.2f} ms ({case['added_ms']:+.2f} ms)" for name, case in facts.items()
        ]
        return f"Latency of a single request (overhead over the call): {'; '.join(texts)} ({source}).\n"
    model, unit = TEXT_LOADS[kind]
    return (
        f"{model}, {facts['clients']} clients, one {unit} per request: "
        f"{facts['served_per_second']['median']:,.0f} {unit}s/s, {facts['share']:.2f} of one call with 512 "
        f"{unit}s, p99 {facts['p99_ms']['median']:.0f} ms; overhead of a single {unit} "
        f"{facts['lone_added_ms']:+.2f} ms ({source}).\n"
    )


def soak(facts: Mapping[str, Any], source: str) -> str:
    """Renders the report of a soak test."""
    counts, memory, descriptors = facts["counts"], facts["memory_mb"], facts["descriptors"]
    return (
        f"Soak test, `scripts/peers/serving/soak.py`, {facts['minutes']:g} minutes, {facts['rate']:,.0f} requests/s "
        f"of a maximum of {facts['greatest_rate']:,.0f}, {facts['workers_killed']} workers killed, with slow, broken "
        f"and oversized clients: {counts['200']:,} responses, {counts.get('wrong', 0)} wrong, "
        f"{counts.get('lost', 0)} lost, {counts.get('503', 0)} with status 503; memory "
        f"{memory['first']:.0f} to {memory['last']:.0f} MB ({memory['slope_per_minute']:+.1f} MB/minute), "
        f"{descriptors['least']} to {descriptors['most']} descriptors "
        f"({source}).\n"
    )


DELTAS = """A delta per second with {changed_rows:,} changed rows of a table of {table_rows:,} rows, compared with a \
reload of
the whole folder every three seconds, by `scripts/peers/recommenders/deltas.py`: one worker on its own core, {clients}
clients; rounds with and without changes alternate. Ratio of the p99 with changes to the p99 without: deltas
{delta:.2f}, reload {reload:.2f}. {bits} ({source}):
"""


def deltas(report: Mapping[str, Any], source: str) -> str:
    """Renders the report of deltas that a running server takes."""
    rows = []
    for way in report["ways"]:
        numbers = [way.get(key, {}).get("median") for key in ("rate", "p50", "p99", "until_scored", "rows_per_second")]
        formats = (",.0f", ".1f", ".1f", ".2f", ",.0f")
        cells = ["" if n is None else format(n, form) for n, form in zip(numbers, formats, strict=True)]
        rows.append([way["way"], *cells])
    bits = "The results of both are bit-identical" if report["equal_bits"] else "The results differ"
    title = DELTAS.format(**{**report, **report["p99_ratio"]}, bits=bits, source=source)
    columns = ["changes", "requests/s", "p50, ms", "p99, ms", "until a changed row is scored, s", "changed rows/s"]
    return title + "\n" + markdown.table(columns, rows)


def scored(report: Mapping[str, Any], source: str) -> str:
    """Renders the report of scoring on several processes and on Ray."""
    rows = []
    for way, case in report["results"].items():
        equal = {True: "same bytes as one process", False: "other bytes"}.get(case.get("equal"), "")
        memory = [f"{case[key]:,}" if key in case else "" for key in ("memory_mb", "worker_mb")]
        rate = f"{case['rows_per_second']:,}"
        rows.append([way, f"{case['rows']:,}", f"{case['seconds']:.1f}", rate, *memory, equal])
    head = ["", "rows", "seconds", "rows/s", "MB, largest process", "MB, largest actor", "results"]
    text = (
        f"{report['model']}, {report['rows']:,} rows in {report['files']} Parquet files, process start to end, by "
        f"`scripts/peers/distributed/cluster.py` ({source})."
    )
    return _with_note(text, report, markdown.table(head, rows))


def ray_served(report: Mapping[str, Any], source: str) -> str:
    """Renders the report of serving on Ray Serve."""
    rows, rates = [], {(case["way"], case["rows"]): case["rate"] for case in report["results"]}
    sizes = sorted({size for _, size in rates})
    over = [f"{rates['zoo serve', size] / rates['zoo serve --on ray', size]:.1f}x ({size})" for size in sizes]
    for case in report["results"]:
        times = [f"{case[name]:,.1f}" for name in ("rate", "p50", "p99")]
        rows.append([case["way"], f"{case['rows']}", *times])
    head = ["", "rows per request", "requests/s", "p50, ms", "p99, ms"]
    text = (
        f"Requests/s of `zoo serve` over `zoo serve --on ray`, by rows per request: {', '.join(over)}.\n\n"
        f"{report['model']}, one worker and one replica, {report['clients']} clients, interleaved, by "
        f"`scripts/peers/serving/ray_serve.py` ({source})."
    )
    return _with_note(text, report, markdown.table(head, rows))


def _with_note(text: str, report: Mapping[str, Any], table: str) -> str:
    """Returns a text, the report's note and a table."""
    return f"{text} {report.get('note', '')}\n\n{table}"


def exchanged(report: Mapping[str, Any], source: str) -> str:
    """Renders the report of the exchange of gradients."""
    rows = []
    for model in report["models"]:
        for case in model["links"]:
            before, left = case["samples"] / case["seconds"], {row["machines"]: row for row in case["efficiency"]}
            rates = [f"{before:.1f}", f"{before * case['speedup']:.1f} ({case['speedup']:.2f}x)"]
            shares = [f"{share:.0%}" for share in case["share"]]
            paper = [f"{left[count][way]:.0%}" for count in (8, 128) for way in ("default", "tuned")]
            rows.append([model["model"], case["link"], *rates, *shares, *paper])
    head = ["", "link", "samples/s, default", "tuned", "exchange, share of step time", "tuned"]
    head += ["efficiency, 8 machines, default", "tuned", "128 machines, default", "tuned"]
    gains = [case["speedup"] for model in report["models"] for case in model["links"]]
    return (
        f"`--tune-communication` trains {min(gains):.2f}x to {max(gains):.2f}x as fast as the default exchange.\n\n"
        "Gradient exchange of two processes, one core each, over links shaped by `tc` and a relay, by "
        f"`scripts/peers/distributed/communication.py` ({source}). Efficiency is an "
        "estimate: throughput divided by that of as many single machines, with the same batch per machine and the "
        f"measured overlap of exchange and backward pass.\n\n{markdown.table(head, rows)}"
    )


def _tail(load: Mapping[str, Any]) -> str:
    return f"{load['p99']['median']:.1f} ms, {load['p99_by_median']['median']:.1f}x the median"


def _ended(code: int | None) -> str:
    if code is None:
        return "not within 10 s"
    return f"exit {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _first_layers(servers: list[Mapping[str, Any]]) -> str:
    """Returns a sentence: the HTTP layers with the most requests/s and with the shortest single request."""
    timed = [server for server in servers if "left_out" not in server]
    most = max(timed, key=lambda server: float(server["requests_per_second"]["median"]))
    lone = min(timed, key=lambda server: float(server["lone_p50_ms"]["median"]))
    return (
        f"{most['server']} has the most requests/s ({most['requests_per_second']['median']:,.0f}), "
        f"{lone['server']} the shortest single request ({lone['lone_p50_ms']['median']:.2f} ms).\n\n"
    )


def _servers(servers: list[Mapping[str, Any]]) -> str:
    rows, failed = [], ""
    for server in servers:
        if "left_out" in server:
            failed += f"\n{server['server']} failed: {markdown.reason(server['left_out'])}.\n"
            continue
        rate, stop = server["requests_per_second"], server["stop"]
        rows.append(
            [
                f"{server['server']} {server['version']}",
                f"{rate['median']:,.0f} ({rate['spread'][0]:,.0f} to {rate['spread'][1]:,.0f})",
                *(f"{server[key]['median']:.2f}" for key in ("p50_ms", "p99_ms", "lone_p50_ms", "ready_seconds")),
                f"{server['memory_mb']['median']:.0f}",
                f"{_ended(stop['exit'])}, {stop['left']} left",
                f"{server['package_mb']:.0f}",
            ]
        )
    columns = ["server", "requests/s", "p50, ms", "p99, ms", "one connection, p50, ms", "start, s", "MB (PSS)", "stop"]
    return markdown.table([*columns, "package, MB"], rows) + failed
