"""The pages of docs/benchmarks/, from the report files: a page a task, every section with its answer first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.analysis import markdown
from pipelines.analysis.markdown import BENCHMARKS, PEERS
from scripts.peers.recommenders import beyond_memory, dlrm_v2, tables
from scripts.rendering import chart, ratios, recommenders, servers, third_party

RENDERED = "<!-- Rendered by scripts/render.py from the report files; do not edit. -->\n"
INDEX = """# Benchmarks

{rendered}
int8 on one pinned thread, from raw input to results, compared with the fastest int8 peer:

{headline}
![Throughput of this project and of the fastest peer in five tasks, per CPU](../speed.svg)

## Pages

{pages}
Quality, speed and size of every model: [MODELS.md](../../MODELS.md). What each peer does better:
[ONNX Runtime](../compared-with/onnxruntime.md), [OpenVINO and NNCF](../compared-with/openvino.md),
[CTranslate2](../compared-with/ctranslate2.md), [sentence-transformers](../compared-with/sentence-transformers.md),
[FBGEMM](../compared-with/fbgemm.md).

## Method

- Engines are interleaved within one run (A B A B); figures are comparable within a table only.
- Medians; one thread and core, where a table has no other number.
- `make bench` (`scripts/reproduce.py`) repeats the measurements on your machine, in the
  [minutes](reports.md#minutes-of-make-bench) of its parts.
- [Reports](reports.md#reports) lists the machine, versions and commit of every report file.

## All workloads

{legend}{summary}"""
ABOUT = {
    "vision": "JPEG to label, networks alone, quantizers",
    "texts": "sentence encoders, text encoders by architecture",
    "translation": "engines, threads, rewrites",
    "recommenders": "the models that ship: engines, raw rows to scores, training",
    "custom-log": "families on your log, new ids, reading, embedding tables, ranking, retrieval",
    "third-party": "your ONNX files: speed, quality and start of the int8 files of every quantizer",
    "serving": "`zoo serve` and other servers, single requests, memory, soak test, deltas",
    "distributed": "scoring in shards and on Ray, Ray Serve, gradient exchange",
    "compression": "pruned models, several contexts of a session",
    "reports": "minutes of `make bench`; machine, versions and commit of every report",
}


def compared(kind: str, page: Path = BENCHMARKS) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the content of every report of a kind under scripts/peers, and its source for a page."""
    for report in markdown.reports(PEERS, kind):
        yield report.content, markdown.source(report, page)


def trained(page: Path) -> list[str]:
    """Returns the tables of the families of recommenders on a custom log, with links for a page."""
    return [recommenders.trained(report, source) for report, source in compared("click-models", page)]


def custom_log() -> str:
    """Returns the page of recommenders on a custom log."""
    kinds = (
        ("New ids", "new-ids", recommenders.new_ids),
        ("Reading logs", "log-reading", recommenders.reading),
        ("Embedding tables", "tables", tables.rendered),
        ("Tables larger than memory", "beyond-memory", beyond_memory.rendered),
        ("DLRM-v2", "dlrm-v2", dlrm_v2.rendered),
        ("Ranking", "ranking", recommenders.ranking),
        ("Retrieval", "retrieval", recommenders.retrieval),
    )
    parts = ["# Recommenders on a custom log\n", "## Families\n", *trained(BENCHMARKS)]
    for heading, kind, render in kinds:
        parts += [f"## {heading}\n", *(render(report, source) for report, source in compared(kind))]
    return "\n".join(parts)


def serving() -> str:
    """Returns the page of servers and of the overhead of `zoo serve` over the model."""
    parts: dict[str, list[str]] = {heading: [] for heading in servers.HEADINGS.values()}
    for report, source in compared("serving"):
        for part in report["parts"]:
            parts[servers.HEADINGS[part["part"]]].append(servers.served(part, source))
    parts["Soak test"] = [servers.soak(facts, source) for facts, source in compared("soak-serving")]
    parts["Deltas"] = [servers.deltas(report, source) for report, source in compared("deltas")]
    sections = [f"## {heading}\n\n" + "\n".join(texts) for heading, texts in parts.items()]
    return "\n".join(["# Serving\n", servers.NOTES, *sections])


def distributed() -> str:
    """Returns the page of scoring and serving on several processes and on Ray, and of gradient exchange."""
    kinds = (
        ("Scoring", "cluster", servers.scored),
        ("Ray Serve", "ray-serve", servers.ray_served),
        ("Gradient exchange", "communication", servers.exchanged),
    )
    parts = ["# Distributed\n"]
    for heading, kind, render in kinds:
        parts += [f"## {heading}\n", *(render(report, source) for report, source in compared(kind))]
    return "\n".join(parts)


def compression() -> str:
    """Returns the page of models before and after pruning, and of several contexts of a session."""
    parts = ["# Pruning and parallel contexts\n", "## Pruning\n"]
    for report, source in compared("smaller"):
        parts += [_pruned(model, source) for model in report["models"]]
    parts.append("## Parallel contexts\n")
    columns = ["model", "engine", "batch size", "throughput", "additional MB"]
    for report, source in compared("contexts"):
        rows = [
            [row["model"], row["engine"], f"{row['batch_size']}", f"{row['times']:.2f}x", f"{row['megabytes']:+.1f}"]
            for row in report["models"]
        ]
        head = f"Two contexts of a session compared with one, by `scripts/peers/serving/contexts.py` ({source})."
        parts.append(f"{head}\n\n{markdown.table(columns, rows)}")
    return "\n".join(parts)


def _pruned(model: dict[str, Any], source: str) -> str:
    """The table of a model before and after pruning, and the results of its peers."""
    before, after = model["quality"]
    rows = [
        [name, *(f"{row[key]['median']:.3f}" for key in ("before_ms", "after_ms")), f"{row['times']:.2f}x"]
        for name, row in model["engines"].items()
    ]
    peers = "".join(
        f"; {name}, pruned and trained for {peer['epochs']} epochs, in {peer['engine']}: "
        f"{model['metric']} {peer['quality'][0]:.4f} -> {peer['quality'][1]:.4f}, "
        f"{peer['bytes'][0] / 1e6:.2f} -> {peer['bytes'][1] / 1e6:.2f} MB"
        for name, peer in model.get("peers", {}).items()
    )
    peers += "".join(f"; {name} failed: {markdown.reason(why)}" for name, why in model.get("left_out", {}).items())
    return (
        f"{model['model']}, batches of {model['batch_size']}, int8: {model['metric']} {before:.4f} -> {after:.4f}, "
        f"{model['bytes'][0] / 1e6:.2f} -> {model['bytes'][1] / 1e6:.2f} MB, by "
        f"`scripts/peers/compression/compression.py` ({source}); peer: ONNX Runtime's quantizer{peers}.\n\n"
        f"{markdown.table(['engine', 'before, ms', 'after, ms', 'speed-up'], rows)}"
    )


def reports_page() -> str:
    """Returns the page of the minutes of `make bench`, and of the machine, versions and commit of every report."""
    measured = markdown.reports(PEERS, "minutes")
    about = {part: facts["about"] for report in measured for part, facts in report.content["parts"].items()}
    columns = [report.content["parts"] for report in measured]
    rows = [[part, about[part], *(spent(parts[part]) if part in parts else "" for parts in columns)] for part in about]
    sums = [f"{sum(part['minutes'] for part in parts.values()):.1f}" for parts in columns]
    heads = ["part", "measures", *(markdown.source(report, BENCHMARKS) for report in measured)]
    minutes = markdown.table(heads, [*rows, ["sum of these parts", "", *sums]])
    return "\n".join(["# Reports and minutes\n", "## Minutes of make bench\n", minutes, environments()])


def spent(part: dict[str, Any]) -> str:
    """Returns the minutes of a part of `make bench`; parts that build on all cores take longer on one."""
    return f"{part['minutes']} (one core)" if part["cores"] == 1 else str(part["minutes"])


def environments() -> str:
    """Returns the table of reports: machine, versions, commit."""
    rows = []
    shipped = [path for path in sorted(zoo.SHIPPED.iterdir()) if path.is_dir()]
    for report in [
        *(report for path in shipped for report in markdown.reports(path / "reports", "")),
        *markdown.reports(PEERS, ""),
    ]:
        environment = report.content["environment"]
        versions = environment["versions"]
        engines = [versions[library] for library in ("onnxruntime", "openvino", "python")]
        libraries = {key: versions[key] for key in ("tensorflow", "keras") if key in versions}
        if libraries:
            libraries["numpy"] = versions["numpy"]
        libraries |= environment.get("peers", {})
        owner = report.path.parents[1].name
        rows.append(
            [
                f"{owner}: {markdown.link(report.path, BENCHMARKS)}",
                markdown.cpu(report),
                ", ".join(environment["isa"]),
                str(environment.get("threads", 1)),
                *engines,
                ", ".join(f"{library} {version}" for library, version in libraries.items()),
                environment["commit"],
            ]
        )
    columns = ["report", "CPU, family/model", "instruction sets", "threads", "onnxruntime", "openvino", "python"]
    return "## Reports\n\n" + markdown.table([*columns, "other libraries", "commit"], rows)


def pages(of_families: dict[str, str]) -> dict[Path, str]:
    """Returns the pages of docs/benchmarks/.

    Args:
        of_families: Pages of the tasks of the models that ship, {name: Markdown}.
    """
    texts = of_families | {
        "custom-log": custom_log(),
        "third-party": third_party.page(),
        "serving": serving(),
        "distributed": distributed(),
        "compression": compression(),
        "reports": reports_page(),
    }
    folder, lines, summary = BENCHMARKS.parent, [], []
    made = {}
    for name, text in texts.items():
        title, *headings = re.findall(r"^#+ (.+)$", text, re.M)
        lines.append([f"[{title}]({name}.md)", ABOUT[name]])
        if answer := ratios.answer(headings):
            summary.append(f"### {title}\n\n{answer}")
        made[folder / f"{name}.md"] = _with_answers(text)
    index = INDEX.format(
        rendered=RENDERED,
        headline=headline(chart.loads()),
        pages=markdown.table(["page", "measures"], lines),
        legend=ratios.LEGEND,
        summary="\n".join(summary),
    )
    return {BENCHMARKS: index} | made


def headline(loads: Sequence[chart.Load]) -> str:
    """Returns the table of the loads of the chart: a row a task and CPU, the task in the first one."""
    rows, named = [], ""
    for load in sorted(
        loads, key=lambda load: (list(dict.fromkeys(one.task for one in loads)).index(load.task), load.cpu)
    ):
        task, named = "" if load.task == named else load.task, load.task
        ours, theirs = f"{load.ours:,.0f} {load.unit}/s", f"{load.peer}, {load.theirs:,.0f}"
        rows.append([task, load.cpu, ours, theirs, f"{load.times:.2f}x"])
    return markdown.table(["task", "CPU", "ours", "best peer", "ratio"], rows)


def _with_answers(text: str) -> str:
    """Adds the note that a page is rendered behind its title, and the ratios of a section behind its heading."""

    def answered(heading: re.Match[str]) -> str:
        answer = ratios.answer([heading[1]])
        return f"{heading[0]}\n\n{ratios.LEGEND}{answer.rstrip()}" if answer else heading[0]

    title, rest = text.split("\n", 1)
    return f"{title}\n\n{RENDERED}{re.sub(r'^## (.+)$', answered, rest, flags=re.M)}"
