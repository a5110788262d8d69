"""The order of ranked items: by the probability of one label, or by a weighted sum of those of several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError

SCORE = "score"  # column of a weighted sum
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Order:
    """Weights of the labels in the score that orders items.

    Attributes:
        weights: Weight of every label.
        summed: Whether the score is a sum, and not the probability of one label.
    """

    weights: tuple[float, ...]
    summed: bool

    @classmethod
    @lru_cache(128)
    def of(cls, by: str | None, labels: tuple[str, ...]) -> Order:
        """Parses an order.

        Args:
            by: Name of a label, or a sum such as "clicked + 2 loved" or "clicked+2*loved"; None for the first label.
            labels: Names of the labels.

        Returns:
            The order.

        Raises:
            RequestError: A term names no label.
        """
        if by is None or by in labels:
            chosen = labels[0] if by is None else by
            return cls(tuple(float(label == chosen) for label in labels), False)
        weights = dict.fromkeys(labels, 0.0)
        text, first = by.strip(), True
        while text or first:
            label, factor, text = _term(text, labels, first, by)
            weights[label] += factor
            first = False
        return cls(tuple(weights.values()), True)

    def scores(self, probabilities: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Computes the scores.

        Args:
            probabilities: float32 [n] of every label.

        Returns:
            float32 [n]; of one label its probabilities.
        """
        if not self.summed:
            return probabilities[self.weights.index(1.0)]
        total = np.zeros(len(probabilities[0]), np.float64)
        for weight, shares in zip(self.weights, probabilities, strict=True):
            total += weight * shares
        return total.astype(np.float32)


def _term(text: str, labels: Sequence[str], first: bool, by: str) -> tuple[str, float, str]:
    """Reads one term of a sum; returns its label and factor, and the text behind it."""
    several = f"one of the labels {', '.join(labels)}, or their sum such as '{labels[0]} + 2 {labels[-1]}'"
    wrong = RequestError(f"found the order {by!r}, expected {several if len(labels) > 1 else f'the label {labels[0]}'}")
    sign = 1.0
    if not first or text[:1] in "+-":
        if text[:1] not in ("+", "-"):
            raise wrong
        sign, text = (-1.0 if text[0] == "-" else 1.0), text[1:].lstrip()
    factor = 1.0
    starts = [label for label in labels if text.startswith(label)]
    if not starts and (number := NUMBER.match(text)):
        factor, text = float(number.group()), text[number.end() :].lstrip().removeprefix("*").lstrip()
        starts = [label for label in labels if text.startswith(label)]
    if not starts:
        raise wrong
    label = max(starts, key=len)
    return label, sign * factor, text[len(label) :].lstrip()
