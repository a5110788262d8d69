"""Progress where no person looks: a line now and then."""

from __future__ import annotations

import pytest

from pipelines.core import progress


@pytest.mark.parametrize(
    ("show", "total", "said"),
    [
        (
            progress.progress,
            4000,
            ["[a] work: 2,000 of 4,000, 31 s, about 31 s left", "[a] work: 4,000 of 4,000, 62 s"],
        ),
        (progress.progress, None, ["[a] work: 2,000, 31 s", "[a] work: 4,000, 62 s"]),
        (progress.silent, 4000, []),
    ],
)
def test_a_line_now_and_then(show, total, said, monkeypatch, capsys):
    times = iter([0.0, 1.0, 31.0, 59.0, 61.5])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with show("[a] work", total) as advance:
        for _ in range(4):
            advance(1000)
    assert capsys.readouterr().err.splitlines() == said
