"""Text encoders in MODELS.md and docs/benchmarks/, rendered from report files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import zoo
from pipelines.analysis import markdown
from pipelines.models.hub import Hub

OVERVIEW = "texts/s of a stream of mixed lengths, sorted by length"
LOWEST = {"least_cosine": ".4f", "cosine_below_99": ".2%"}  # see `zoo.texts.metrics.lowest`
OWN_ENGINES = ("zoo", "zoo-two-threads")
PEER_LEGEND = """Same weights and texts, one thread and core, interleaved, medians, by `scripts/peers/texts/texts.py`.

- single: milliseconds per text.
- unsorted, sorted: texts/s of a stream in batches of 32, in the given order and sorted by length. The native encoder
  does not pad, so it does not sort.
- tokens given: without tokenization.
- cosine: mean cosine to the fp32 vectors, and where it was measured, its minimum and the share of texts below .99.
- resident MB: memory of a process with the model open.
- openvino-nncf, st-openvino-int8: with the default settings of OpenVINO, which may compute float operators in bfloat16
  on CPUs that support it.
"""
NETWORK_LEGEND = """Networks with random weights and the layers of public models in two sizes, quantized by every tool,
from texts to results on one thread and core, engines interleaved, medians of CPU time, by
`scripts/peers/texts/networks.py`, which lists the commands for engines with environments of their own.

- tokens: milliseconds per text of that length, and the time of the fastest peer divided by it.
- stream: texts/s of a stream of 5 to 256 tokens, the peers in their fastest order and batches, and the ratio to the
  fastest peer.
