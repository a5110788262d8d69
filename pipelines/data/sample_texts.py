"""Texts that ship with the package: calibration texts, for models without data, and evaluation texts for int8.

Both sets were written for this project and are in the public domain. The evaluation sentences are composed of parts
that combine freely within a language, so that they differ from all calibration texts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

from pipelines.core.files import read_json

FOLDER = Path(__file__).parent / "samples"
GOLDEN = 0.6180339887  # steps of this share of all combinations visit them evenly
LONG = 8  # interval of the texts with three sentences


@functools.cache
def calibration_texts() -> tuple[str, ...]:
    """Returns words, queries, sentences, paragraphs, code, numbers and addresses in about 30 languages."""
    lines = (FOLDER / "calibration.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("# "))


@functools.cache
def evaluation_texts() -> tuple[str, ...]:
    """Returns 1,500 texts in 19 languages, search queries, code and addresses; every time the same."""
    texts: list[str] = []
    for group in read_json(FOLDER / "evaluation.json")["groups"].values():
        made = _combined(group["parts"], group["separator"], group["texts"])
        texts += [
            group["separator"].join(made[i : i + 3]) if i % LONG == LONG - 1 else text for i, text in enumerate(made)
        ]
    return tuple(texts)


def pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs every text with the one before it, as queries and passages of a cross-encoder are.

    Args:
        texts: Texts.

    Returns:
        Pairs, the shorter text first.
    """
    adjacent = zip((*texts[-1:], *texts[:-1]), texts, strict=True)
    return [(a, b) if len(a) <= len(b) else (b, a) for a, b in adjacent]


def _combined(parts: Sequence[Sequence[str]], separator: str, count: int) -> list[str]:
    """Returns distinct combinations of one part of each column, evenly drawn."""
    total = math.prod(map(len, parts))
    step = next(stride for stride in range(max(int(GOLDEN * total), 1), 2 * total) if math.gcd(stride, total) == 1)
    texts = []
    for i in range(count):
        remainder, chosen = i * step % total, []
        for column in parts:
            remainder, index = divmod(remainder, len(column))
            chosen.append(column[index])
        texts.append(separator.join(chosen).strip())
    return texts
