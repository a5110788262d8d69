"""Token classification: entities of texts with their character offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from pipelines.core.errors import RequestError
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.heads import labelled
from zoo.texts.heads.entities import STRATEGIES, Piece, aggregate, merge_windows
from zoo.texts.heads.sequence_classification import SOFTMAX, activated
from zoo.texts.heads.task_pipeline import TaskPipeline, as_names
from zoo.texts.models.config import LOGITS
from zoo.texts.models.head import TokenHead, label_names, special_token
from zoo.texts.text_pipeline import SORT_WINDOW, Floats

OUTSIDE = "O"  # label of blanks that are tokens, in the training of some models: they do not divide an entity


class TokenClassification(TokenHead):
    """Labels of tokens."""

    FORMAT: ClassVar[str] = "token-classification"
    TITLE: ClassVar[str] = "token classifier"
    ENDS: ClassVar[tuple[str, ...]] = ("ForTokenClassification",)
    MODEL: ClassVar[str] = "AutoModelForTokenClassification"

    def outputs(self, config: Mapping[str, Any]) -> int:
        """See `Head`."""
        return len(label_names(config))

    def features(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`: "names" of the labels, and "unknown", the unknown token."""
        return {"names": label_names(config), "unknown": special_token(network, "unk_token")}

    def pipeline(self) -> type[EntityPipeline]:
        """See `Head`."""
        return EntityPipeline

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Head`: F1 of entities, and accuracy of words."""
        return evaluate(pipelines, data, on_error)


class EntityPipeline(TaskPipeline):
    """Finds entities in texts; see `zoo.pipeline`.

    Attributes:
        strategy: Aggregation strategy, one of `STRATEGIES`.
        ignored: Labels that are left out.
        stride: Tokens that the windows of a long text share; None: a long text is truncated.
    """

    OUTPUT: ClassVar[str] = LOGITS
    PER_TOKEN: ClassVar[bool] = True
    COLUMNS: ClassVar[Mapping[str, Any]] = {
        "entity_group": str,
        "score": np.float32,
        "word": str,
        "start": np.int64,
        "end": np.int64,
    }
    strategy: str = "none"
    ignored: Sequence[str] = ("O",)
    stride: int | None = None

    def __call__(  # type: ignore[override]
        self,
        raw: Any,
        *,
        aggregation_strategy: str = "none",
        ignore_labels: Sequence[str] = ("O",),
        stride: int | None = None,
        max_length: int | None = None,
        on_error: str = "raise",
    ) -> list[Any]:
        """Finds entities in texts.

        Args:
            raw: Texts, or one text. Only a `Path` names a file.
            aggregation_strategy: "none", "simple", "first", "average" or "max", see
                `zoo.texts.heads.entities.aggregate`.
            ignore_labels: Labels that are left out.
            stride: Tokens that the windows of a text over the token limit share; None: such a text is truncated.
            max_length: Maximum number of tokens of a text or window; None for that of the model.
            on_error: "raise" at the first invalid text, or "skip" to return its error.

        Returns:
            List of entities of each text: {"entity", "score", "index", "word", "start", "end"} of tokens, otherwise
            {"entity_group", "score", "word", "start", "end"}.

        Raises:
            RequestError: There are no valid texts, or an option is out of range.
        """
        configured = self.with_options(
            aggregation_strategy=aggregation_strategy, ignore_labels=ignore_labels, stride=stride, max_length=max_length
        )
        return super(EntityPipeline, configured).__call__(raw, on_error=on_error)

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        aggregation_strategy: str = "simple",
        stride: int | None = None,
        max_length: int | None = None,
    ) -> dict[str, Any]:
        """Finds entities in texts, in constant memory and input order.

        Writes the columns row (from 1), entity_group, score, word, start and end, a line for each entity. A row without
        entities has no line; the line of a row that is no text is empty.

        Args:
            inputs: Text files with one text per line, tables, or "-" for stdin.
            output: .csv, .csv.gz, .jsonl or .parquet file; "-" for CSV on stdout.
            on_error: "raise" to stop at the first invalid row, "skip" to write an empty line for it.
            column: Column of the texts in tables.
            aggregation_strategy: See `__call__`.
            stride: See `__call__`.
            max_length: Maximum number of tokens of a text or window; None for that of the model.

        Returns:
            Summary, as `SentencePipeline.run`.

        Raises:
            RequestError: The input is unusable.
        """
        configured = self.with_options(aggregation_strategy=aggregation_strategy, stride=stride, max_length=max_length)
        return configured._run(inputs, output, on_error, self.parse_columns(column), None, max_length)

    def with_options(
        self,
        *,
        aggregation_strategy: str = "none",
        ignore_labels: Sequence[str] = ("O",),
        stride: int | None = None,
        max_length: int | None = None,
    ) -> Self:
        """See `TaskPipeline`.

        Args:
            aggregation_strategy: See `__call__`.
            ignore_labels: See `__call__`.
            stride: See `__call__`.
            max_length: See `__call__`.
        """
        strategy, ignored = aggregation_strategy, as_names("ignore_labels", ignore_labels)
        if strategy not in STRATEGIES:
            raise RequestError(f"found aggregation_strategy {strategy!r:.40}; expected {', '.join(STRATEGIES)}")
        if stride is not None and strategy == "none":
            raise RequestError("found a stride without aggregation_strategy; windows merge only entities")
        if not all(isinstance(label, str) for label in ignored):
            raise RequestError(f"found ignore_labels {ignored!r:.40}; expected a list of labels")
        return self.configured(max_length=max_length, strategy=strategy, stride=stride, ignored=tuple(ignored))

    def tokenize(
        self, rows: Sequence[tuple[str, ...]], prompt: str | None = None, max_length: int | None = None
    ) -> Tokens:
        """See `TextPipeline.tokenize`; the context has the text and the encodings of its windows."""
        texts = [row[0] for row in rows]
        if self.stride is None:
            tokens = self.tokenizer(texts, max_length, offsets=True)
            return tokens._replace(
                context=[(text, [encoding]) for text, encoding in zip(texts, tokens.context, strict=True)]
            )
        windows = self.tokenizer.windows(texts, self.stride, max_length)
        encodings = [encoding for group in windows for encoding in group]
        return Tokens.of(encodings, [False] * len(encodings), list(zip(texts, windows, strict=True)))

    def decode(self, outputs: Floats, tokens: Tokens) -> list[Any]:
        """See `TaskPipeline.decode`."""
        scores, start = activated(outputs, SOFTMAX), 0
        preprocessing = self.folder.preprocessing
        unknown = self.tokenizer.number(preprocessing.get("unknown", ""))
        drops_blanks = self.strategy != "none" and preprocessing.get("blanks") == OUTSIDE
        results = []
        for text, windows in tokens.context:
            entities = []
            for encoding in windows:
                count = len(encoding.ids)
                pieces = self._pieces(text, encoding, scores[start : start + count], unknown)
                if drops_blanks:
                    pieces = [piece for piece in pieces if piece.end > piece.start]
                entities += aggregate(pieces, self.names, self.strategy, self.tokenizer.join)
                start += count
            entities = [
                entity for entity in entities if entity.get("entity", entity.get("entity_group")) not in self.ignored
            ]
            results.append(merge_windows(entities) if len(windows) > 1 else entities)
        return results

    def _pieces(self, text: str, encoding: Any, scores: Floats, unknown: int | None) -> list[Piece]:
        """Returns the tokens of a window without special tokens."""
        pieces = []
        for i, (number, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
            if encoding.special_tokens_mask[i]:
                continue
            word, original = self.tokenizer.token(number), text[start:end]
            if self.tokenizer.marks_subwords:
                is_subword = len(word) != len(original)
            else:
                is_subword = start > 0 and " " not in text[start - 1 : start + 1]
            if number == unknown:
                word, is_subword = original, False
            pieces.append(Piece(word, scores[i], start, end, i, is_subword))
        return pieces

    def tag(self, sentences: Sequence[labelled.Sentence]) -> list[list[str]]:
        """Labels words: a word has the label of its first token.

        Args:
            sentences: Words of texts; long texts are divided into windows.

        Returns:
            A label a word; "O" for a word without tokens.
        """
        texts = [sentence.text for sentence in sentences]
        tagged = [["O"] * len(sentence.words) for sentence in sentences]
        window = SORT_WINDOW * self.batch_size
        for start in range(0, len(texts), window):
            part = range(start, min(start + window, len(texts)))
            windows = self.tokenizer.windows([texts[i] for i in part], 0)
            encodings = [encoding for group in windows for encoding in group]
            outputs = self.compute(Tokens.of(encodings, [False] * len(encodings)))
            best, row = outputs.argmax(axis=1), 0
            for i, group in zip(part, windows, strict=True):
                seen: set[int] = set()
                for encoding in group:
                    for token, word in sentences[i].first_tokens(encoding).items():
                        if word not in seen:
                            seen.add(word)
                            tagged[i][word] = self.names[int(best[row + token])]
                    row += len(encoding.ids)
        return tagged

    def lines(self, result: Any) -> list[dict[str, Any]]:
        """See `TaskPipeline.lines`: the label of a token is its group."""
        return [{"entity_group": entity.get("entity"), **entity} for entity in result]


def evaluate(pipelines: Mapping[str, EntityPipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Compares the entities of several precisions with fp32 on the same words with labels.

    A word has the label of its first token. Metrics are F1 of whole entities, as conlleval and seqeval compute it, and
    the accuracy of words.

    Args:
        pipelines: Pipelines by precision, fp32 first.
        data: Words with labels (see `zoo.texts.heads.labelled.read_sentences`).
        on_error: "raise" at the first sentence with an unknown label, "skip" to leave it out.

    Returns:
        {"samples", "skipped", "metrics", "difference", "interval", "others"} (see `against_fp32`); "difference" has
        "agreement", the share of words with the label of fp32.

    Raises:
        RequestError: The data are unusable.
    """
    first = next(iter(pipelines.values()))
    report, errors = labelled.reporter(first, on_error)
    sentences = labelled.tagged(data, labelled.Labels(first.names), report)
    if not sentences:
        raise RequestError(f"found no words with labels in {data}; expected CoNLL, .jsonl or .parquet")
    predicted = {name: pipeline.tag(sentences) for name, pipeline in pipelines.items()}

    def measured(name: str) -> dict[str, labelled.Counts]:
        rows = []
        for sentence, tags in zip(sentences, predicted[name], strict=True):
            mine, theirs = labelled.spans(tags), labelled.spans(sentence.tags)
            right = sum(a == b for a, b in zip(tags, sentence.tags, strict=True))
            rows.append([len(mine & theirs), len(mine), len(theirs), right, len(tags)])
        counts = np.array(rows, np.float64)
        return {
            "f1": labelled.Counts(counts[:, :3], labelled.f1),
            "accuracy": labelled.Counts(counts[:, 3:], labelled.share),
        }

    words = {name: np.array([tag for tags in tagged for tag in tags]) for name, tagged in predicted.items()}
    compared = labelled.compare(
        {name: measured(name) for name in predicted},
        lambda name: {"agreement": float((words[name] == words["fp32"]).mean())},
    )
    return {"samples": len(sentences), "skipped": errors.total(), **compared}


HEAD = TokenClassification()