- cosine: mean cosine to the fp32 results.
- OpenVINO runs with its default settings, openvino-fp32 too: it may compute in bfloat16 on CPUs that support it.
"""


def overview(name: str) -> dict[str, str]:
    """Returns the cells of a model in the overview table.

    Args:
        name: Name of the model.

    Returns:
        Cell by column; {} without measurements.
    """
    cells, measured = {}, markdown.reports(zoo.SHIPPED / name / "reports", "quality")
    if "names" in Hub(zoo.SHIPPED).card(name).details["preprocessing"]:
        return {}
    if measured:
        metrics = markdown.newest(measured).content["metrics"]
        spearman = " / ".join(f"{metrics[precision]['spearman']:.4f}" for precision in ("fp32", "int8"))
        cells["Spearman, STS-B"] = spearman
    if peer_reports := markdown.reports(markdown.PEERS, "texts"):
        cells |= {markdown.cpu_column(report): _speed_up(report) for report in peer_reports}
        sizes = markdown.newest(peer_reports).content.get("bytes", {})
        cells["MB"] = " / ".join(f"{size / 1e6:.1f}" for size in sizes.values())
    return cells


def _speed_up(report: markdown.Report) -> str:
    """Returns the throughput of int8 on a stream of mixed lengths, and its ratio to float32 in stock engines."""
    rate, peer, _ = _stream(report, "mixed", "onnxruntime-fp32", "fastembed")
    return f"{rate:,.0f} ({rate / peer:.2f}x)"


def _stream(report: markdown.Report, load: str, *peers: str) -> tuple[float, float, str]:
    """Returns texts/s of a sorted stream: of the zoo, and of the best of `peers` (default: all), with its name."""
    (results,) = (entry["results"]["sorted"] for entry in report.content["loads"] if entry["load"] == load)
    rates = {name: result["median"] for name, result in results.items()}
    peers = peers or tuple(name for name in rates if name not in OWN_ENGINES)
    best = max((name for name in rates if name in peers), key=rates.__getitem__)
    return rates["zoo"], rates[best], best


def sections(name: str) -> str:
    """Returns the body of a model's section in MODELS.md.

    Args:
        name: Name of the model.
    """
    card = Hub(zoo.SHIPPED).card(name)
    spec = card.details["preprocessing"]
    if names := spec.get("names"):
        return (
            f"- **Run:** `zoo run {name} texts.txt -o labels.csv`, `zoo evaluate {name}`\n"
            f"- **Input:** texts of up to {spec['max_length']} tokens. Output: {', '.join(names)}\n"
        )
    lines = [
        f"- **Run:** `zoo run {name} texts.txt -o vectors.npy`",
        f"- **Input:** texts of up to {spec['max_length']} tokens, longer texts are truncated. Output: "
        f"{spec['form']['width']} numbers per text, pooling {spec['form']['pooling']}",
    ]
    measured = markdown.reports(zoo.SHIPPED / name / "reports", "quality")
    if not measured:
        return "\n".join([*lines, "- **Quality, speed:** not measured\n"])
    report = markdown.newest(measured)
    change, kept = report.content["difference"], report.content["kept"]
    lines += [
        f"- **Quality** ({markdown.link(report.path, markdown.MODELS)}, {report.content['samples']:,} pairs), "
        f"int8 - fp32: Spearman {change['spearman']:+.4f}, cosine of the vectors "
        f"{change['cosine']:.4f} on average, {_lowest(change)}, "
        f"recall of the ten nearest of {report.content['texts']:,} texts {change['overlap']:.1%}",
        f"- **Compressed vectors**, recall of the ten nearest texts: float16 {kept['float16']:.1%}, int8 "
        f"{kept['int8']:.1%}, binary {kept['binary']:.1%}",
    ]
    for peer_report in markdown.reports(markdown.PEERS, "texts"):
        parts = []
        for load in ("sentences", "paragraphs", "mixed"):
            rate, peer, best = _stream(peer_report, load)
            parts.append(f"{load} {rate:,.0f} texts/s, {rate / peer:.2f}x {best}")
        lines.append(
            f"- **Speed**, sorted by length ({markdown.source(peer_report, markdown.MODELS)}): {'; '.join(parts)}"
        )
    return "\n".join([*lines, ""])


def _lowest(change: Mapping[str, float]) -> str:
    """Returns the minimum cosine of a report, and the share of texts below .99 if it has one."""
    share = f" ({change['cosine_below_99']:.2%} of the texts below .99)" if "cosine_below_99" in change else ""
    return f"{change['least_cosine']:.4f} at least{share}"


def benchmarks(names: Sequence[str]) -> str:
    """Returns the page of text encoders in docs/benchmarks/.

    Args:
        names: Names of the models.
    """
    tables = [_peer_tables(report) for report in markdown.reports(markdown.PEERS, "texts")]
    networks = [_network_table(report) for report in markdown.reports(markdown.PEERS, "text-networks")]
    parts = ["# Text encoders\n", *(["## Sentence encoders\n", PEER_LEGEND, *tables] if tables else [])]
    return "\n".join([*parts, *(["## Text encoders by architecture\n", NETWORK_LEGEND, *networks] if networks else [])])


def _network_table(report: markdown.Report) -> str:
    """Renders a report of `scripts/peers/texts/networks.py`."""
    networks = report.content["networks"]
    columns = list(dict.fromkeys(load["load"] for network in networks for load in network["loads"]))
    rows = []
    for network in networks:
        cells = {load["load"]: _network_cell(load) for load in network["loads"]}
        name = f"{network['shape']}, {network['size']}, {network['task']}"
        cosine = f"{network['engines']['zoo']['cosine']:.4f}"
        rows.append([name, cosine, *(cells.get(column, "") for column in columns)])
    layers = f"{report.content['layers']} layers"
    return "\n".join(
        [
            f"{markdown.source(report, markdown.BENCHMARKS)}, {layers}.\n",
            markdown.table(["network", "cosine", *columns], rows),
        ]
    )


def _network_cell(load: Mapping[str, Any]) -> str:
    """Returns the figure of the zoo, and its ratio to the fastest peer."""
    rates = load["load"] == "stream"
    figures = {name: result["median"] for name, result in load["results"].items()}
    own = figures.pop("zoo")
    written = f"{own:,.0f}" if own >= 1000 else f"{own:.4g}"
    if not figures:
        return written
    best = (max if rates else min)(figures, key=figures.__getitem__)
    ratio = own / figures[best] if rates else figures[best] / own
    return f"{written} ({ratio:.2f}x {best})"


def _peer_tables(report: markdown.Report) -> str:
    """Renders a report of `scripts/peers/texts/texts.py`."""
    engines = report.content["ways"]
    lowest = {key: form for key, form in LOWEST.items() if all(key in engine for engine in engines.values())}
    columns = ["engine", "cosine", *(["minimum", "below .99"] if lowest else []), "resident MB"]
    rows = [
        [
            name,
            f"{engine['cosine']:.4f}",
            *(f"{engine[key]:{form}}" for key, form in lowest.items()),
            f"{engine['memory_mb']:,.0f}",
        ]
        for name, engine in engines.items()
    ]
    parts = [markdown.source(report, markdown.BENCHMARKS) + ".\n", markdown.table(columns, rows)]
    for load in report.content["loads"]:
        cells = [
            [name, *(f"{result[name]['median']:.4g}" if name in result else "" for result in load["results"].values())]
            for name in engines
        ]
        parts += [
            f"{load['load'].capitalize()}, {load['characters']} characters on average:\n",
            markdown.table(["engine", *load["results"]], cells),
        ]
    return "\n".join(parts)
