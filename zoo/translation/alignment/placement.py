"""Places of tags and placeholders in a translation, by its alignment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from zoo.translation.alignment.words import Alignment, Floats
from zoo.translation.data.characters import CONTINUOUS
from zoo.translation.data.markup import Markup, Node

_WORD = re.compile(r"\s*(\w+|\S)")
_BRACKETS = frozenset("([{\u00ab\u201e\u00bf\u00a1")
HALF = np.float32(0.5)
MIN_SHARE = 0.1  # share of a word that is aligned to another
Range = tuple[int, int]


def write_markup(markup: Markup, alignment: Alignment) -> str:
    """Writes a translation with the tags and placeholders of its source.

    An element encloses the run of words that is mostly aligned to its words: the run with the largest sum of (share -
    1/2) within its parent and outside its siblings. Tags therefore nest as in the source. A tag without text and a
    placeholder stand before the word that is aligned to the next word of the source.

    Args:
        markup: Tags and placeholders of the source.
        alignment: Alignment of `markup.text` and its translation.

    Returns:
        The translation in the form of `markup.raw`.
    """
    placement = _Placement(markup, alignment)
    count = len(alignment.units)
    placed = placement.place(markup.nodes, (0, count), (0, len(markup.text)))
    gaps: list[list[_Item]] = [[] for _ in range(count + 1)]
    _collect(placed, gaps)
    return _write(markup, alignment, gaps)


@dataclass
class _Placed:
    """A node before the unit `first` and behind the one before `last`."""

    node: Node
    first: int
    last: int
    children: list[_Placed] = field(default_factory=list)


class _Placement:
    """Finds the place of every node."""

    def __init__(self, markup: Markup, alignment: Alignment) -> None:
        self.text, self.alignment = markup.text, alignment

    def place(self, nodes: Sequence[Node], units: Range, characters: Range) -> list[_Placed]:
        """Places nodes of one parent.

        Args:
            nodes: The nodes, in order.
            units: Units of the parent.
            characters: Characters of the parent in the source.

        Returns:
            The nodes in the order of the translation.
        """
        ranges = self._elements(nodes, units)
        placed = []
        for number, node in enumerate(nodes):
            if node.closing:
                first, last = ranges[number]
                children = self.place(node.children, (first, last), (node.first, node.last))
                placed.append((number, _Placed(node, first, last, children)))
            else:
                gap = self._gap(node, units, characters)
                for other, (first, last) in ranges.items():
                    if first < gap < last:
                        gap = first if number < other else last
                placed.append((number, _Placed(node, gap, gap)))
        placed.sort(key=lambda pair: (pair[1].first, pair[1].last, pair[0]))
        return [element for _, element in placed]

    def _elements(self, nodes: Sequence[Node], units: Range) -> dict[int, Range]:
        """Returns the units of each element, the surest first to choose."""
        shares = {i: self.alignment.shares(node.first, node.last) for i, node in enumerate(nodes) if node.closing}
        sums = {i: _best(share, units)[0] for i, share in shares.items()}
        free, ranges = [units] if units[0] < units[1] else [], dict[int, Range]()
        for i in sorted(shares, key=lambda i: (-sums[i], i)):
            if not free:
                break
            space = max(free, key=lambda run: _best(shares[i], run)[0])
            _, *(first, last) = _best(shares[i], space)
            ranges[i] = first, last
            free.remove(space)
            free += [run for run in ((space[0], first), (last, space[1])) if run[0] < run[1]]
        for i in sorted(shares.keys() - ranges.keys()):  # there are more elements than words
            end = max((ranges[other] for other in ranges if other < i), default=(0, units[0]))[1]
            ranges[i] = end, end
        return dict(sorted(ranges.items()))

    def _gap(self, node: Node, units: Range, characters: Range) -> int:
        """Returns the unit that a node without text stands before."""
        first, last = units
        if first == last or not self.text[characters[0] : node.first].strip():
            return first
        following = _WORD.match(self.text, node.first, characters[1])
        if following is None:
            return last
        shares = self.alignment.shares(*following.span(1))[first:last]
        if shares.max() >= MIN_SHARE:
            return first + int(shares.argmax())
        before = self.text[: node.first].rstrip()
        word = re.search(r"(\w+|\S)$", before)
        shares = self.alignment.shares(word.start() if word else 0, len(before))[first:last]
        return first + int(shares.argmax()) + 1


def _best(shares: Floats, units: Range) -> tuple[float, int, int]:
    """Returns the run of units with the largest sum of shares - 1/2 (Kadane's algorithm): the sum, and the run."""
    first, last = units
    if first == last:
        return -1.0, first, first
    sums = np.concatenate([[0], np.cumsum(shares[first:last] - HALF, dtype=np.float64)])
    gains = sums[1:] - np.minimum.accumulate(sums)[:-1]
    end = int(gains.argmax())
    begin = end - int(sums[: end + 1][::-1].argmin())
    return float(gains[end]), first + begin, first + end + 1


# -------------------------------------------------------------------------------------------------------------- writing


@dataclass
class _Item:
    """A start tag, an end tag, or a part that is copied unchanged ("open", "close", "whole")."""

    kind: str
    text: str
    node: Node


def _collect(placed: Sequence[_Placed], gaps: list[list[_Item]]) -> None:
    """Collects tags by the unit that they stand before, in order."""
    for element in placed:
        kind = "open" if element.node.closing else "whole"
        gaps[element.first].append(_Item(kind, element.node.opening, element.node))
        _collect(element.children, gaps)
        if element.node.closing:
            gaps[element.last].append(_Item("close", element.node.closing, element.node))


def _write(markup: Markup, alignment: Alignment, gaps: Sequence[Sequence[_Item]]) -> str:
    target, parts, end = alignment.target, list[str](), 0
    for items, (first, last) in zip(gaps, [*alignment.units, (len(target), len(target))], strict=True):
        parts.append(_between(items, target, end, first))
        parts.append(markup.escape(target[first:last]))
        end = last
    return "".join(parts)


def _between(items: Sequence[_Item], target: str, end: int, first: int) -> str:
    """Returns what stands between two units: tags, and the blanks around them.

    A blank follows end tags, and is before start tags. Verbatim text keeps its own blanks.
    """
    blank = target[end:first]
    whole = [i for i, item in enumerate(items) if item.kind == "whole"]
    starts = [i for i, item in enumerate(items) if item.kind != "close"]
    if not whole:
        position = starts[0] if starts else len(items)
        return "".join([*(item.text for item in items[:position]), blank, *(item.text for item in items[position:])])
    before, after = target[end - 1 : end], target[first : first + 1]
    leading = bool(before) and items[whole[0]].node.before and (bool(blank) or not _tight(before, _BRACKETS))
    trailing = bool(after) and items[whole[-1]].node.after and (bool(blank) or (after.isalnum() and not _tight(after)))
    if blank and not leading and not trailing and not all(items[i].node.breaks for i in whole):
        leading = True
    behind = next((i for i in range(whole[-1] + 1, len(items)) if items[i].kind == "open"), len(items))
    texts = []
    for i, item in enumerate(items):
        if (leading and i == starts[0]) or (trailing and i == behind):
            texts.append(" ")
        elif i in whole[1:]:
            one, other = items[whole[whole.index(i) - 1]].node, item.node
            texts.append(" " * (one.after or other.before))
        texts.append(item.text)
    return "".join(texts) + " " * (trailing and behind == len(items))


def _tight(char: str, more: frozenset[str] = frozenset()) -> bool:
    """Whether no blank is beside a character: one of a script without blanks, or of `more`."""
    return char in more or bool(CONTINUOUS.match(char))
