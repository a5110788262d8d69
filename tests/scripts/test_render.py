"""MODELS.md, docs/benchmarks/ and README's figures are what the cards and the report files hold."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import zoo
from pipelines.analysis import markdown
from pipelines.analysis.markdown import Report
from scripts import render
from scripts.rendering import chart, ratios
from scripts.rendering import recommenders as clicks_tables

BENCHMARKS = markdown.BENCHMARKS.parent
PAGES = sorted(BENCHMARKS.glob("*.md"))
LINES = 18  # of a model's section, tables and blank ones left out
LINK = re.compile(r"\]\(([^)#]+)\)")


def test_the_pages_are_what_the_reports_hold() -> None:
    script = render.ROOT / "scripts" / "render.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_check_names_a_page_that_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "MODELS.md"
    stale.write_text(render.MODELS.read_text() + "\n")
    monkeypatch.setattr(render, "MODELS", stale)
    monkeypatch.setattr(sys, "argv", ["render.py", "--check"])
    with pytest.raises(SystemExit, match=r"^out of date: MODELS\.md; run"):
        render.main()


def test_the_chart_tells_where_a_peer_is_quicker() -> None:
    ahead = chart.Load("A 1/2", "Task <a>", "rows", 300, "x", 150, 2)
    behind = chart.Load("B 3/4", "Task b", "rows", 100, "y", 400, 0.25)
    drawn = chart.svg([behind, ahead])
    root = ElementTree.fromstring(drawn)
    widths = [int(rect.get("width", "")) for rect in root.iter("{http://www.w3.org/2000/svg}rect")][3:]
    assert widths == [chart.MAX_BAR, chart.MAX_BAR // 2, chart.MAX_BAR // 4, chart.MAX_BAR]
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[:2] == ["int8-zoo", "fastest peer"]
    assert words[3:6] == ["Task <a>", "2.00x, 300 rows/s", "x, 150"] and words[8:] == ["0.25x, 100 rows/s", "y, 400"]
    assert chart.best({"x": 2.0, "y": 0.25}) == "y"


def test_the_chart_has_five_tasks_of_a_cpu() -> None:
    of_cpus: dict[str, set[str]] = {}
    for load in chart.loads():
        of_cpus.setdefault(load.cpu, set()).add(load.task)
    assert max(map(len, of_cpus.values())) == 5


@pytest.mark.parametrize("page", [render.MODELS, render.README, *PAGES], ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_scripts_that_a_page_names_exist() -> None:
    pages = [render.MODELS, render.README, *BENCHMARKS.parent.rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"scripts/[\w/]+\.py", page.read_text())}
    assert {*PAGES} < {*pages} and "scripts/reproduce.py" in named
    assert [name for name in sorted(named) if not (render.ROOT / name).is_file()] == []


def test_every_report_file_is_linked_above_and_in_the_table_of_reports() -> None:
    files = {*zoo.SHIPPED.glob("*/reports/*.json"), *(render.ROOT / "scripts" / "peers" / "reports").glob("*.json")}
    texts = {page: page.read_text() for page in (render.MODELS, *PAGES)}
    texts[BENCHMARKS / "reports.md"], table = texts[BENCHMARKS / "reports.md"].split("## Reports")
    linked = {(page.parent / link).resolve() for page, text in texts.items() for link in LINK.findall(text)}
    listed = {(BENCHMARKS / link).resolve() for link in LINK.findall(table)}
    assert files == listed
    assert files <= linked
    for path in files:
        json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN is no JSON


def test_a_peer_that_was_never_timed_is_not_the_best() -> None:
    over = {"engine": "zoo-native", "batch_size": 1, "over": {"a": None, "b": 3.0, "c": 2.0}}
    assert clicks_tables._over_best({"ratios": [over]}, 1) == (2.0, "c")


@pytest.mark.parametrize("name", render.SHIPPED.names())
def test_a_model_has_a_row_in_the_overview_and_a_short_section(name: str) -> None:
    page = render.MODELS.read_text()
    assert f"\n[{name}]: #{name.replace('.', '')}\n" in page
    section = page.split(f"## {name}\n")[1].split("\n## ")[0]
    assert "licence" in section.lower() and f"`zoo run {name} " in section
    assert len([line for line in section.splitlines() if line and not line.startswith("|")]) <= LINES
    row = page.split(f"| [{name}] ")[1]
    speeds = re.split(r"\n(?!\|  )", row)[0]  # and the rows below it of further CPUs
    for path in (render.zoo.SHIPPED / name / "reports").glob("*.json"):
        if path.name.startswith(("speed-", "images-", "teacher-")):
            cpu = markdown.cpu_column(Report(path, json.loads(path.read_text())))
            assert re.search(rf"\| {re.escape(cpu)} +\| [^|]*\d+\.\d\dx", speeds), path.name
            assert f"({path.relative_to(render.MODELS.parent)})" in section


@pytest.mark.parametrize("page", [render.MODELS, *PAGES], ids=lambda page: page.stem)
def test_rows_have_as_many_cells_as_their_table_has_columns(page: Path) -> None:
    for part in page.read_text().split("\n\n"):
        assert len({line.count("|") for line in part.splitlines() if line.startswith("| ")}) <= 1, part[:200]


def test_the_newest_report_is_the_one_of_the_newest_engines() -> None:
    def report(name: str, onnxruntime: str, openvino: str) -> Report:
        versions = {"onnxruntime": onnxruntime, "openvino": openvino}
        return Report(Path(name), {"environment": {"versions": versions}})

    several = [
        report("a", "1.9.1", "2026.4.1-rc2"),
        report("b", "1.31.1", "2025.1.0"),
        report("c", "1.31.1", "2024.6.0"),
    ]
    assert markdown.newest(several).path.name == "b"


def test_the_licence_is_cut_before_its_explanation() -> None:
    assert render.licence("MIT (He et al. 2016). The photos: others'") == "MIT"
    assert render.licence("Apache-2.0 (timm). The photos") == "Apache-2.0"
    assert render.licence("Research use: Multi30k") == "Research use"
    assert render.licence("Research, non-commercial use: the terms") == "Research"


def test_the_overview_fits_into_a_terminal_of_120_columns() -> None:
    overview = render.MODELS.read_text().split("\n## ")[0].splitlines()
    assert max(map(len, overview)) <= 120
    columns = [[i for i, character in enumerate(line) if character == "|"] for line in overview if line[:1] == "|"]
    assert len({tuple(positions) for positions in columns}) == 6  # tables, whose columns are aligned


def test_the_readme_has_every_load_of_the_chart_on_every_cpu() -> None:
    table = render.README.read_text().split("<!-- table:")[1].split("<!-- end of table -->")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")][2:]
    ratios_of = sorted((cpu.strip(), ratio.strip()) for _, _, cpu, _, _, ratio, _ in rows)
    assert ratios_of == sorted((load.cpu, f"{load.times:.2f}x") for load in chart.loads())
    assert max(map(len, table.splitlines())) <= 120
    assert len({task.strip() for _, task, *_ in rows} - {""}) == 5


def test_a_section_with_peers_begins_with_the_ratios_to_the_fastest_one() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    for section in {case.section for case in ratios.cases()} - {""}:
        assert text.count(f"## {section}\n\n{ratios.LEGEND}| workload ") == 1, section


def test_an_error_of_a_peer_is_cut_to_its_first_clear_sentence() -> None:
    openvino = (
        "RuntimeError: Exception from src/core.cpp:117: Check 'a != b' failed at src/a.cpp:201: Not enough registers"
    )
    assert markdown.reason(openvino) == "RuntimeError: Not enough registers"
    assert markdown.reason("KeyError: 'val' Set TORCHDYNAMO_VERBOSE=1 for more.") == "KeyError: 'val'"
    assert markdown.reason("ValueError: Cannot load it. This may be old.") == "ValueError: Cannot load it"
    assert len(markdown.reason("word " * 100)) <= 130


def test_families_of_several_labels_and_next_items():
    """Each kind of family has a table with its own metrics."""
    ratios = [{"engine": "zoo-native", "batch_size": size, "over": {"peer": 2.5, "slow": 9.0}} for size in (512, 1)]
    clicks = {"auc": 0.71, "logloss": 0.62}
    moved = {"auc": 0.00001, "max_probability": 0.0004, "recall@10": -0.0002}
    ranked = {**clicks, "recall@10": 0.186, "recall@50": 0.49, "ndcg@10": 0.087, "mrr": 0.08}
    quality = {"metrics": {"fp32": clicks}, "native": {"difference": moved}}

    def labels(**aucs):
        return {name: {"metrics": {"fp32": {"auc": auc}}, "difference": moved} for name, auc in aucs.items()}

    joint = {"metrics": {"fp32": clicks}, "labels": labels(clicked=0.72, loved=0.73)}
    joint["native"] = {"difference": moved, "labels": labels(clicked=0.72, loved=0.73)}
    following = {"metrics": {"fp32": ranked}, "native": {"difference": moved}, "next_items": 11000}
    models = [
        {"model": name, "quality": metrics, "ratios": ratios}
        for name, metrics in {"deepfm": quality, "mmoe": joint, "sasrec": following}.items()
    ]
    models[0]["commit"] = "0123abc"
    deepctr = {"dcn": clicks, "ple": {"labels": {"clicked": {"auc": 0.705}, "loved": {"auc": 0.715}}}}
    models[0]["results"] = [{"engine": "torch-int8"}]
    models[1]["left_out"] = {"openvino-nncf": "RuntimeError: no registers"}
    report = {"data": "some rows", "models": models, "deepctr": deepctr, "left_out": {"DeepCTR-Torch": "no module"}}
    text = clicks_tables.trained(report, "a CPU")
    assert "DeepCTR-Torch failed: no module. openvino-nncf failed with mmoe: RuntimeError: no registers." in text
    assert "torch-int8 was measured with deepfm alone." in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "| deepfm | 0.7100 / 0.6200 | +0.00001 | 0.0004 | 2.50x peer | 2.50x peer |" in lines
    assert "| mmoe | 0.7200 / 0.7300 | +0.00001 / +0.00001 | 0.0004 | 2.50x peer | 2.50x peer |" in lines
    assert any(line.startswith("| sasrec | 0.1860 | 0.4900 | 0.0870 | 0.0800 | -0.0002 | 0.0004 |") for line in lines)
    assert "Measured at commit 0123abc: deepfm." in text
    assert "dcn 0.7100 / 0.6200." in text and "ple 0.7050 / 0.7150." in text and "in 11,000 rows" in text
