"""Render MODELS.md, docs/benchmarks.md and its chart, the tables of README.md and docs/compared-with/ from the reports.

`--check` only reports whether all of them are up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.analysis import markdown
from pipelines.analysis.markdown import BENCHMARKS, MODELS, PEERS, ROOT
from pipelines.core import files
from pipelines.models.family import Reported, ReportSections
from pipelines.models.hub import Card, Hub

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts import render_chart as chart
from scripts import render_compared as compared_with
from scripts import render_recommenders as clicks
from scripts import render_servers as servers
from scripts.peers.quantization import own_models as peers
from scripts.peers.recommenders import beyond_memory, dlrm_v2, tables

README = ROOT / "README.md"
CHART = ROOT / "docs" / "speed.svg"
SHIPPED = Hub(zoo.SHIPPED)
MODELS_HEAD = """# Models

<!-- Rendered by scripts/render.py from the cards and the report files; do not edit. -->

```bash
zoo download NAME    # run, evaluate, benchmark, serve and finetune fetch and build the model, too
```

"""
OVERVIEW_HEAD = """Pairs of values are fp32 / int8. In brackets: speed-up of int8 over fp32, each in its fastest engine, on
one pinned thread. Engines and precisions were interleaved in one run; process start and model loading are excluded.
Models without figures were not measured. Peers, memory, rewrites, training and environments:
[docs/benchmarks.md](docs/benchmarks.md). CPUs by maker, family and model:

{cpus}
"""
BENCHMARKS_HEAD = """# Benchmarks

<!-- Rendered by scripts/render.py from the report files; do not edit. -->

