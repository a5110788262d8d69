"""Files about the project agree with each other: addresses, versions, workflows."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

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
    named = [each.rsplit(" ", 1)[1] for each in PROJECT["project"]["classifiers"] if "Python :: 3." in each]
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
