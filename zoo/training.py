"""What the trainings of all models share: the output folder, the run that a checkpoint belongs to, the picture of the learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import RequestError
from pipelines.files import replacing


def require_output(output: Path, state: str, resume: bool) -> None:
    """Raise RequestError unless `output` holds the checkpoint `state` to resume from, or else is new or empty."""
    if resume and not (output / state).is_file():
        raise RequestError(f"found no {state} in {output} to resume from; train without --resume")
    if not resume and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RequestError(f"found {output} in use, wanted a new or empty folder; choose another, or go on training there with --resume")


def require_same_run(path: Path, kept: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raise RequestError, naming what differs, unless the checkpoint at `path` is of this run: {"config": settings, "data", "start"}."""
    before = kept["config"]
    different = [f"{name} {before.get(name)} (now {value})" for name, value in run["config"].items() if before.get(name) != value]
    different += [f"other {name}" for name in ("data", "start") if kept[name] != run[name]]
    if different:
        raise RequestError(
            f"found a checkpoint in {path} made with {', '.join(different)}; resume with the same, or train into an empty folder"
        )


def plot_curves(
    path: Path,
    history: Sequence[Mapping[str, Any]],
    left: Mapping[str, tuple[str, str]],
    right: Mapping[str, tuple[str, str]],
    axes: tuple[str, str],
    best: int | None = None,
) -> None:
    """Draw lines over "epoch" as a PNG: {key of the history: (label, style)} to either scale. axes: their names. best: an epoch to mark."""
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    figure = Figure(figsize=(7, 4), layout="constrained")
    epochs, first = [each["epoch"] for each in history], figure.subplots()
    for scale, lines, name in ((first, left, axes[0]), (first.twinx(), right, axes[1])):
        for key, (label, style) in lines.items():
            scale.plot(epochs, [each[key] for each in history], style, label=label)
        scale.set_ylabel(name)
    first.set_xlabel("epoch")
    if best is not None:
        first.axvline(best, color="grey", linewidth=0.8)
    figure.legend(loc="outside upper center", ncols=len(left) + len(right))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, metadata={"Software": None})
