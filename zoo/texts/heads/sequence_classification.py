"""Sequence classification: labels of texts, and of pairs of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis.metrics import against_fp32
from pipelines.core.errors import RequestError
from zoo.texts import metrics
from zoo.texts.data import text_files
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.heads import labelled
from zoo.texts.heads.task_pipeline import CLASSIFIER, TaskPipeline
from zoo.texts.models.config import SCORES
from zoo.texts.models.head import Head, label_names
from zoo.texts.text_pipeline import Floats

SOFTMAX, SIGMOID, NONE = "softmax", "sigmoid", "none"
FUNCTIONS = (SOFTMAX, SIGMOID, NONE)
THRESHOLD = 0.5  # score from which on a label applies, of several
PROBLEMS = {  # problem_type of transformers
    "regression": NONE,
    "multi_label_classification": SIGMOID,
    "single_label_classification": SOFTMAX,
}


class SequenceClassification(Head):
    """Labels of a text or of a pair of texts."""

    FORMAT: ClassVar[str] = "text-classification"
    TITLE: ClassVar[str] = "text classifier"
    ENDS: ClassVar[tuple[str, ...]] = ("ForSequenceClassification",)
    MODEL: ClassVar[str] = "AutoModelForSequenceClassification"
    OUTPUT: ClassVar[str] = SCORES
    HAS_LAYERS: ClassVar[bool] = False

    def outputs(self, config: Mapping[str, Any]) -> int:
        """See `Head`."""
        return len(label_names(config))

    def features(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`: "names" of the labels, and "function_to_apply" to the logits."""
        return {"names": label_names(config), "function_to_apply": function_to_apply(config)}

    def pipeline(self) -> type[ClassificationPipeline]:
        """See `Head`."""
        return ClassificationPipeline

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Head`: accuracy and F1."""
        return evaluate(pipelines, data, on_error)


def function_to_apply(config: Mapping[str, Any]) -> str:
    """Returns the function of the logits, as transformers chooses it.

    Args:
        config: Content of config.json.

    Returns:
        "softmax", "sigmoid" or "none".

    Raises:
        RequestError: The problem type is unknown.
    """
    problem = config.get("problem_type")
    if problem is None:
        return SIGMOID if len(label_names(config)) == 1 else SOFTMAX
    if problem not in PROBLEMS:
        raise RequestError(f"its problem_type is {problem!r:.60}; supported: {', '.join(PROBLEMS)}")
    return SIGMOID if problem != "regression" and len(label_names(config)) == 1 else PROBLEMS[problem]


def activated(logits: Floats, function: str) -> Floats:
    """Applies the function of a model.

    Args:
        logits: float32 [n, labels].
        function: One of `FUNCTIONS`.

    Returns:
        Scores, float32 [n, labels].
    """
    if function == NONE:
        return logits
    if function == SIGMOID:
        with np.errstate(over="ignore"):
            return (1 / (1 + np.exp(-logits))).astype(np.float32)
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores: Floats = shifted / shifted.sum(axis=-1, keepdims=True)
    return scores


class ClassificationPipeline(TaskPipeline):
    """Computes labels of texts, or of pairs of texts; see `zoo.pipeline`.

    Attributes:
        top_k: Number of labels of a result; 0: the best one, without a list; -1: all.
        function: Function of the logits, one of `FUNCTIONS`; "": that of the model.
    """

    OUTPUT: ClassVar[str] = SCORES
    COLUMNS: ClassVar[Mapping[str, Any]] = {"label": str, "score": np.float32}
    API_KIND: ClassVar[str] = CLASSIFIER
    top_k: int = 0
    function: str = ""

    def __call__(  # type: ignore[override]
        self,
        raw: Any,
        *,
        top_k: int | None = 0,
        function_to_apply: str | None = None,
        max_length: int | None = None,
        on_error: str = "raise",
    ) -> list[Any]:
        """Classifies texts, or pairs of texts.

        Args:
            raw: Texts; pairs as tuples or as {"text", "text_pair"}; or one of them. Only a `Path` names a file.
            top_k: Number of labels a text, best first; None: all labels. Without it the result is one dict.
            function_to_apply: "softmax", "sigmoid" or "none"; None: that of the model.
            max_length: Maximum number of tokens of a text; None for that of the model.
            on_error: "raise" at the first invalid text, or "skip" to return its error.

        Returns:
            {"label", "score"} of each text; with `top_k` a list of them.

        Raises:
            RequestError: There are no valid texts, or an option is out of range.
        """
        configured = self.with_options(top_k=top_k, function_to_apply=function_to_apply, max_length=max_length)
        return super(ClassificationPipeline, configured).__call__(raw, on_error=on_error)

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        top_k: int = 1,
        function_to_apply: str | None = None,
        max_length: int | None = None,
    ) -> dict[str, Any]:
        """Classifies texts in constant memory and input order.

        Writes the columns row (from 1), label and score, a line for each of the `top_k` labels. The line of a row
        that is no text has neither label nor score.

        Args:
            inputs: Text files with one text per line, tables, or "-" for stdin.
            output: .csv, .csv.gz, .jsonl or .parquet file; "-" for CSV on stdout.
            on_error: "raise" to stop at the first invalid row, "skip" to write it without a label.
            column: Column of the texts in tables, or two separated by a comma for pairs.
            top_k: Number of labels a text, best first; 0 for all.
            function_to_apply: "softmax", "sigmoid" or "none"; None: that of the model.
            max_length: Maximum number of tokens of a text; None for that of the model.

        Returns:
            Summary, as `SentencePipeline.run`.

        Raises:
            RequestError: The input is unusable.
        """
        configured = self.with_options(top_k=top_k or None, function_to_apply=function_to_apply, max_length=max_length)
        return configured._run(inputs, output, on_error, self.parse_columns(column), None, max_length)

    def with_options(
        self, *, top_k: int | None = 0, function_to_apply: str | None = None, max_length: int | None = None
    ) -> Self:
        """See `TaskPipeline`.

        Args:
            top_k: See `__call__`.
            function_to_apply: See `__call__`.
            max_length: See `__call__`.
        """
        if top_k is not None and (type(top_k) is not int or top_k < 0):
            raise RequestError(f"found top_k {top_k!r:.40}; expected a whole number from 1, or none for all labels")
        if function_to_apply is not None and function_to_apply not in FUNCTIONS:
            raise RequestError(f"found function_to_apply {function_to_apply!r:.40}; expected {', '.join(FUNCTIONS)}")
        return self.configured(
            max_length=max_length, top_k=-1 if top_k is None else top_k, function=function_to_apply or ""
        )

    def parse_columns(self, option: str | None) -> list[str]:
        """See `TextPipeline.parse_columns`: one column, or two of pairs."""
        names = [name.strip() for name in (option or "").split(",") if name.strip()]
        if len(names) > 2:
            raise RequestError(f"found {len(names)} columns in --column {option}; expected one, or two of pairs")
        return names

    def rows(self, data: Any, columns: Sequence[str] = (), *, names: bool = True) -> Iterator[text_files.Row]:
        """See `TextPipeline.rows`: rows of one text, or of two with two columns or with pairs in a list."""
        columns = columns or self.columns
        if isinstance(data, list) and any(isinstance(item, tuple | dict) for item in data):
            for i, item in enumerate(data, 1):
                texts = pair_of(item) if isinstance(item, dict) else (item,) if isinstance(item, str) else item
                for row in text_files.read_rows([texts], len(texts), names=False):
                    yield row._replace(location=f"text {i}")
            return
        yield from text_files.read_rows(data, 2 if len(columns) == 2 else 1, columns, names=names)

    def _as_list(self, raw: Any) -> Any:
        """Wraps a single text or pair in a list."""
        is_pair = isinstance(raw, tuple) and len(raw) == 2 and all(isinstance(text, str) for text in raw)
        return [raw] if is_pair or isinstance(raw, dict) else super()._as_list(raw)

    def scores(self, outputs: Floats) -> Floats:
        """Applies the function of the call, or of the model, to logits.

        Args:
            outputs: float32 [n, labels].

        Returns:
            float32 [n, labels].
        """
        return activated(outputs, self.function or self.folder.preprocessing["function_to_apply"])

    def decode(self, outputs: Floats, tokens: Tokens) -> list[Any]:
        """See `TaskPipeline.decode`."""
        names, scores = self.names, self.scores(outputs)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self.top_k if self.top_k > 0 else None]
        ranked = [
            [{"label": names[i], "score": float(row[i])} for i in best] for row, best in zip(scores, order, strict=True)
        ]
        return ranked if self.top_k else [labels[0] for labels in ranked]


def pair_of(item: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the text, or the pair of texts, of a dict as transformers takes it.

    Args:
        item: {"text"} or {"text", "text_pair"}.

    Raises:
        RequestError: It has other keys, or values that are no texts.
    """
    texts = tuple(item[key] for key in ("text", "text_pair") if item.get(key) is not None)
    if not texts or set(item) - {"text", "text_pair"} or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"found {item!r:.80}; expected the keys text and text_pair")
    return texts


def evaluate(pipelines: Mapping[str, ClassificationPipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Compares the labels of several precisions with fp32 on the same labelled texts.

    Metrics of one label a text are accuracy and the mean of F1 over the classes (macro F1). With several labels a text
    (sigmoid) accuracy is the share of texts whose labels are all right, and F1 counts all labels together (micro F1).
    Of a regression the metrics are Spearman's and Pearson's correlation, and the mean squared error.

    Args:
        pipelines: Pipelines by precision, fp32 first.
        data: Files with a text and a label: a name of the model, its number, or several of them.
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

    Returns:
        {"samples", "skipped", "metrics", "difference", "interval", "others"} (see `against_fp32`); "difference" has
        "agreement", the share of texts with the labels of fp32.

    Raises:
        RequestError: The data are unusable.
    """
    first = next(iter(pipelines.values()))
    if first.folder.preprocessing["function_to_apply"] == NONE and len(first.names) == 1:
        return _evaluate_regression(pipelines, data, on_error)
    report, errors = labelled.reporter(first, on_error)
    texts, labels = labelled.read_texts(data, labelled.Labels(first.names), first.columns, report)
    expected = np.zeros((len(texts), len(first.names)), np.bool_)
    for i, numbers in enumerate(labels):
        expected[i, numbers] = True
    several = first.folder.preprocessing["function_to_apply"] == SIGMOID
    masks: dict[str, NDArray[np.bool_]] = {}
    for name, pipeline in pipelines.items():
        scores = pipeline.scores(pipeline.compute_texts(texts))
        masks[name] = scores > THRESHOLD if several else np.eye(len(first.names), dtype=np.bool_)[scores.argmax(axis=1)]

    compared = labelled.compare_classes(masks, expected, several)
    return {"samples": len(texts), "skipped": errors.total(), **compared}


def _evaluate_regression(pipelines: Mapping[str, ClassificationPipeline], data: Any, on_error: str) -> dict[str, Any]:
    """Evaluates correlations of the scores with numbers, and the mean squared error."""
    first = next(iter(pipelines.values()))
    report, errors = labelled.reporter(first, on_error)
    texts, numbers = [], []
    for row in text_files.read_rows(data, max(len(first.columns) - 1, 1), first.columns, extra=1):
        number, error = text_files.parse_label(row)
        report(row.location, error)
        if not error:
            texts.append(row.texts[:-1])
            numbers.append(number)
    if len(texts) < 2 or np.ptp(numbers) == 0:
        raise RequestError(f"found {len(texts)} texts, expected several with different numbers: text TAB number")
    scores = {name: pipeline.compute_texts(texts)[:, 0] for name, pipeline in pipelines.items()}
    expected = np.array(numbers)
    measured = {
        name: {
            "spearman": metrics.spearman(predicted, expected),
            "pearson": metrics.pearson(predicted, expected),
            "mse": float(np.mean((predicted - expected) ** 2)),
        }
        for name, predicted in scores.items()
    }
    compared = against_fp32(
        measured,
        dict,
        lambda before, after: {"difference": {key: after[key] - before[key] for key in before}},
    )
    return {"samples": len(texts), "skipped": errors.total(), **compared}


HEAD = SequenceClassification()
