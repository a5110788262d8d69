"""Labelled data of text tasks, and the metrics that are sums over samples: accuracy, F1 of classes and of entities."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis.metrics import LEVEL, RESAMPLES, against_fp32, interval
from pipelines.core.errors import RequestError
from pipelines.data.text_files import STDIN, read_lines
from zoo.texts.data import text_files

Floats = NDArray[np.float64]
TOKEN_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("ner_tags", "tags", "labels")
SPAN_COLUMNS = ("spans", "entities")
SPAN_LABELS = ("label", "entity_group", "entity")
WORD = re.compile(r"\w+|[^\w\s]")
DOCUMENT = "-DOCSTART-"
_PLACED = re.compile(r"[BIESLU]-.")  # begin, inside, end (last), single (unit): BIO, BIOES, BILOU


class Counts(NamedTuple):
    """A metric of the sums of counts of samples.

    Attributes:
        counts: Counts of each sample, float64 [n, k].
        metric: Sums [..., k] to values [...].
    """

    counts: Floats
    metric: Callable[[Floats], Floats]


def share(sums: Floats) -> Floats:
    """Returns the first count as a share of the second.

    Args:
        sums: float64 [..., 2].
    """
    return np.asarray(sums[..., 0] / np.maximum(sums[..., 1], 1e-12))


def f1(sums: Floats) -> Floats:
    """Returns 2 x / (y + z), F1 of x correct among y found and z expected; 0 without any.

    Args:
        sums: float64 [..., 3].
    """
    return np.asarray(2 * sums[..., 0] / np.maximum(sums[..., 1] + sums[..., 2], 1e-12))


def macro_f1(sums: Floats) -> Floats:
    """Returns the mean of F1 over the classes that are found or expected.

    Args:
        sums: float64 [..., 3 classes], see `f1`.
    """
    classes = sums.reshape(*sums.shape[:-1], -1, 3)
    seen = classes[..., 1:].sum(axis=-1) > 0
    return np.asarray((f1(classes) * seen).sum(axis=-1) / np.maximum(seen.sum(axis=-1), 1))


def class_counts(predicted: NDArray[np.bool_], expected: NDArray[np.bool_]) -> Floats:
    """Returns the counts of `f1` for every class.

    Args:
        predicted: Whether a class is predicted, bool [n, classes].
        expected: Whether it is the label, bool [n, classes].

    Returns:
        float64 [n, classes, 3].
    """
    return np.stack([predicted & expected, predicted, expected], axis=-1).astype(np.float64)


def compare(
    measured: Mapping[str, Mapping[str, Counts]], versus_fp32: Callable[[str], dict[str, float]]
) -> dict[str, Any]:
    """Compares the metrics of all precisions with fp32, with paired bootstrap intervals over samples.

    Args:
        measured: {precision: {metric: its counts}}, fp32 first.
        versus_fp32: Further differences of a precision.

    Returns:
        See `pipelines.analysis.metrics.against_fp32`.
    """
    count = len(next(iter(measured["fp32"].values())).counts)
    rng = np.random.default_rng(0)
    draws = np.stack([np.bincount(rng.integers(0, count, count), minlength=count) for _ in range(RESAMPLES)])

    def metrics_of(name: str) -> dict[str, float]:
        return {key: float(stat.metric(stat.counts.sum(axis=0))) for key, stat in measured[name].items()}

    def versus(a: str, b: str) -> dict[str, Any]:
        before, after = metrics_of(a), metrics_of(b)
        resampled = {
            name: {key: stat.metric(draws @ stat.counts) for key, stat in measured[name].items()} for name in (a, b)
        }
        return {
            "difference": {**{key: after[key] - before[key] for key in before}, **versus_fp32(b)},
            "interval": {
                "level": LEVEL,
                "resamples": RESAMPLES,
                **{key: interval(resampled[b][key] - resampled[a][key]) for key in before},
            },
        }

    return against_fp32({name: name for name in measured}, metrics_of, versus)


def compare_classes(
    predicted: Mapping[str, NDArray[np.bool_]], expected: NDArray[np.bool_], several: bool = False
) -> dict[str, Any]:
    """Compares the labels of all precisions with fp32, by accuracy and F1.

    Args:
        predicted: Predicted labels by precision, bool [n, labels].
        expected: The right ones, bool [n, labels].
        several: Whether a sample has several labels: F1 is then that of all labels together, otherwise the mean of the
            labels.

    Returns:
        See `compare`; "difference" has "agreement", the share of samples with the labels of fp32.
    """

    def measured(labels: NDArray[np.bool_]) -> dict[str, Counts]:
        right = (labels == expected).all(axis=1)
        counts = class_counts(labels, expected)
        return {
            "accuracy": Counts(np.stack([right, np.ones(len(right))], axis=1), share),
            "f1": Counts(counts.sum(axis=1), f1) if several else Counts(counts.reshape(len(counts), -1), macro_f1),
        }

    return compare(
        {name: measured(labels) for name, labels in predicted.items()},
        lambda name: {"agreement": float((predicted[name] == predicted["fp32"]).all(axis=1).mean())},
    )


def parts(label: str) -> list[str]:
    """Splits several labels of a text.

    Args:
        label: Labels separated by tabs or commas.
    """
    return [part.strip() for part in label.split("\t" if "\t" in label else ",") if part.strip()]


class Labels:
    """Labels of data by the names of a model.

    Args:
        names: Labels of the model, in the order of its outputs.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._index = {name: i for i, name in enumerate(names)}
        self._folded = {name.lower(): i for i, name in enumerate(names)}

    def find(self, label: str) -> tuple[list[int], str]:
        """Returns the outputs of a label, and the reason why it is invalid.

        Args:
            label: A name, its number, or several of them separated by commas or tabs.

        Returns:
            Numbers of the outputs, and "" or the reason.
        """
        numbers = self._of(label)
        if numbers is not None:
            return [numbers], ""
        several = [self._of(part) for part in parts(label)]
        wrong = next((part for part, number in zip(parts(label), several, strict=True) if number is None), None)
        if wrong is not None:
            shown = ", ".join(self.names[:5]) + (", ..." if len(self.names) > 5 else "")
            return [], f"has the label {wrong!r:.60}, expected one of {shown}"
        return sorted({number for number in several if number is not None}), ""

    def _of(self, label: str) -> int | None:
        number = self._index.get(label, self._folded.get(label.lower()))
        if number is None and label.isdecimal() and int(label) < len(self.names):
            return int(label)
        return number


