"""Zero-shot classification with the candidate labels of a call, by a model of natural language inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.texts.data import text_files
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.heads import labelled
from zoo.texts.heads.sequence_classification import SOFTMAX, SequenceClassification, activated
from zoo.texts.heads.task_pipeline import TaskPipeline, as_names
from zoo.texts.models.config import SCORES
from zoo.texts.models.head import label_names
from zoo.texts.text_pipeline import SORT_WINDOW, Floats

TEMPLATE = "This example is {}."
EXAMPLE_LABELS = ("politics", "sports", "technology", "business")  # of calibration and benchmarks


class ZeroShot(SequenceClassification):
    """Labels of texts by the entailment of a hypothesis about each label (Yin et al. 2019)."""

    FORMAT: ClassVar[str] = "zero-shot-classification"
    TITLE: ClassVar[str] = "zero-shot classifier"

    def recognizes(self, path: Path, config: Mapping[str, Any]) -> bool:
        """See `Head`: one of several labels is entailment."""
        names = config.get("id2label")
        is_nli = isinstance(names, dict) and any(_is_entailment(str(name)) for name in names.values())
        return is_nli and super().recognizes(path, config)

    def features(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`: also "entailment", the number of this label."""
        names = label_names(config)
        numbers = [i for i, name in enumerate(names) if _is_entailment(name)]
        if not numbers or len(names) < 2:
            raise RequestError(f"its labels are {', '.join(names)}; expected entailment among them")
        return {**super().features(path, network, config), "entailment": numbers[0]}

    def pipeline(self) -> type[ZeroShotPipeline]:  # type: ignore[override]
        """See `Head`."""
        return ZeroShotPipeline

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Head`: accuracy and macro F1 of the labels of the data."""
        return evaluate(pipelines, data, on_error)


def _is_entailment(name: str) -> bool:
    return name.lower().startswith("entail")


class ZeroShotPipeline(TaskPipeline):
    """Computes labels that are named with each call; see `zoo.pipeline`.

    Attributes:
        labels: Labels to choose from.
        template: Hypothesis about a label, with {} in its place.
        multi_label: Whether labels are independent of each other.
    """

    OUTPUT: ClassVar[str] = SCORES
    COLUMNS: ClassVar[Mapping[str, Any]] = {"label": str, "score": np.float32}
    labels: Sequence[str] = EXAMPLE_LABELS
    template: str = TEMPLATE
    multi_label: bool = False

    def __call__(  # type: ignore[override]
        self,
        raw: Any,
        candidate_labels: str | Sequence[str] = (),
        *,
        hypothesis_template: str = TEMPLATE,
        multi_label: bool = False,
        on_error: str = "raise",
    ) -> list[Any]:
        """Classifies texts by labels of the call.

        Args:
            raw: Texts, or one text. Only a `Path` names a file.
            candidate_labels: Labels, as a list or separated by commas.
            hypothesis_template: Hypothesis about a label, with {} in its place.
            multi_label: Whether several labels may apply: each score is that of entailment against contradiction.
                Otherwise the scores of a text sum to 1.
            on_error: "raise" at the first invalid text, or "skip" to return its error.

        Returns:
            {"sequence", "labels", "scores"} of each text, the best label first.

        Raises:
            RequestError: There are no labels or no valid texts, or the template has no {}.
        """
        configured = self.with_options(
            candidate_labels=candidate_labels, hypothesis_template=hypothesis_template, multi_label=multi_label
        )
        return super(ZeroShotPipeline, configured).__call__(raw, on_error=on_error)

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        candidate_labels: str = "",
        hypothesis_template: str = TEMPLATE,
        multi_label: bool = False,
    ) -> dict[str, Any]:
        """Classifies texts in constant memory and input order.

        Writes the columns row (from 1), label and score, a line for each label, the best one first.

        Args:
            inputs: Text files with one text per line, tables, or "-" for stdin.
            output: .csv, .csv.gz, .jsonl or .parquet file; "-" for CSV on stdout.
            on_error: "raise" to stop at the first invalid row, "skip" to write an empty line for it.
            column: Column of the texts in tables.
            candidate_labels: Labels separated by commas.
            hypothesis_template: See `__call__`.
            multi_label: See `__call__`.

        Returns:
            Summary, as `SentencePipeline.run`.

        Raises:
            RequestError: There are no labels, or the input is unusable.
        """
        configured = self.with_options(
            candidate_labels=candidate_labels, hypothesis_template=hypothesis_template, multi_label=multi_label
        )
        return configured._run(inputs, output, on_error, self.parse_columns(column), None, None)

    def with_options(
        self,
        *,
        candidate_labels: str | Sequence[str] = (),
        hypothesis_template: str = TEMPLATE,
        multi_label: bool = False,
    ) -> Self:
        """See `TaskPipeline`.

        Args:
            candidate_labels: See `__call__`.
            hypothesis_template: See `__call__`.
            multi_label: See `__call__`.
        """
        labels = (
            candidate_labels.split(",")
            if isinstance(candidate_labels, str)
            else as_names("candidate_labels", candidate_labels)
        )
        labels = [label.strip() if isinstance(label, str) else label for label in labels]
        if not labels or not all(isinstance(label, str) and label for label in labels):
            raise RequestError(
                f"found the labels {candidate_labels!r:.60}; name those to choose from: candidate_labels, on the "
                "command line --candidate-labels sports,politics"
            )
        if not isinstance(hypothesis_template, str) or "{}" not in hypothesis_template:
            raise RequestError(f"found hypothesis_template {hypothesis_template!r:.60}; expected {{}} for the label")
        return self.configured(labels=labels, template=hypothesis_template, multi_label=bool(multi_label))

    def tokenize(
        self, rows: Sequence[tuple[str, ...]], prompt: str | None = None, max_length: int | None = None
    ) -> Tokens:
        """See `TextPipeline.tokenize`: a pair of each text and each hypothesis; the text alone is truncated."""
        pairs = [(row[0], self.template.replace("{}", label)) for row in rows for label in self.labels]
        windows = self.tokenizer.windows(pairs, 0, max_length, strategy="only_first") if pairs else []
        truncated = [len(group) > 1 for group in windows]
        return Tokens.of([group[0] for group in windows], truncated, [row[0] for row in rows])

    def decode(self, outputs: Floats, tokens: Tokens) -> list[Any]:
        """See `TaskPipeline.decode`."""
        entailment = int(self.folder.preprocessing["entailment"])
        logits = outputs.reshape(len(tokens.context), len(self.labels), -1)
        if self.multi_label or len(self.labels) == 1:
            contradiction = logits.shape[-1] - 1 if entailment == 0 else 0
            scores = activated(logits[..., [contradiction, entailment]], SOFTMAX)[..., 1]
        else:
            scores = activated(logits[..., entailment], SOFTMAX)
        return [
            {
                "sequence": text,
                "labels": [self.labels[i] for i in order],
                "scores": [float(row[i]) for i in order],
            }
            for text, row, order in zip(tokens.context, scores, _descending(scores), strict=True)
        ]

    def lines(self, result: Any) -> list[dict[str, Any]]:
        """See `TaskPipeline.lines`: a line a label."""
        return [
            {"label": label, "score": score} for label, score in zip(result["labels"], result["scores"], strict=True)
        ]


def _descending(scores: Floats) -> NDArray[np.int64]:
    """Returns the order of the scores of each row, the highest first."""
    order: NDArray[np.int64] = np.argsort(-scores, axis=-1, kind="stable")
    return order


def evaluate(pipelines: Mapping[str, ZeroShotPipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Compares the labels of several precisions with fp32 on the same labelled texts, by accuracy and macro F1.

    The labels to choose from are those of the data.

    Args:
        pipelines: Pipelines by precision, fp32 first.
        data: Files with a text and the name of a label.
        on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

    Returns:
        {"samples", "skipped", "metrics", "difference", "interval", "others"} (see `against_fp32`); "difference" has
        "agreement", the share of texts with the label of fp32.

    Raises:
        RequestError: The data are unusable.
    """
    first = next(iter(pipelines.values()))
    report, errors = labelled.reporter(first, on_error)
    texts: list[tuple[str, ...]] = []
    targets: list[str] = []
    for row in text_files.read_rows(data, 1, first.columns, extra=1):
        error = row.error or ("" if row.texts[-1].strip() else "has no label")
        report(row.location, error)
        if not error:
            texts.append(row.texts[:1])
            targets.append(row.texts[-1].strip())
    labels = list(dict.fromkeys(targets))
    if len(labels) < 2:
        raise RequestError(
            f"found {len(labels)} labels in {text_files.describe(data)}; expected several: text TAB label"
        )
    expected = np.array([[label == name for name in labels] for label in targets])
    predicted: dict[str, NDArray[np.bool_]] = {}
    for name, pipeline in pipelines.items():
        configured = pipeline.with_options(candidate_labels=labels)
        best: list[str] = []
        for i in range(0, len(texts), SORT_WINDOW):
            tokens = configured.tokenize(texts[i : i + SORT_WINDOW])
            best += [result["labels"][0] for result in configured.decode(configured.compute(tokens), tokens)]
        predicted[name] = np.array([[label == name for name in labels] for label in best])
    return {
        "samples": len(texts),
        "skipped": errors.total(),
        "labels": labels,
        **labelled.compare_classes(predicted, expected),
    }


HEAD = ZeroShot()
