"""What to cut: groups by how little their loss rises for what they save, up to a share of channels or a measured speed.

The rise of the loss is measured one group at a time (Molchanov et al. 2019, "Importance Estimation for Neural Network
Pruning", orders channels within it); rises of several groups are taken to add up. What a cut saves is timed, not
counted: each group is halved, built as int8 and run in turn with the model as it is.
"""

from __future__ import annotations

import fnmatch
import heapq
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipelines.compression.strategy import Cut, Goal
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress

SHARES = (0.25, 0.5, 0.75)  # of a group's width, cut to measure its sensitivity
TILE = 16  # channels that one register of the int8 kernels holds
NEAR = 0.02  # a measured speed that is so near its goal is it

Widths = Mapping[str, int]


class Prunable(Protocol):
    """A trained model opened with its data, to be cut.

    groups: {what is cut together: its width now}. tiles: {group: its width is a multiple of this, those of the int8
    kernels}.
    """

    groups: Widths
    tiles: Widths

    def loss(self, widths: Widths) -> float:
        """On held-out data, of the model with these groups cut to these widths, the least important of each."""

    def save(self, widths: Widths, folder: Path) -> None:
        """Leave the cut model in a folder as `zoo train` would, without a card."""


def sensitivity(model: Prunable) -> dict[str, Any]:
    """{"loss": of the model as it is, "groups": {name: {"width", "losses": {share cut: loss}}}}; the same model and
    data give the same bytes."""
    found: dict[str, Any] = {"loss": model.loss({}), "groups": {}}
    with progress("sensitivity of each group", len(model.groups)) as advance:
        for name, width in model.groups.items():
            losses = {}
            for share in SHARES:
                kept = _tiles(width * (1 - share), model.tiles[name], width)
                losses[f"{share:g}"] = model.loss({name: kept}) if kept < width else found["loss"]
            found["groups"][name] = {"width": width, "losses": losses}
            advance(1)
    return found


def _tiles(width: float, tile: int, most: int) -> int:
    """The multiple of `tile` next to `width`, at least one tile, at most `most`."""
    return min(most, max(tile, round(width / tile) * tile))


def chosen(groups: Widths, patterns: Sequence[str]) -> dict[str, int]:
    """The groups whose names match a pattern, all without patterns. Raises RequestError for one that matches none."""
    if unknown := [each for each in patterns if not fnmatch.filter(groups, each)]:
        names = ", ".join(list(groups)[:8]) + (", ..." if len(groups) > 8 else "")
        raise RequestError(f"found no layers {', '.join(unknown)} that can be cut; there are {names}")
    return {
        name: width
        for name, width in groups.items()
        if not patterns or any(fnmatch.fnmatchcase(name, each) for each in patterns)
    }


def cuts(found: Mapping[str, Any], groups: Widths, tiles: Widths, saved: Mapping[str, float]) -> list[tuple[str, int]]:
    """All cuts of a tile, cheapest first: (group, its width after). saved: what a channel of each group saves."""
    heap: list[tuple[float, str, int]] = []

    def offer(name: str, width: int) -> None:
        """The group's next cut, at its price: rise of the loss for what it saves."""
        tile = tiles[name]
        after = width - (width % tile or tile)
        if after < tile:
            return
        each = found["groups"][name]
        shares = [0.0, *map(float, each["losses"])]
        rises = np.maximum.accumulate([0.0, *(loss - found["loss"] for loss in each["losses"].values())])
        shares, rises = [*shares, 1.0], np.append(rises, 2 * rises[-1] + 1)  # the last channels cost dear
        before, now = (float(np.interp(1 - w / each["width"], shares, rises)) for w in (width, after))
        gain = max(saved[name], 1e-12) * (width - after)
        heapq.heappush(heap, ((now - before + 1e-6) / gain, name, after))

    for name, width in groups.items():
        offer(name, width)
    order, price = [], 0.0
    while heap:
        cost, name, after = heapq.heappop(heap)
        price = max(price, cost)
        order.append((name, after))
        offer(name, after)
    return order


def by_ratio(order: Sequence[tuple[str, int]], now: Widths, whole: int, ratio: float) -> dict[str, int]:
    """The first cuts that leave at most the share 1 - `ratio` of `whole` channels. Raises RequestError where all leave
    more."""
    widths = dict(now)
    for name, width in order:
        if sum(widths.values()) <= whole * (1 - ratio):
            break
        widths[name] = width
    if (left := sum(widths.values())) > whole * (1 - ratio):
        raise RequestError(
            f"found at most {1 - left / whole:.0%} of the channels to cut, wanted {ratio:.0%}; ask for less, or name "
            "more layers"
        )
    return widths


def by_speed(
    order: Sequence[tuple[str, int]], now: Widths, goal: float, speed: Callable[[Widths], float]
) -> tuple[dict[str, int], float]:
    """The fewest cuts that are `goal` times as fast, by bisection, and how fast they are. speed: measures how many
    times. Raises RequestError where even all cuts are slower."""

    def first(count: int) -> dict[str, int]:
        return dict(now) | dict(order[:count])

    low, high = 0, len(order)
    if (reached := speed(first(high))) < goal:
        raise RequestError(f"found {reached:.2f}x with all cuts there are, wanted {goal:g}x; ask for less")
    while high - low > max(1, len(order) // 100):
        middle = (low + high) // 2
        measured = speed(first(middle))
        if measured >= goal:
            high, reached = middle, measured
            if measured < goal * (1 + NEAR):
                break
        else:
            low = middle
    return first(high), reached


def choose(
    model: Prunable,
    found: Mapping[str, Any],
    cut: Cut,
    goal: Goal,
    whole: int,
    speed: Callable[[Widths], float],
) -> dict[str, Any]:
    """The widths that reach a goal: {"goal", "widths", and for a speed "speed" as measured, "saved": the share of time
    that half of each group takes}.

    found: the `sensitivity`. whole: channels of the model that all began with. speed: times as fast as that model.
    """
    groups = chosen(model.groups, cut.layers)
    if not goal.speed:
        order = cuts(found, groups, model.tiles, dict.fromkeys(groups, 1.0))
        return {"goal": str(goal), "widths": by_ratio(order, model.groups, whole, goal.ratio)}
    base, saved = 1 / speed({}), {}
    with progress("time that each group takes", len(groups)) as advance:
        for name, width in groups.items():
            half = _tiles(width / 2, model.tiles[name], width)
            saved[name] = max(0.0, base - 1 / speed({name: half})) / (width - half) if half < width else 0.0
            advance(1)
    widths, reached = by_speed(cuts(found, groups, model.tiles, saved), model.groups, goal.speed, speed)
    shares = {name: round(each * groups[name] / 2, 4) for name, each in saved.items()}
    return {"goal": str(goal), "widths": widths, "speed": round(reached, 3), "saved": shares}