def read_texts(
    data: Any, labels: Labels, columns: Sequence[str], report: Callable[[str, str], None]
) -> tuple[list[tuple[str, ...]], list[list[int]]]:
    """Reads labelled texts, or pairs of texts.

    Args:
        data: Files with a text and a label, or with two texts and a label and `columns`.
        labels: Labels of the model.
        columns: Columns of the texts and of the label; (): the usual names.
        report: Takes the location and the error of each row, "" if it is valid.

    Returns:
        Texts, and the numbers of the labels of each.

    Raises:
        RequestError: There are no valid rows.
    """
    texts, targets = [], []
    count = max(len(columns) - 1, 1)
    for row in text_files.read_rows(data, count, columns, extra=1):
        numbers, error = ([], row.error) if row.error else labels.find(row.texts[-1])
        report(row.location, error)
        if not error:
            texts.append(row.texts[:-1])
            targets.append(numbers)
    if not texts:
        raise RequestError(f"found no labelled texts in {text_files.describe(data)}; expected: text TAB label")
    return texts, targets


class Sentence(NamedTuple):
    """Words of a text with their labels.

    Attributes:
        location: File and line, for messages.
        text: The text.
        words: Words.
        starts: Characters of the text at which they begin.
        tags: Labels, such as B-PER.
    """

    location: str
    text: str
    words: list[str]
    starts: list[int]
    tags: list[str]

    @classmethod
    def of_words(cls, location: str, words: list[str], tags: list[str]) -> Sentence:
        """Returns words that a blank joins to a text.

        Args:
            location: File and line.
            words: Words.
            tags: Their labels.
        """
        starts = [0, *itertools.accumulate(len(word) + 1 for word in words)]
        return cls(location, " ".join(words), words, starts[: len(words)], tags)

    @classmethod
    def of_spans(cls, location: str, text: str, spans: Sequence[tuple[int, int, str]]) -> Sentence:
        """Returns the words of a text, with labels by spans of characters.

        Args:
            location: File and line.
            text: The text.
            spans: First character, character after the last one, and label.

        Raises:
            RequestError: Spans overlap, or end outside of the text.
        """
        ordered = sorted(spans)
        limits = [0, *(limit for start, end, _ in ordered for limit in (start, end)), len(text)]
        if limits != sorted(limits) or any(start == end for start, end, _ in ordered):
            raise RequestError(f"{location} has spans that are empty, overlap, or are not within the text")
        words: list[str] = []
        starts: list[int] = []
        tags: list[str] = []
        for i, (start, end) in enumerate(itertools.pairwise(limits)):
            label = ordered[i // 2][2] if i % 2 else ""
            for match in WORD.finditer(text, start, end):
                is_first = i % 2 and (not starts or starts[-1] < start)
                words.append(match.group())
                starts.append(match.start())
                tags.append(f"{'B' if is_first else 'I'}-{label}" if label else "O")
        return cls(location, text, words, starts, tags)

    def tokens(self, encoding: Any) -> dict[int, int]:
        """Returns the words of tokens.

        Args:
            encoding: Encoding of the text, or of a window of it.

        Returns:
            {number of a token: number of the word that it is of}, in order; special tokens and whitespace have none.
        """
        words = {}
        for i, (special, (first, last)) in enumerate(zip(encoding.special_tokens_mask, encoding.offsets, strict=True)):
            word = bisect.bisect_right(self.starts, last - 1) - 1
            if not special and last > first and word >= 0 and first < self.starts[word] + len(self.words[word]):
                words[i] = word
        return words

    def first_tokens(self, encoding: Any) -> dict[int, int]:
        """Returns the first tokens of words.

        Args:
            encoding: Encoding of the text, or of a window of it.

        Returns:
            {number of a token: number of the word that begins with it}.
        """
        first = {word: token for token, word in reversed(self.tokens(encoding).items())}
        return {token: word for word, token in first.items()}


def read_sentences(data: Any) -> Iterator[Sentence]:
    """Reads words with labels: files in the format of CoNLL, or JSON lines or Parquet.

    Their objects are {"tokens", "ner_tags"}, or {"text", "spans"} with a list of {"start", "end", "label"}.

    Args:
        data: Files.

    Returns:
        Iterator over the sentences.

    Raises:
        RequestError: A file is missing, or of another format.
    """
    for name in map(str, data if isinstance(data, list | tuple) else [data]):
        if name != STDIN and not text_files.is_file(name):
            raise RequestError(f"found no file {name:.200}; expected words with labels: CoNLL, .jsonl or .parquet")
        suffix = Path(name.lower().removesuffix(".gz")).suffix
        yield from _read_objects(name) if suffix in (".jsonl", ".parquet") else _read_conll(name)


def read_objects(name: str) -> Iterator[tuple[str, Any]]:
    """Reads the rows of a Parquet file, or the lines of JSON of any other file.

    Args:
        name: File.

    Returns:
        Iterator over the locations and values; None for a line that is no JSON.
    """
    if name.lower().removesuffix(".gz").endswith(".parquet"):
        import pyarrow.parquet as parquet

        yield from ((f"{name}, row {i}", row) for i, row in enumerate(parquet.read_table(name).to_pylist(), 1))
    else:
        yield from ((f"{name}, line {i}", parsed(line)) for i, line in enumerate(read_lines(name), 1) if line)


def parsed(text: str) -> Any:
    """Parses JSON; None for another text.

    Args:
        text: The text.
    """
    try:
        return json.loads(text)
    except ValueError:
        return None


def _read_objects(name: str) -> Iterator[Sentence]:
    for location, value in read_objects(name):
        row = value if isinstance(value, dict) else {}
        spans = next((row[key] for key in SPAN_COLUMNS if isinstance(row.get(key), list)), None)
        if isinstance(row.get("text"), str) and spans is not None:
            yield Sentence.of_spans(location, row["text"], [_span(location, span) for span in spans])
            continue
        words, tags = (next((row[key] for key in keys if key in row), None) for keys in (TOKEN_COLUMNS, TAG_COLUMNS))
        if not isinstance(words, list) or not isinstance(tags, list) or len(words) != len(tags):
            raise RequestError(
                f'{location} is no {{"tokens": [...], "ner_tags": [...]}} of one length, nor {{"text", "spans"}}'
            )
        yield Sentence.of_words(location, [str(word) for word in words], [str(tag) for tag in tags])


def _span(location: str, span: Any) -> tuple[int, int, str]:
    fields = span if isinstance(span, dict) else {}
    label = next((fields[key] for key in SPAN_LABELS if isinstance(fields.get(key), str)), "")
    if type(fields.get("start")) is not int or type(fields.get("end")) is not int or not label:
        raise RequestError(f'{location} has the span {span!r:.60}; expected {{"start", "end", "label"}}')
    return fields["start"], fields["end"], label


def _read_conll(name: str) -> Iterator[Sentence]:
    """Reads a line a word, its first column the word and its last one the label; blank lines end sentences."""
    words: list[str] = []
    tags: list[str] = []
    start = 1
    for number, line in enumerate(read_lines(name), 1):
        parts = (line or "").split("\t" if "\t" in (line or "") else None)
        if not parts or parts[0] == DOCUMENT:
            if words:
                yield Sentence.of_words(f"{name}, line {start}", words, tags)
            words, tags, start = [], [], number + 1
            continue
        if len(parts) < 2:
            raise RequestError(f"{name}, line {number} is {line!r:.60}; expected a word and its label")
        words.append(parts[0])
        tags.append(parts[-1].strip())
    if words:
        yield Sentence.of_words(f"{name}, line {start}", words, tags)


def tagged(data: Any, labels: Labels, report: Callable[[str, str], None]) -> list[Sentence]:
    """Reads words with labels of a model, see `read_sentences`.

    Args:
        data: Files.
        labels: Labels of the model.
        report: Takes the location and the error of each sentence, "" if it is valid.

    Returns:
        The valid sentences, with the names of the model as labels.
    """
    sentences = []
    for sentence in read_sentences(data):
        parsed = [labels.find(tag) for tag in sentence.tags]
        error = next((reason for _, reason in parsed if reason), "")
        report(sentence.location, error)
        if not error:
            sentences.append(sentence._replace(tags=[labels.names[numbers[0]] for numbers, _ in parsed]))
    return sentences


def spans(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Returns the entities of labelled words, as conlleval and seqeval count them.

    Args:
        tags: Labels of words in the scheme BIO, BIOES or BILOU, such as B-PER; "O": none.

    Returns:
        {(first word, word after the last one, type)}.
    """
    entities, start, kind = set(), 0, ""
    for i, tag in enumerate([*tags, "O"]):
        place, name = ("O", "") if tag == "O" else (tag[0], tag[2:]) if _PLACED.match(tag) else ("I", tag)
        if kind and (place in "OBSU" or name != kind):
            entities.add((start, i, kind))
            kind = ""
        if name and not kind:
            start, kind = i, name
        if place in "ESLU":
            entities.add((start, i + 1, kind))
            kind = ""
    return entities


def reporter(pipeline: Any, on_error: str) -> tuple[Callable[[str, str], None], Counter[str]]:
    """Returns a function that counts and logs invalid rows, and the counts.

    Args:
        pipeline: Pipeline that logs.
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.
    """
    errors: Counter[str] = Counter()
    return lambda location, error: pipeline.report_errors([(location, error)], errors, on_error), errors
