"""Render MODELS.md, docs/benchmarks/ and its chart, the tables of README.md and docs/compared-with/ from the reports.

`--check` only reports whether all of them are up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import zoo
from pipelines.analysis import markdown
from pipelines.analysis.markdown import MODELS, ROOT
from pipelines.core import files
from pipelines.models.family import Reported, ReportSections
from pipelines.models.hub import Card, Hub

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.rendering import benchmarks, chart, ratios

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
[docs/benchmarks/](docs/benchmarks/index.md). CPUs by maker, family and model:

{cpus}
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
    trained = ["## Recommenders on a custom log\n", *benchmarks.trained(MODELS)]
    return "\n".join([MODELS_HEAD + overview(), *trained, *(model(name) for name in SHIPPED.names())])


def task_pages() -> dict[str, str]:
    """Returns the pages of docs/benchmarks/ of the families of models that ship, by the name of their task."""
    return {
        module.__name__.split(".")[-2]: module.benchmarks(names)
        for module, names in families().items()
        if hasattr(module, "benchmarks")
    }


def readme(text: str) -> str:
    """Replaces the table of README.md between its markers: the loads of the chart on every CPU."""
    return with_table(text, benchmarks.headline(chart.loads()))


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
    pages = {MODELS: models_page(), README: readme(README.read_text()), **benchmarks.pages(task_pages())}
    pages[CHART] = chart.svg(chart.loads())
    for name in ratios.NAMED:
        page = ratios.PAGES / f"{name}.md"
        pages[page] = with_table(page.read_text(), ratios.table(name))
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in pages.items() if not path.is_file() or path.read_text() != text]
        sys.exit(f"out of date: {', '.join(stale)}; run: python scripts/render.py" if stale else 0)
    for path, text in pages.items():
        files.write_text(path, text)


if __name__ == "__main__":
    main()
