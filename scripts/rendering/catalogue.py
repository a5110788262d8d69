"""The catalogue of models on the site: a table of all cards with their quality, speed and size from the reports.

`docs/site/hooks.py` makes the page; docs/site/filters.js filters its rows by task, licence, CPU and size.
"""

from __future__ import annotations

import re

from pipelines.analysis import markdown
from scripts import render

PAGE = """# Models

Quality and size are pairs of fp32 / int8. Speed is that of int8 in its fastest engine on one pinned thread; in
brackets the speed-up over fp32. Models without figures were not measured. The name of a model leads to its section: how
to run it, data, licence, origin and files.

<div class="catalogue" markdown>

{table}
</div>

`zoo list` and `zoo info NAME` show the same models. [Benchmarks](benchmarks/index.md) have all figures.
Other models: those of other toolkits for [translation](translate-with-a-model-you-have.md) and
[texts](search-your-own-texts.md), `hf://ORG/NAME` of the [hub](share.md), and [families](own-log.md#families) to train.
"""
CPU = re.compile(r"\w+ \d+/\d+")
SIZE = "MB"


def page() -> str:
    """Returns the page: every model of every task, with the columns of all CPUs."""
    models = []
    for name in render.SHIPPED.names():
        card, module = render.SHIPPED.card(name), render.sections_of(name)
        cells = render.rendered("overview", name) or {}
        task = card.description.partition(":")[0].partition(",")[0]
        models.append((name, task, cells, getattr(module, "OVERVIEW", ""), render.licence(card.details["licence"])))
    cpus = sorted({column for _, _, cells, _, _ in models for column in cells if CPU.fullmatch(column)})
    rows = []
    for name, task, cells, unit, licence in models:
        quality = [f"{column} {cell}" for column, cell in cells.items() if column not in (*cpus, SIZE)]
        speeds = [cells.get(cpu, "") for cpu in cpus]
        link = f"[{name}](model-sections.md#{name.replace('.', '')})"
        largest = max(file.size or 0 for file in render.SHIPPED.card(name).files)
        size = cells.get(SIZE) or (f"{largest / 1e6:.1f}" if largest else "")
        rows.append([link, task, ", ".join(quality), unit if any(speeds) else "", *speeds, size, licence])
    heads = ["model", "task", "quality", "unit of speed", *cpus, SIZE, "licence"]
    return PAGE.format(table=markdown.table(heads, rows))