`make bench` (`scripts/reproduce.py`) repeats the measurements on your machine, in the [minutes](#minutes-of-make-bench) of its parts. Engines are interleaved within one run (A B A B); figures are comparable within a table only. [Reports](#reports) lists
the machine, versions and commit of every report file. Quality and speed per model: [MODELS.md](../MODELS.md).

![Throughput of this project and of the fastest peer in five tasks, per CPU](speed.svg)
"""
SCANS = """Largest difference from ONNX Runtime at batch sizes from 1 to 128, relative to the power of the output (batch size in
brackets), and the fallback form that OpenVINO needed, if any; by `scripts/peers/scan/scan.py` ({source}).

"""


def sections_of(name: str) -> ReportSections | None:
    """Returns the module that renders the reports of a model's family; None if the family has none."""
    family = zoo.entry(SHIPPED.card(name).entry)
    return family.report_sections() if isinstance(family, Reported) else None


def rendered(part: str, name: str) -> Any:
    """Returns the result of the family's function `part` for a model; None if the family has no such function."""
    function = getattr(sections_of(name), part, None)
    return function(name) if function else None


def families() -> dict[ReportSections, list[str]]:
    """Returns the modules that render reports, with the names of their models."""
    models: dict[ReportSections, list[str]] = {}
    for name in SHIPPED.names():
        if module := sections_of(name):
            models.setdefault(module, []).append(name)
    return models


def licence(text: str) -> str:
    """Returns the licence's name: the text up to its first comma, colon or full stop, without its parts in brackets."""
    return re.split(r"[:,]|\. |\.$", markdown.outside_brackets(text))[0]


def overview() -> str:
    """Returns the overview of MODELS.md: a table per task, which fits into a terminal of 120 columns.

    A model has a row for each CPU on which it was measured, the facts of the model in the first one.
    """
    tasks: dict[str, list[str]] = {}
    for name in SHIPPED.names():
        tasks.setdefault(SHIPPED.card(name).description.partition(":")[0].partition(",")[0], []).append(name)
    reports = [report for name in SHIPPED.names() for report in markdown.reports(zoo.SHIPPED / name / "reports", "")]
    cpus = {markdown.cpu_column(report): markdown.cpu(report) for report in reports}
    parts, measured = [], set()
    for task, names in sorted(tasks.items()):
        cells = {name: rendered("overview", name) or {} for name in names}
        shown = list(dict.fromkeys(column for row in cells.values() for column in row if column not in cpus))
        rows = []
        for name, row in cells.items():
            figures = [row.get(column, "") for column in shown]
            facts_of = [f"[{name}]", licence(SHIPPED.card(name).details["licence"]), *figures]
            speeds = [(cpu, row[cpu]) for cpu in sorted(cpus) if cpu in row]
            measured.update(cpu for cpu, _ in speeds)
            rows += [[*facts_of, *speed] for speed in speeds[:1] or [("", "")]]
            rows += [[*[""] * len(facts_of), *speed] for speed in speeds[1:]]
        unit = getattr(sections_of(names[0]), "OVERVIEW", "")
        table = markdown.table(["model", "licence", *shown, "CPU", "speed"], rows)
        parts.append(f"**{task}**{', ' if unit else ''}{unit}\n\n{table}")
    links = "\n".join(f"[{name}]: #{name.replace('.', '')}" for name in SHIPPED.names())
    legend = "\n".join(f"- {column}: {cpu}" for column, cpu in sorted(cpus.items()) if column in measured)
    return "\n".join([OVERVIEW_HEAD.format(cpus=legend), *parts, f"{links}\n"])


def facts(card: Card) -> str:
    """Returns the facts of a model's card: data, licence, origin, limits, calibration, files."""
    details = card.details
    keys = ("data", "licence", "origin", "limits")
    lines = [f"- **{key.capitalize()}:** {details[key]}" for key in keys if key in details]
    if calibration := details.get("calibration"):
        lines.append(f"- **Calibration:** observer {calibration['observer']}, {calibration['samples']} samples")
    sizes = [f"{file.name} {file.size / 1e3:,.0f} kB" if file.size else file.name for file in card.files]
    return "\n".join([*lines, f"- **Files:** {', '.join(sizes)}"]) + "\n"


def model(name: str) -> str:
    """Returns the model's section of MODELS.md."""
    card = SHIPPED.card(name)
    architecture = f"; {card.details['architecture']}" if "architecture" in card.details else ""
    what = f"{card.description} Family `{card.entry}`{architecture}."
    parts = [f"## {name}\n", f"{what}\n", rendered("sections", name), facts(card)]
    return "\n".join(part for part in parts if part)


def models_page() -> str:
    """Returns MODELS.md."""
    parts = [recommenders(MODELS), *(model(name) for name in SHIPPED.names())]
    return "\n".join([MODELS_HEAD + overview(), *filter(None, parts)])


def environments() -> str:
    """Returns the table of reports: machine, versions, commit."""
    rows = []
    for report in [
        *(report for name in SHIPPED.names() for report in markdown.reports(zoo.SHIPPED / name / "reports", "")),
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


def compared(kind: str, page: Path = BENCHMARKS) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the content of every report of a kind under scripts/peers, and its source for a page."""
    for report in markdown.reports(PEERS, kind):
        yield report.content, markdown.source(report, page)


def section(title: str, parts: Sequence[str]) -> str:
    """Returns a section of a page, "" without parts."""
    return "\n".join([f"## {title}\n", *parts]) if parts else ""


def own_models() -> str:
    """Returns the section of third-party ONNX models."""
    parts = []
    kinds = "own-models", "detectors", "exported"
    for report, source in (pair for kind in kinds for pair in compared(kind)):
        filled = [row + [""] * (len(peers.COLUMNS) - len(row)) for row in peers.rows(report)]
        parts.append(peers.HEAD.format(source=source) + markdown.table(peers.COLUMNS, filled))
        if openings := peers.opening_rows(report):
            parts.append(peers.OPENING_HEAD + markdown.table(peers.OPENING_COLUMNS, openings))
    return section("Third-party ONNX models", parts)


def scans() -> str:
    """Returns the section of the scans of all engines at many batch sizes."""
    parts = []
    for report, source in compared("scan"):
        engines = list(dict.fromkeys(row["engine"] for row in report["results"]))
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for row in report["results"]:
            cell = (
                f"{row['largest']:g} ({row['at']})"
                if row["verdict"] == "ok"
                else row["verdict"].replace("left out", "")
            )
            form = f", {row['reason']}" if row["verdict"] == "ok" and row["reason"] else ""
            rows.setdefault((row["model"], row["precision"]), {})[row["engine"]] = cell + form
        table = [[*key, *(cells.get(engine, "") for engine in engines)] for key, cells in rows.items()]
        parts.append(SCANS.format(source=source) + markdown.table(["model", "precision", *engines], table))
    return section("Engines at every batch size", parts)


def recommenders(page: Path) -> str:
    """Returns the families of recommenders on a custom log: quality, and speed compared with peers."""
    parts = [clicks.trained(report, source) for report, source in compared("click-models", page)]
    if page == BENCHMARKS:
        parts += [clicks.new_ids(report, source) for report, source in compared("new-ids")]
        parts += [clicks.reading(report, source) for report, source in compared("log-reading")]
        parts += [tables.rendered(report, source) for report, source in compared("tables")]
        parts += [beyond_memory.rendered(report, source) for report, source in compared("beyond-memory")]
        parts += [dlrm_v2.rendered(report, source) for report, source in compared("dlrm-v2")]
        parts += [clicks.ranking(report, source) for report, source in compared("ranking")]
        parts += [clicks.retrieval(report, source) for report, source in compared("retrieval")]
    return section("Recommenders on a custom log", parts)


def serving() -> str:
    """Returns the section of servers and of the overhead of `zoo serve` over the model."""
    parts = [servers.served(part, source) for report, source in compared("serving") for part in report["parts"]]
    parts += [servers.soak(facts, source) for facts, source in compared("soak-serving")]
    parts += [servers.deltas(report, source) for report, source in compared("deltas")]
    return section("Serving", [servers.NOTES + "\n".join(parts)] if parts else [])


def clusters() -> str:
    """Returns the section of scoring and serving on several processes and on Ray, and of gradient exchange."""
    parts = [servers.scored(report, source) for report, source in compared("cluster")]
    parts += [servers.ray_served(report, source) for report, source in compared("ray-serve")]
    parts += [servers.exchanged(report, source) for report, source in compared("communication")]
    return section("Distributed", parts)


def smaller() -> str:
    """Returns the section of models before and after pruning, and of several contexts of a session."""
    parts = []
    for report, source in compared("smaller"):
        for model in report["models"]:
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
            peers += "".join(f"; {name} excluded: {why}" for name, why in model.get("left_out", {}).items())
            parts.append(
                f"{model['model']}, batches of {model['batch_size']}, int8: {model['metric']} {before:.4f} -> {after:.4f}, "
                f"{model['bytes'][0] / 1e6:.2f} -> {model['bytes'][1] / 1e6:.2f} MB, by `scripts/peers/compression/compression.py` "
                f"({source}); peer: ONNX Runtime's quantizer{peers}.\n\n"
                f"{markdown.table(['engine', 'before, ms', 'after, ms', 'speed-up'], rows)}"
            )
    for report, source in compared("contexts"):
        rows = [
            [
                row["model"],
                row["engine"],
                str(row["batch_size"]),
                f"{row['times']:.2f}x",
                f"{row['megabytes']:+.1f}",
            ]
            for row in report["models"]
        ]
        parts.append(
            f"Two contexts of a session compared with one, by `scripts/peers/serving/contexts.py` "
            f"({source}).\n\n"
            f"{markdown.table(['model', 'engine', 'batch size', 'throughput', 'additional MB'], rows)}"
        )
    return section("Pruning and parallel contexts", parts)


def minutes() -> str:
    """Returns the section of the minutes of every part of `make bench`, per CPU."""
    reports = markdown.reports(PEERS, "minutes")
    about = {part: facts["about"] for report in reports for part, facts in report.content["parts"].items()}
    columns = [report.content["parts"] for report in reports]
    rows = [[part, about[part], *(str(parts.get(part, {}).get("minutes", "")) for parts in columns)] for part in about]
    sums = [f"{sum(part['minutes'] for part in parts.values()):.1f}" for parts in columns]
    heads = ["part", "measures", *(markdown.source(report, BENCHMARKS) for report in reports)]
    table = markdown.table(heads, [*rows, ["sum of these parts", "", *sums]])
    return section("Minutes of make bench", [table] if reports else [])


def benchmarks_page() -> str:
    """Returns docs/benchmarks.md."""
    parts = [module.benchmarks(names) for module, names in families().items() if hasattr(module, "benchmarks")]
    parts += [recommenders(BENCHMARKS), own_models(), scans(), serving(), clusters(), smaller(), minutes()]
    parts.append(environments())
    return "\n".join(filter(None, [BENCHMARKS_HEAD, *parts]))


def readme(text: str) -> str:
    """Replaces the table of README.md between its markers: per task, the CPU with the smaller ratio."""
    lowest: dict[str, chart.Load] = {}
    for load in chart.loads():
        if load.task not in lowest or load.times < lowest[load.task].times:
            lowest[load.task] = load
    rows = [
        [
            load.task,
            f"{load.ours:,.0f} {load.unit}/s",
            f"{load.peer}, {load.theirs:,.0f}",
            f"{load.times:.2f}x",
            load.cpu,
        ]
        for load in lowest.values()
    ]
    return with_table(text, markdown.table(["task", "ours", "best peer", "ratio", "CPU"], rows))


def with_table(text: str, table: str) -> str:
    """Returns a page with another table between its markers.

    Args:
        text: The page.
        table: The table.
    """
    start = text.index("\n", text.index("<!-- table:")) + 1
    end = text.index("<!-- end of table -->")
    return f"{text[:start]}\n{table}\n{text[end:]}"


def main() -> None:
    """Writes the pages, or checks them."""
    pages = {MODELS: models_page(), BENCHMARKS: benchmarks_page(), README: readme(README.read_text())}
    pages[CHART] = chart.svg(chart.loads())
    for name in compared_with.NAMED:
        page = compared_with.PAGES / f"{name}.md"
        pages[page] = with_table(page.read_text(), compared_with.table(name))
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in pages.items() if not path.is_file() or path.read_text() != text]
        sys.exit(f"out of date: {', '.join(stale)}; run: python scripts/render.py" if stale else 0)
    for path, text in pages.items():
        files.write_text(path, text)


if __name__ == "__main__":
    main()
