"""What docs/site/hooks.py makes of the pages: parts of one CPU, the catalogue, and the start page."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pipelines.analysis import markdown
from scripts import render
from scripts.rendering import catalogue
from scripts.rendering import ratios as compared

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "site" / "hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    path = [*sys.path]
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_parts_of_one_cpu_end_before_the_next_and_before_headings(hooks: ModuleType) -> None:
    page = """# Page

Text.

One (AMD EPYC 25/17, 1 thread, [a](a.json)):

| a |
| - |

Its note.

Two (Intel Xeon with AMX 6/167, 2 threads, [b](b.json)).

## Next

Three, AMD EPYC 25/17 alone is no source."""
    divided = hooks.cpu_parts(page)
    parts = re.findall(r'<div data-cpu="([^"]+)" markdown>\n\n(.*?)\n\n</div>', divided, re.S)
    assert [cpu for cpu, _ in parts] == ["AMD EPYC 25/17", "Intel Xeon with AMX 6/167"]
    assert [text.split()[0] for _, text in parts] == ["One", "Two"] and "Its note." in parts[0][1]
    assert divided.count("<div") == divided.count("</div>") == 2
    assert re.sub(r"</?div[^>]*>\n\n", "", divided) == page


def test_every_table_of_a_report_is_part_of_its_cpu(hooks: ModuleType) -> None:
    count = 0
    for path in markdown.BENCHMARKS.parent.glob("*.md"):
        page = hooks.cpu_parts(path.read_text())
        count += page.count("<div")
        assert page.count("<div") == page.count("</div>")
        outside = re.sub(r"<div data-cpu.*?</div>", "", page.split("## Reports")[0], flags=re.S)
        heads = re.findall(r"^(\|.*)\n\| ?--", outside, re.M)
        columns = [head for head in heads if not re.search(r"\| CPU |(AMD|Intel).* \d+/\d+|\| page ", head)]
        assert columns == [], path.name  # other tables have a column a CPU, or a column with the CPU
    assert count > 50


def test_the_catalogue_has_every_model_with_the_columns_that_are_filtered() -> None:
    lines = [line for line in catalogue.page().splitlines() if line.startswith("| ")]
    heads, rows = lines[0].strip("| ").split(" | "), lines[2:]
    assert {"task", "MB", "licence"} < {*heads} and [head for head in heads if catalogue.CPU.fullmatch(head)]
    assert [re.findall(r"\[([^]]+)\]", row)[0] for row in rows] == render.SHIPPED.names()
    script = (ROOT / "docs" / "site" / "filters.js").read_text()
    assert all(f'at("{head}")' in script for head in ("task", "licence", "MB"))


@pytest.mark.parametrize("name", compared.NAMED)
def test_a_page_of_a_peer_says_what_it_does_better_and_has_no_figure_of_its_own(name: str) -> None:
    text = (compared.PAGES / f"{name}.md").read_text()
    written = re.sub(r"<!-- table:.*?<!-- end of table -->", "", text, flags=re.S)
    assert re.search("(is|are) the better choice for", written.split("int8-zoo is the better choice for")[0])
    assert not re.search(r"\d+(\.\d+)?(x|%| ms| MB)\b", written)
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert links and not [link for link in links if not (compared.PAGES / link).exists()]


def test_the_least_ratios_of_a_peer_come_first() -> None:
    rows = [line.split(" | ") for line in compared.table("openvino").splitlines()[2:]]
    least = [float(row[4].removesuffix("x")) for row in rows]
    assert least == sorted(least) and least[0] < 1 <= least[-1]  # loads in which the peer is faster are on the page
