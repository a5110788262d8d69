"""Files about the project agree with each other: addresses, versions, workflows."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from pipelines.quantization.calibration.table import CalibrationTable
from zoo import registry

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def steps(path: Path) -> list[dict[str, object]]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step for job in jobs for step in job.get("steps", [{"uses": job.get("uses")}])]


def test_the_repository_has_one_address() -> None:
    urls = PROJECT["project"]["urls"]
    pages = [ROOT / "README.md", ROOT / "CITATION.cff", *ROOT.glob(".github/**/*.*")]
    named = {match for page in pages for match in re.findall(r"https://github\.com/[\w-]+/int8-zoo", page.read_text())}
    assert named == {urls["Repository"]}
    assert all(url.startswith(urls["Repository"]) for url in urls.values())


def test_the_citation_is_of_the_latest_release() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.search(r"^## ([\d.]+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert (citation["version"], str(citation["date-released"])) == released.groups()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_version_and_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for step in steps(path):
        uses = str(step.get("uses") or "")
        if uses.startswith("./"):
            assert (ROOT / uses).is_file()
        elif uses:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", uses), uses
        assert set(re.findall(r"\bmake ([\w-]+)", str(step.get("run", "")))) <= targets


def test_wheels_and_tests_are_of_the_versions_that_the_project_names() -> None:
    named = [
        classifier.rsplit(" ", 1)[1] for classifier in PROJECT["project"]["classifiers"] if "Python :: 3." in classifier
    ]
    built = PROJECT["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp{version.replace('.', '')}-manylinux*" for version in named]
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == named


def test_the_notes_of_a_release_are_its_section_of_the_changelog(tmp_path: Path) -> None:
    script = next(str(step["run"]) for step in steps(ROOT / ".github/workflows/release.yml") if "awk" in str(step))
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\nnew\n\n## 1.2.0 (2030-01-01)\n\nfast\n\n## 1.1.0\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "GITHUB_REF_NAME": "v1.2.0"}
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "notes.md").read_text().split() == ["fast"]
    other = environment | {"GITHUB_REF_NAME": "v9"}
    missing = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=other, check=False)
    assert missing.returncode


def test_the_package_of_weights_has_what_the_main_wheel_leaves_out() -> None:
    weights = tomllib.loads((ROOT / "deploy/weights/pyproject.toml").read_text())
    included = weights["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    excluded = [pattern for pattern in PROJECT["tool"]["scikit-build"]["wheel"]["exclude"] if pattern.endswith(".onnx")]
    assert {f"../../{pattern}": pattern.replace("zoo/weights", "int8_zoo_weights") for pattern in excluded} == included
    version = PROJECT["project"]["version"]
    assert weights["project"]["version"] == version
    assert PROJECT["project"]["optional-dependencies"]["weights"] == [f"{weights['project']['name']}=={version}"]


def test_no_address_of_weights_is_of_a_branch() -> None:
    cards = [json.loads(path.read_text()) for path in ROOT.glob("zoo/weights/*/card.json")]
    recorded = [file for card in cards for file in card["files"].values()]
    urls = [file["url"] for file in recorded if file["url"]]
    assert urls and not [url for url in urls if re.search(r"/(main|master)/|\.example/", url)]
    assert [file["hub"] for file in recorded if "hub" in file and not file["hub"].endswith(("@main", "@master"))]


def test_corrections_that_ship_belong_to_the_recipe_of_their_family() -> None:
    for file in ROOT.glob("zoo/weights/*/calibration.json"):
        table = CalibrationTable.load(file)
        family = registry.entry(json.loads((file.parent / "card.json").read_text())["entry"])
        assert not table.rounding or family.recipe.same_but_observer(table.recipe, {*table.rounding}), file
