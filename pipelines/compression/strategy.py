"""Schedules of distillation, pruning and QAT: epochs and goals of each.

    {"epochs": 12, "drop": 0.005, "strategies": [
        {"kind": "distil", "from": 0, "to": 12, "teacher": "resnet26d-cifar10", "temperature": 4},
        {"kind": "prune", "from": 2, "to": 8, "goal": "1.5x", "schedule": "iterative", "times": 3},
        {"kind": "qat", "from": 9, "to": 12}]}

or {"preset": "distil-prune-qat", "epochs": 12, "goal": "1.5x"}. A schedule becomes steps, each a training that
continues the one before; a step begins wherever a strategy begins, ends or prunes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema

from pipelines.core import files
from pipelines.core.errors import RequestError

SCHEDULES = ("once", "iterative", "during")
IMPORTANCES = ("taylor", "activation")
PRESET = "distil-prune-qat"
_FROM_0 = {"type": "number", "minimum": 0}
_EPOCH = {"type": "integer", "minimum": 0}
_SPAN = {"kind": {}, "from": _EPOCH, "to": _EPOCH}
_GOAL = {"type": "string"}
_PRUNE = {
    "goal": _GOAL,
    "schedule": {"enum": list(SCHEDULES)},
    "times": {"type": "integer", "minimum": 1},
    "importance": {"enum": list(IMPORTANCES)},
    "layers": {"type": "array", "items": {"type": "string"}, "minItems": 1},
}
_DISTIL = {
    "teacher": {"type": "string"},
    "weight": {"type": "number", "minimum": 0, "maximum": 1},
    "temperature": {"type": "number", "exclusiveMinimum": 0},
    "features": _FROM_0,
    "fsp": _FROM_0,
    "attention": _FROM_0,
}
_KINDS: dict[str, dict[str, Any]] = {"distil": _DISTIL, "prune": _PRUNE, "qat": {}}
_EPOCHS = {"type": "integer", "minimum": 1}


def _object(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


_COMMON = {"epochs": _EPOCHS, "drop": _FROM_0}
_WHOLE = _object(_COMMON | {"strategies": {"type": "array", "items": {}, "minItems": 1}}, "epochs", "strategies")
_BY_PRESET = _object(
    _COMMON
    | {"preset": {"enum": [PRESET]}}
    | {name: _PRUNE[name] for name in _PRUNE}
    | {"teacher": {"type": "string"}},
    "preset",
    "epochs",
    "goal",
)


@dataclass(frozen=True)
class Goal:
    """Goal of a pruning.

    Attributes:
        speed: Speed of int8 on this machine relative to the original model; 0: no goal.
        ratio: Share of all channels to prune; 0: no goal.
        rows: Prune rows of embedding tables whose values occur fewer than `rows` times in the training data; 0: none.
    """

    speed: float = 0.0
    ratio: float = 0.0
    rows: int = 0

    @property
    def channels(self) -> bool:
        """Whether channels are pruned."""
        return bool(self.speed or self.ratio)

    def share(self, done: float) -> Goal:
        """Returns the goal after the share `done` of all cuts; rows are pruned in the first cut.

        Args:
            done: Share of the cuts that are done after this one, 0 to 1.
        """
        return replace(self, speed=self.speed**done if self.speed else 0.0, ratio=self.ratio * done)

    def __str__(self) -> str:
        parts = [f"{self.speed:.4g}x"] if self.speed else [f"ratio={self.ratio:.3g}"] if self.ratio else []
        return ",".join([*parts, *([f"rows={self.rows}"] if self.rows else [])])


def goal(text: str) -> Goal:
    """Parses a goal: "1.5x", "ratio=.3", "rows=5", or one of the first two with rows as "1.5x,rows=5".

    Args:
        text: The goal.

    Returns:
        The goal.

    Raises:
        RequestError: The text is no goal, or the goal is out of range.
    """
    parts: dict[str, float] = {}
    for part in text.split(","):
        name, value = _part(part.strip(), text)
        if name in parts or (name != "rows" and parts.keys() - {"rows"}):
            raise RequestError(f"found the goal {text}, expected one speed or one share of channels, and rows once")
        parts[name] = value
    return Goal(parts.get("speed", 0.0), parts.get("ratio", 0.0), int(parts.get("rows", 0)))


def _part(part: str, text: str) -> tuple[str, float]:
    """Parses a part of the goal `text`: (field of `Goal`, value)."""
    if match := re.fullmatch(r"(\d*\.?\d+)x", part):
        if float(match[1]) > 1:
            return "speed", float(match[1])
        raise RequestError(f"found the goal {text}, expected an int8 speedup above 1x")
    if match := re.fullmatch(r"ratio=(\d*\.?\d+)", part):
        if 0 < float(match[1]) < 1:
            return "ratio", float(match[1])
        raise RequestError(f"found the goal {text}, expected a ratio between 0 and 1: the share of channels to prune")
    if match := re.fullmatch(r"rows=(\d{1,9})", part):
        if int(match[1]):
            return "rows", int(match[1])
        raise RequestError(f"found the goal {text}, expected rows of 1 or more: the occurrences that keep a value")
    raise RequestError(
        f"found the goal {text!r}, expected a speedup such as 1.5x, a share of channels such as ratio=.3, or a number "
        "of occurrences such as rows=5"
    )


@dataclass(frozen=True)
class Cut:
    """A pruning.

    Attributes:
        goal: When to stop.
        importance: One of `IMPORTANCES`.
        layers: Patterns of layer names; (): all layers.
    """

    goal: Goal
    importance: str = "taylor"
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """An optional cut, and the training after it.

    Attributes:
        name: Name of the step.
        epochs: Epochs of training.
        cut: The pruning, or None.
        distil: Settings of the distillation, or None.
        qat: Whether to train with int8 rounding.
    """

    name: str
    epochs: int
    cut: Cut | None = None
    distil: Mapping[str, Any] | None = None
    qat: bool = False


@dataclass(frozen=True)
class Strategy:
    """A schedule.

    Attributes:
        epochs: Total epochs.
        strategies: Entries as in the file.
        drop: Allowed drop of the int8 metric, in its own units.
        source: Name of the schedule in errors.
    """

    epochs: int
    strategies: tuple[Mapping[str, Any], ...]
    drop: float | None = None
    source: str = field(default="the strategy", compare=False)

    def __post_init__(self) -> None:
        for entry in self.strategies:
            first, last = entry.get("from", 0), entry.get("to", self.epochs)
            if not 0 <= first < last <= self.epochs:
                raise RequestError(
                    f"{self.source}: {entry['kind']} is from epoch {first} to {last}, expected a span within 0 to "
                    f"{self.epochs}"
                )
            if entry["kind"] == "prune":
                further = [name for name in _PRUNE if name in entry and name != "goal"]
                if not goal(entry["goal"]).channels and further:
                    raise RequestError(
                        f"{self.source}: found {further[0]} beside the goal {entry['goal']}, which prunes rows in one "
                        f"step; leave {further[0]} out, or add a goal for channels"
                    )
        kinds = [strategy["kind"] for strategy in self.strategies]
        if twice := {kind for kind in kinds if kinds.count(kind) > 1} & {"prune", "qat"}:
            raise RequestError(f"{self.source}: found {min(twice)} twice in strategies, expected it once")
        cuts, qat = self._cuts(), self._of("qat")
        if qat and cuts and max(cuts) > qat.get("from", 0):
            raise RequestError(
                f"{self.source}: prune cuts in epoch {max(cuts)}, after qat began in epoch {qat.get('from', 0)}; "
                f"expected cuts up to epoch {qat.get('from', 0)}, as qat trains the ranges of the pruned network"
            )
        spans = sorted((strategy.get("from", 0), strategy.get("to", self.epochs)) for strategy in self._all("distil"))
        if any(one[1] > other[0] for one, other in itertools.pairwise(spans)):
            raise RequestError(f"{self.source}: found two teachers in one epoch, expected one at a time")

    def _all(self, kind: str) -> list[Mapping[str, Any]]:
        return [strategy for strategy in self.strategies if strategy["kind"] == kind]

    def _of(self, kind: str) -> Mapping[str, Any]:
        return next(iter(self._all(kind)), {})

    def _cuts(self) -> dict[int, Cut]:
        """{epoch before which is cut: how}."""
        if not (prune := self._of("prune")):
            return {}
        first, last = prune.get("from", 0), prune.get("to", self.epochs)
        schedule = prune.get("schedule", "once")
        times = {"once": 1, "iterative": prune.get("times", 3), "during": last - first}[schedule]
        if times > last - first:
            raise RequestError(
                f"{self.source}: prune cuts {times} times from epoch {first} to {last}, expected at most once an epoch"
            )
        whole = goal(prune["goal"])
        how = {"importance": prune.get("importance", "taylor"), "layers": tuple(prune.get("layers", ()))}
        epochs = [first + (last - first) * i // times for i in range(times)]
        goals = [whole.share((i + 1) / times) for i in range(times)]
        return {
            epoch: Cut(part if i == 0 else replace(part, rows=0), **how)
            for i, (epoch, part) in enumerate(zip(epochs, goals, strict=True))
        }

    def steps(self) -> list[Step]:
        """Returns the trainings, in order."""
        cuts = self._cuts()
        ends = {
            span.get(name, default) for span in self.strategies for name, default in (("from", 0), ("to", self.epochs))
        }
        marks = sorted({0, self.epochs, *cuts, *ends})
        steps: list[Step] = []
        for begin, end in itertools.pairwise(marks):
            on = [
                strategy
                for strategy in self.strategies
                if strategy.get("from", 0) <= begin < strategy.get("to", self.epochs) and strategy["kind"] != "prune"
            ]
            teacher = next((strategy for strategy in on if strategy["kind"] == "distil"), None)
            distil = None if teacher is None else {key: teacher[key] for key in _DISTIL if key in teacher}
            qat = any(strategy["kind"] == "qat" for strategy in on)
            parts = [*(["prune"] if begin in cuts else []), *(["distil"] if teacher else []), *(["qat"] if qat else [])]
            name = f"{len(steps) + 1}-{'-'.join(parts) or 'train'}"
            steps.append(Step(name, end - begin, cuts.get(begin), distil, qat))
        return steps

    def to_json(self) -> dict[str, Any]:
        """Returns the schedule as in the file."""
        drop = {} if self.drop is None else {"drop": self.drop}
        return {"epochs": self.epochs, **drop, "strategies": [dict(strategy) for strategy in self.strategies]}


def preset(
    epochs: int, goal: str, *, teacher: str = "", qat: bool = True, distil: bool = True, **options: Any
) -> Strategy:
    """Returns the schedule distil -> prune -> QAT.

    The cut follows the first quarter (at once with up to three epochs), QAT takes the last quarter, and distillation
    runs throughout.

    Args:
        epochs: Total epochs.
        goal: Goal of the pruning, see `goal`.
        teacher: Teacher of the distillation; "": the model itself.
        qat: Whether to add QAT.
        distil: Whether to add distillation.
        **options: drop, source, and options of prune.

    Returns:
        The schedule.

    Raises:
        RequestError: There are too few epochs, or an option is invalid.
    """
    own = {name: options.pop(name) for name in ("drop", "source") if name in options}
    quarter = epochs // 4
    cut, end = (quarter if distil else 0), epochs - (max(1, quarter) if qat else 0)
    if qat and epochs < 2:
        raise RequestError(f"found {epochs} epoch for prune and qat, expected one for each; set --epochs 2 or more")
    strategies: list[dict[str, Any]] = []
    if distil:
        strategies.append({"kind": "distil", "from": 0, "to": epochs, "teacher": teacher})
    strategies.append({"kind": "prune", "from": cut, "to": end, "goal": goal, **options})
    if qat:
        strategies.append({"kind": "qat", "from": end, "to": epochs})
    return Strategy(epochs, tuple(strategies), **own)


def read(path: str | Path) -> Strategy:
    """Reads a schedule from a JSON file.

    Args:
        path: JSON file.

    Returns:
        The schedule.

    Raises:
        RequestError: The file is no schedule; the message names the place of the first fault.
    """
    schedule = files.read_json(Path(path))
    by_preset = isinstance(schedule, dict) and "preset" in schedule
    _require(schedule, _BY_PRESET if by_preset else _WHOLE, path)
    if by_preset:
        schedule.pop("preset")
        return preset(schedule.pop("epochs"), schedule.pop("goal"), source=str(path), **schedule)
    for i, entry in enumerate(schedule["strategies"]):
        place = f"strategies[{i}]"
        _require(
            entry, {"type": "object", "properties": {"kind": {"enum": list(_KINDS)}}, "required": ["kind"]}, path, place
        )
        needed = ("goal",) if entry["kind"] == "prune" else ()
        _require(entry, _object(_SPAN | _KINDS[entry["kind"]], *needed), path, place)
    return Strategy(schedule["epochs"], tuple(schedule["strategies"]), schedule.get("drop"), str(path))


def _require(value: Any, schema: Mapping[str, Any], path: str | Path, place: str = "") -> None:
    fault = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    if fault is not None:
        where = ".".join(filter(None, (place, *map(str, fault.absolute_path)))) or "the file"
        raise RequestError(f"{path}: {where}: {fault.message}; see docs/smaller.md for what a strategy may say")
