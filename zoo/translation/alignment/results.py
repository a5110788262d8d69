"""Text of translated lines, with alignments and scores of words."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from zoo.translation.alignment.placement import write_markup
from zoo.translation.alignment.spans import source_spans, target_spans
from zoo.translation.alignment.words import Alignment, Sentence
from zoo.translation.data.lines import Line, Translation
from zoo.translation.data.markup import PLACEHOLDERS, read_markup
from zoo.translation.search.beam_search import Hypothesis

if TYPE_CHECKING:
    from zoo.translation.inference import TranslationPipeline

Pair = tuple[Line, Sequence[Hypothesis]]  # a line, and a hypothesis of each of its parts


def line_results(
    translator: TranslationPipeline, lines: Sequence[Line], translated: Sequence[Sequence[Hypothesis]]
) -> list[list[Translation]]:
    """Makes text of translated lines, see `zoo.translation.inference.TranslationPipeline.results`.

    Args:
        translator: The translator, with its options.
        lines: The lines.
        translated: Hypotheses of the `parts` of all lines, in order.

    Returns:
        The translations of each line, the best first.
    """
    best, following = translator.best, iter(translated)
    pairs: list[Pair] = []
    for line in lines:
        pairs += _pairs(line, list(itertools.islice(following, len(line.parts))), best)
    translations = [_joined(translator, *pair) for pair in pairs]
    _keep_placeholders(translator, pairs, translations)
    chosen = [
        i for i, (line, _) in enumerate(pairs) if translator.alignments or translator.word_scores or _is_marked(line)
    ]
    aligned = alignments(translator, [pairs[i] for i in chosen])
    for i, alignment in zip(chosen, aligned, strict=True):
        line, translation = pairs[i][0], translations[i]
        if translator.alignments:
            translation = translation._replace(alignment=" ".join(f"{a}-{b}" for a, b in alignment.pairs()))
        if translator.word_scores:
            translation = translation._replace(word_scores=alignment.word_scores())
        if line.markup is not None and _is_marked(line):
            translation = translation._replace(text=write_markup(line.markup, alignment))
        translations[i] = translation
    for i, (line, _) in enumerate(pairs):
        if line.markup is not None and not line.fault and not line.markup.nodes:
            translations[i] = translations[i]._replace(text=line.markup.escape(translations[i].text))
    return [translations[i : i + best] for i in range(0, len(translations), best)]


def _pairs(line: Line, parts: Sequence[Sequence[Hypothesis]], best: int) -> list[Pair]:
    """Returns a line with the hypotheses of its parts, for each of its `best` translations."""
    return [(line, [part[k] for part in parts]) for k in range(best)]


def _is_marked(line: Line) -> bool:
    return line.markup is not None and not line.fault and bool(line.markup.nodes)


def _keep_placeholders(translator: TranslationPipeline, pairs: list[Pair], translations: list[Translation]) -> None:
    """Translates lines again without their placeholders, if a translation lost one, to be put back by alignment."""
    pattern, best = PLACEHOLDERS[translator.placeholders], translator.best
    if pattern is None:
        return
    again: list[tuple[int, Line]] = []
    for i in range(0, len(pairs), best):
        line = pairs[i][0]
        wanted = Counter(match[0] for match in pattern.finditer(line.text))
        if line.fault or all(
            translation.text.count(name) == wanted[name]
            for name in wanted
            for translation in translations[i : i + best]
        ):
            continue
        raw, handling = (line.markup.raw, line.markup.handling) if line.markup else (line.text, "")
        again.append(
            (i, translator.marked_line(line.where, read_markup(raw, handling, pattern))._replace(prefix=line.prefix))
        )
    translated = iter(translator.translate_lines([line for _, line in again])[0])
    for i, line in again:
        pairs[i : i + best] = _pairs(line, list(itertools.islice(translated, len(line.parts))), best)
        translations[i : i + best] = [_joined(translator, *pair) for pair in pairs[i : i + best]]


def _joined(translator: TranslationPipeline, line: Line, parts: Sequence[Hypothesis]) -> Translation:
    text = line.join(translator.vocabulary.decode([part.tokens for part in parts]))
    if len(parts) == 1:
        return Translation(text, parts[0].score)
    lengths = [len(part.tokens) + 1 for part in parts]
    score = sum(part.score * length for part, length in zip(parts, lengths, strict=True)) / max(sum(lengths), 1)
    return Translation(text, score)


def alignments(translator: TranslationPipeline, pairs: Sequence[Pair]) -> Iterator[Alignment]:
    """Aligns lines with their translations.

    Args:
        translator: The translator, whose options say whether alignments and scores of words are computed.
        pairs: Lines, each with a hypothesis of its parts.

    Yields:
        The alignment of each line.
    """
    sources = [part for line, _ in pairs for part in line.parts]
    targets = [part.tokens for _, parts in pairs for part in parts]
    if translator.alignments or any(_is_marked(line) for line, _ in pairs):
        attention = iter(translator.forced.attention(sources, targets))
    else:  # scores of words read none
        attention = (np.zeros((len(b), len(a)), np.float32) for a, b in zip(sources, targets, strict=True))
    scores = translator.token_scores(sources, targets) if translator.word_scores else None
    probabilities = iter([None] * len(targets) if scores is None else scores)
    vocabulary = translator.vocabulary
    for line, parts in pairs:
        sentences = []
        for source, hypothesis in zip(line.texts, parts, strict=True):
            target = vocabulary.decode([hypothesis.tokens])[0]
            spans = source_spans(vocabulary, source), target_spans(vocabulary, hypothesis.tokens, target)
            sentences.append(Sentence(source, spans[0], target, spans[1], next(attention), next(probabilities)))
        yield Alignment(line, sentences, PLACEHOLDERS[translator.placeholders])
