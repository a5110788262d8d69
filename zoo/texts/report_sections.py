"""What the pages of the zoo show of encoders of texts, rendered from their report files."""

from __future__ import annotations

from collections.abc import Sequence

import zoo
from pipelines.analysis.markdown import Report, by_cpu, link, newest, reports, source, table
from pipelines.models.hub import Hub

ROOT = zoo.SHIPPED.parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
MODELS = ROOT / "MODELS.md"
PEERS = ROOT / "scripts" / "peers" / "reports"
OURS = ("zoo", "zoo-two-threads")
BESIDE = """The same weights and texts, one thread and core, in turn, medians, by `scripts/peers/texts.py`:
milliseconds of one text alone, texts/s of a stream in batches of 32, in the given order and sorted by length (the
native encoder takes any lengths and sorts nothing). "tokens given": without tokenization. Cosine: mean of the vectors
to those of fp32. Memory: of a process that opened the finished files.
"""


def overview(name: str) -> dict[str, str]:
    """The model's cells in the overview, by column."""
    cells, measured = {}, reports(zoo.SHIPPED / name / "reports", "quality")
    if measured:
        metrics = newest(measured).content["metrics"]
        spearman = " / ".join(f"{metrics[each]['spearman']:.4f}" for each in ("fp32", "int8"))
        cells["quality, fp32 / int8"] = f"{spearman} Spearman, STS-B"
    if beside := reports(PEERS, "texts"):
        cells["speed-up"] = by_cpu((each, _speed_up(each)) for each in beside)
        sizes = newest(beside).content.get("bytes", {})
        cells["MB, fp32 / int8"] = " / ".join(f"{sizes[each] / 1e6:.1f}" for each in sizes)
    return cells


def _speed_up(report: Report) -> str:
    """int8 to float32 in onnxruntime, on a stream of sentences and paragraphs."""
    rate, peer, _ = _stream(report, "mixed", "onnxruntime-fp32", "fastembed")
    return f"{rate / peer:.2f}x: {rate:,.0f} texts/s, native"


def _stream(report: Report, load: str, *others: str) -> tuple[float, float, str]:
    """(texts/s of the zoo in a stream, those of the best of `others`, or of all, sorted by length, its name)."""
    (found,) = (each["results"]["sorted"] for each in report.content["loads"] if each["load"] == load)
    rates = {name: each["median"] for name, each in found.items()}
    best = max((each for each in rates if each in others or (not others and each not in OURS)), key=rates.__getitem__)
    return rates["zoo"], rates[best], best


def sections(name: str) -> str:
    """The model's own part of its section in MODELS.md."""
    spec = Hub(zoo.SHIPPED).card(name).details["preprocessing"]
    lines = [
        f"- **Run:** `zoo run {name} texts.txt -o vectors.npy`",
        f"- **Input:** texts of up to {spec['max_length']} tokens, longer ones are cut; {spec['form']['width']} "
        f"numbers a text, pooling {spec['form']['pooling']}",
    ]
    measured = reports(zoo.SHIPPED / name / "reports", "quality")
    if not measured:
        return "\n".join([*lines, "- **Quality, speed:** not measured\n"])
    report = newest(measured)
    change, kept = report.content["difference"], report.content["kept"]
    lines += [
        f"- **Quality** ({link(report.path, MODELS)}, {report.content['samples']:,} pairs): Spearman int8 - fp32 "
        f"{change['spearman']:+.4f}; mean cosine of int8 to fp32 vectors {change['cosine']:.4f}; of the ten nearest of "
        f"{report.content['texts']:,} texts {change['overlap']:.1%} stay",
        f"- **Stored smaller**: of the ten nearest texts by float32 stay {kept['float16']:.1%} in float16, "
        f"{kept['int8']:.1%} in int8, {kept['binary']:.1%} in binary",
    ]
    for each in reports(PEERS, "texts"):
        parts = []
        for load in ("sentences", "paragraphs", "mixed"):
            rate, peer, best = _stream(each, load)
            parts.append(f"{load} {rate:,.0f} texts/s, {rate / peer:.2f}x {best}")
        lines.append(f"- **Speed**, all sorted by length ({source(each, MODELS)}): {'; '.join(parts)}")
    return "\n".join([*lines, ""])


def benchmarks(names: Sequence[str]) -> str:
    """The part of docs/benchmarks.md about encoders of texts."""
    found = [_beside(each) for each in reports(PEERS, "texts")]
    return "\n".join(["## Sentence encoders\n", BESIDE, *found]) if found else ""


def _beside(report: Report) -> str:
    """One report of `scripts/peers/texts.py`."""
    ways = report.content["ways"]
    columns = ["way", "cosine", "resident MB"]
    rows = [[name, f"{each['cosine']:.4f}", f"{each['memory_mb']:,.0f}"] for name, each in ways.items()]
    parts = [source(report, BENCHMARKS) + ".\n", table(columns, rows)]
    for load in report.content["loads"]:
        cells = [
            [name, *(f"{found[name]['median']:.4g}" if name in found else "" for found in load["results"].values())]
            for name in ways
        ]
        parts += [
            f"{load['load'].capitalize()}, {load['characters']} characters in the mean:\n",
            table(["way", *load["results"]], cells),
        ]
    return "\n".join(parts)
