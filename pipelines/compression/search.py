"""Search of channels to prune: the groups of least loss increase per saved time, up to a share of channels or a speed.

The loss increase is measured one group at a time (Molchanov et al. 2019, "Importance Estimation for Neural Network
Pruning", orders channels within it) and taken as additive over groups. The saving is timed, not counted: each group is
halved, built as int8 and run in turn with the original model.
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
SPEED_TOLERANCE = 0.02  # a measured speed that is so near its goal is it

Widths = Mapping[str, int]


class Prunable(Protocol):
    """A trained model with its data, to be pruned.

    Attributes:
        groups: Current width by group.
        tiles: By group, the number that its width is a multiple of: the tile of the int8 kernels.
    """

    groups: Widths
    tiles: Widths

    def loss(self, widths: Widths) -> float:
        """Computes the loss on held-out data with groups pruned to widths, least important channels first.

        Args:
            widths: Remaining channels of each group.
        """

    def save(self, widths: Widths, folder: Path) -> None:
        """Writes the pruned model to a folder as `zoo train` does, without a card.

        Args:
            widths: Width by group.
            folder: Folder to write.
        """


def sensitivity(model: Prunable) -> dict[str, Any]:
    """Measures the loss of pruning each group alone; the same model and data give the same bytes.

    Args:
        model: Model to measure.

    Returns:
        {"loss": of the model itself, "groups": {name: {"width", "losses": {share cut: loss}}}}.
    """
    result: dict[str, Any] = {"loss": model.loss({}), "groups": {}}
    with progress("sensitivity of each group", len(model.groups)) as advance:
        for name, width in model.groups.items():
            losses = {}
            for share in SHARES:
                kept = _tiles(width * (1 - share), model.tiles[name], width)
                losses[f"{share:g}"] = model.loss({name: kept}) if kept < width else result["loss"]
            result["groups"][name] = {"width": width, "losses": losses}
            advance(1)
    return result


def _tiles(width: float, tile: int, most: int) -> int:
    """The multiple of `tile` next to `width`, at least one tile, at most `most`."""
    return min(most, max(tile, round(width / tile) * tile))


def chosen(groups: Widths, patterns: Sequence[str]) -> dict[str, int]:
    """Selects groups by name patterns.

    Args:
        groups: Width by group.
        patterns: Patterns; without any, all groups are selected.

    Returns:
        Width by selected group.

    Raises:
        RequestError: A pattern matches no group.
    """
    if unknown := [pattern for pattern in patterns if not fnmatch.filter(groups, pattern)]:
        names = ", ".join(list(groups)[:8]) + (", ..." if len(groups) > 8 else "")
        raise RequestError(f"found no layers {', '.join(unknown)} that can be cut; there are {names}")
    return {
        name: width
        for name, width in groups.items()
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def cuts(
    sensitivities: Mapping[str, Any], groups: Widths, tiles: Widths, saved: Mapping[str, float]
) -> list[tuple[str, int]]:
    """Lists all cuts of a tile, least loss per saving first.

    Args:
        sensitivities: Result of `sensitivity`.
        groups: Width by group.
        tiles: Tile by group.
        saved: Saving of one channel by group.

    Returns:
        (group, width after the cut).
    """
    heap: list[tuple[float, str, int]] = []

    def offer(name: str, width: int) -> None:
        """Pushes the next cut of a group onto the heap, by the rise of the loss per saved time."""
        tile = tiles[name]
        after = width - (width % tile or tile)
        if after < tile:
            return
        group = sensitivities["groups"][name]
        shares = [0.0, *map(float, group["losses"])]
        rises = np.maximum.accumulate([0.0, *(loss - sensitivities["loss"] for loss in group["losses"].values())])
        shares, rises = [*shares, 1.0], np.append(rises, 2 * rises[-1] + 1)  # cutting the last channels loses most
        before, now = (float(np.interp(1 - w / group["width"], shares, rises)) for w in (width, after))
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


def by_ratio(order: Sequence[tuple[str, int]], now: Widths, total: int, ratio: float) -> dict[str, int]:
    """Takes the first cuts that leave at most the share 1 - `ratio` of the channels.

    Args:
        order: Result of `cuts`.
        now: Width by group.
        total: Number of channels that the share refers to.
        ratio: Share of channels to cut.

    Returns:
        Width by group.

    Raises:
        RequestError: All cuts together leave more.
    """
    widths = dict(now)
    for name, width in order:
        if sum(widths.values()) <= total * (1 - ratio):
            break
        widths[name] = width
    if (left := sum(widths.values())) > total * (1 - ratio):
        raise RequestError(
            f"found at most {1 - left / total:.0%} of the channels to cut, expected {ratio:.0%}; ask for less, or name "
            "more layers"
        )
    return widths


def by_speed(
    order: Sequence[tuple[str, int]], now: Widths, goal: float, speed: Callable[[Widths], float]
) -> tuple[dict[str, int], float]:
    """Finds the smallest number of cuts that reaches a speed, by bisection.

    Args:
        order: Result of `cuts`.
        now: Width by group.
        goal: Speed relative to the original model.
        speed: Measures the relative speed of widths.

    Returns:
        Width by group, and the measured speed.

    Raises:
        RequestError: All cuts together are slower.
    """

    def first(count: int) -> dict[str, int]:
        return dict(now) | dict(order[:count])

    low, high = 0, len(order)
    if (reached := speed(first(high))) < goal:
        raise RequestError(f"found {reached:.2f}x with all groups pruned, expected {goal:g}x; choose a lower goal")
    while high - low > max(1, len(order) // 100):
        middle = (low + high) // 2
        measured = speed(first(middle))
        if measured >= goal:
            high, reached = middle, measured
            if measured < goal * (1 + SPEED_TOLERANCE):
                break
        else:
            low = middle
    return first(high), reached


def choose(
    model: Prunable,
    sensitivities: Mapping[str, Any],
    cut: Cut,
    goal: Goal,
    total: int,
    speed: Callable[[Widths], float],
) -> dict[str, Any]:
    """Chooses the widths that reach a goal.

    Args:
        model: Model to prune.
        sensitivities: Result of `sensitivity`.
        cut: Layers to prune.
        goal: Speed or share of channels.
        total: Channels of the original model.
        speed: Measures the speed of widths relative to the original model.

    Returns:
        {"goal", "widths"}, and for a speed "speed" as measured and "saved": the share of time of half of each group.

    Raises:
        RequestError: The goal cannot be reached.
    """
    groups = chosen(model.groups, cut.layers)
    if not goal.speed:
        order = cuts(sensitivities, groups, model.tiles, dict.fromkeys(groups, 1.0))
        return {"goal": str(goal), "widths": by_ratio(order, model.groups, total, goal.ratio)}
    base, saved = 1 / speed({}), {}
    with progress("time that each group takes", len(groups)) as advance:
        for name, width in groups.items():
            half = _tiles(width / 2, model.tiles[name], width)
            saved[name] = max(0.0, base - 1 / speed({name: half})) / (width - half) if half < width else 0.0
            advance(1)
    widths, reached = by_speed(cuts(sensitivities, groups, model.tiles, saved), model.groups, goal.speed, speed)
    shares = {name: round(gain * groups[name] / 2, 4) for name, gain in saved.items()}
    return {"goal": str(goal), "widths": widths, "speed": round(reached, 3), "saved": shares}
