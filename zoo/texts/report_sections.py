"""Text encoders in MODELS.md and docs/benchmarks.md, rendered from report files."""

from __future__ import annotations

from collections.abc import Sequence

import zoo
from pipelines.analysis.markdown import Report, cpu_column, link, newest, reports, source, table
from pipelines.models.hub import Hub

ROOT = zoo.SHIPPED.parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
MODELS = ROOT / "MODELS.md"
PEERS = ROOT / "scripts" / "peers" / "reports"
OVERVIEW = "texts/s of a stream of mixed lengths, sorted by length"
OURS = ("zoo", "zoo-two-threads")
BESIDE = """Same weights and texts, one thread and core, interleaved, medians, by `scripts/peers/texts.py`.

- single: milliseconds per text.
- unsorted, sorted: texts/s of a stream in batches of 32, in the given order and sorted by length. The native encoder
  does not pad, so it does not sort.
- tokens given: without tokenization.
- cosine: mean cosine to the fp32 vectors.
- resident MB: memory of a process with the model open.
"""


def overview(name: str) -> dict[str, str]:
    """The model's cells in the overview table, by column; {} if nothing was measured."""
    cells, measured = {}, reports(zoo.SHIPPED / name / "reports", "quality")
    if measured:
        metrics = newest(measured).content["metrics"]
        spearman = " / ".join(f"{metrics[each]['spearman']:.4f}" for each in ("fp32", "int8"))
        cells["Spearman, STS-B"] = spearman
    if beside := reports(PEERS, "texts"):
        cells |= {cpu_column(report): _speed_up(report) for report in beside}
        sizes = newest(beside).content.get("bytes", {})
        cells["MB"] = " / ".join(f"{sizes[each] / 1e6:.1f}" for each in sizes)
    return cells


def _speed_up(report: Report) -> str:
    """The throughput of int8 on a stream of mixed lengths, and its ratio to float32 in stock engines."""
    rate, peer, _ = _stream(report, "mixed", "onnxruntime-fp32", "fastembed")
    return f"{rate:,.0f} ({rate / peer:.2f}x)"


def _stream(report: Report, load: str, *others: str) -> tuple[float, float, str]:
    """(texts/s of the zoo in a stream sorted by length, texts/s and name of the best of `others`, of all if none)."""
    (found,) = (each["results"]["sorted"] for each in report.content["loads"] if each["load"] == load)
    rates = {name: each["median"] for name, each in found.items()}
    best = max((each for each in rates if each in others or (not others and each not in OURS)), key=rates.__getitem__)
    return rates["zoo"], rates[best], best


def sections(name: str) -> str:
    """The body of the model's section in MODELS.md."""
    spec = Hub(zoo.SHIPPED).card(name).details["preprocessing"]
    lines = [
        f"- **Run:** `zoo run {name} texts.txt -o vectors.npy`",
        f"- **Input:** texts of up to {spec['max_length']} tokens, longer texts are truncated. Output: "
        f"{spec['form']['width']} numbers per text, pooling {spec['form']['pooling']}",
    ]
    measured = reports(zoo.SHIPPED / name / "reports", "quality")
    if not measured:
        return "\n".join([*lines, "- **Quality, speed:** not measured\n"])
    report = newest(measured)
    change, kept = report.content["difference"], report.content["kept"]
    lines += [
        f"- **Quality** ({link(report.path, MODELS)}, {report.content['samples']:,} pairs), int8 - fp32: Spearman "
        f"{change['spearman']:+.4f}, mean cosine of the vectors {change['cosine']:.4f}, recall of the ten nearest of "
        f"{report.content['texts']:,} texts {change['overlap']:.1%}",
        f"- **Compressed vectors**, recall of the ten nearest texts: float16 {kept['float16']:.1%}, int8 "
        f"{kept['int8']:.1%}, binary {kept['binary']:.1%}",
    ]
    for each in reports(PEERS, "texts"):
        parts = []
        for load in ("sentences", "paragraphs", "mixed"):
            rate, peer, best = _stream(each, load)
            parts.append(f"{load} {rate:,.0f} texts/s, {rate / peer:.2f}x {best}")
        lines.append(f"- **Speed**, sorted by length ({source(each, MODELS)}): {'; '.join(parts)}")
    return "\n".join([*lines, ""])


def benchmarks(names: Sequence[str]) -> str:
    """Text encoders in docs/benchmarks.md."""
    found = [_beside(each) for each in reports(PEERS, "texts")]
    return "\n".join(["## Sentence encoders\n", BESIDE, *found]) if found else ""


def _beside(report: Report) -> str:
    """One report of `scripts/peers/texts.py`."""
    ways = report.content["ways"]
    columns = ["engine", "cosine", "resident MB"]
    rows = [[name, f"{each['cosine']:.4f}", f"{each['memory_mb']:,.0f}"] for name, each in ways.items()]
    parts = [source(report, BENCHMARKS) + ".\n", table(columns, rows)]
    for load in report.content["loads"]:
        cells = [
            [name, *(f"{found[name]['median']:.4g}" if name in found else "" for found in load["results"].values())]
            for name in ways
        ]
        parts += [
            f"{load['load'].capitalize()}, {load['characters']} characters on average:\n",
            table(["engine", *load["results"]], cells),
        ]
    return "\n".join(parts)
