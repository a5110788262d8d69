"""The fields of reports: those of a new report are those of the reports in the repository."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
MACHINE = ("versions", "peers", "packages", "caches")  # names of packages and the like


def fields(value: Any, names: Iterable[str] = (), path: str = "") -> Iterator[str]:
    """The paths of all fields of a report; `names` (of engines, models and the like) count as one field, "*"."""
    if isinstance(value, dict):
        for key, inner in value.items():
            place = f"{path}.{'*' if key in names else key}"
            yield place
            if key not in MACHINE:
                yield from fields(inner, names, place)
    elif isinstance(value, list):
        for inner in value:
            yield from fields(inner, names, f"{path}[]")


@pytest.fixture(scope="session")
def require_fields():
    """require(report, published, names): raises where the fields differ from those of a report under scripts or zoo."""

    def require(report: Any, published: str, names: Iterable[str] = (), missing: Iterable[str] = ()) -> None:
        paths = sorted(ROOT.glob(published))
        assert paths, published
        actual = set(fields(report, names))
        for path in paths:
            expected = set(fields(json.loads(path.read_text()), names)) - set(missing)
            assert actual >= expected, (path.name, sorted(expected - actual))
            assert actual <= expected | set(missing), (path.name, sorted(actual - expected))

    return require
