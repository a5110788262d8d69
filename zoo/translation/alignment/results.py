"""Text of translated lines, with alignments and scores of words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zoo.translation.alignment.spans import source_spans, target_spans
from zoo.translation.alignment.words import Alignment, Sentence
from zoo.translation.data.lines import Line, Translation
from zoo.translation.search.beam_search import Hypothesis

if TYPE_CHECKING:
    from zoo.translation.translator import Translator

Pair = tuple[Line, Sequence[Hypothesis]]  # a line, and a hypothesis of each of its parts


def line_results(
    translator: Translator, lines: Sequence[Line], translated: Sequence[Sequence[Hypothesis]]
) -> list[list[Translation]]:
    """Makes text of translated lines, see `zoo.translation.inference.TranslationPipeline.results`.

    Args:
        translator: The translator, with its options.
        lines: The lines.
        translated: Hypotheses of the `parts` of all lines, in order.

    Returns:
        The translations of each line, the best first.
    """
    following = iter(translated)
    pairs: list[Pair] = []
    for line in lines:
        parts = list(itertools.islice(following, len(line.parts)))
        pairs += [(line, [part[k] for part in parts]) for k in range(translator.best)]
    found = [_joined(translator, *pair) for pair in pairs]
    if translator.alignments or translator.word_scores:
        found = list(_with_words(translator, pairs, found))
    return [found[i : i + translator.best] for i in range(0, len(found), translator.best)]


def _joined(translator: Translator, line: Line, parts: Sequence[Hypothesis]) -> Translation:
    text = line.join(translator.vocabulary.decode([part.tokens for part in parts]))
    if len(parts) == 1:
        return Translation(text, parts[0].score)
    lengths = [len(part.tokens) + 1 for part in parts]
    score = sum(part.score * length for part, length in zip(parts, lengths, strict=True)) / max(sum(lengths), 1)
    return Translation(text, score)


def _with_words(translator: Translator, pairs: Sequence[Pair], found: Sequence[Translation]) -> Iterator[Translation]:
    """Yields translations with alignments and scores of words."""
    for each, alignment in zip(found, alignments(translator, pairs, translator.word_scores), strict=True):
        if translator.alignments:
            each = each._replace(alignment=" ".join(f"{a}-{b}" for a, b in alignment.pairs()))
        if translator.word_scores:
            each = each._replace(word_scores=alignment.word_scores())
        yield each


def alignments(translator: Translator, pairs: Sequence[Pair], scores: bool = False) -> Iterator[Alignment]:
    """Aligns lines with their translations.

    Args:
        translator: The translator.
        pairs: Lines, each with a hypothesis of its parts.
        scores: Whether scores of words are computed, too.

    Yields:
        The alignment of each line.
    """
    sources = [part for line, _ in pairs for part in line.parts]
    targets = [part.tokens for _, parts in pairs for part in parts]
    attention = iter(translator.forced.attention(sources, targets))
    probabilities = iter(translator.token_scores(sources, targets) if scores else [None] * len(targets))
    vocabulary = translator.vocabulary
    for line, parts in pairs:
        sentences = []
        for source, hypothesis in zip(line.texts, parts, strict=True):
            target = vocabulary.decode([hypothesis.tokens])[0]
            spans = source_spans(vocabulary, source), target_spans(vocabulary, hypothesis.tokens, target)
            sentences.append(Sentence(source, spans[0], target, spans[1], next(attention), next(probabilities)))
        yield Alignment(line, sentences)
