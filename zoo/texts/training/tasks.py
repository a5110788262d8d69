"""Fine-tuning of text classifiers and token classifiers: their labelled data, and their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.texts.data import text_files
from zoo.texts.data.tokenizer import Tokenizer
from zoo.texts.heads import labelled
from zoo.texts.heads.sequence_classification import NONE, SIGMOID, SequenceClassification
from zoo.texts.heads.token_classification import TokenClassification, word_of_token
from zoo.texts.heads.zero_shot import ZeroShot
from zoo.texts.models.head import Head

IGNORED = -100  # label of tokens that have none
Labels = NDArray[np.float32]


class Task(Protocol):
    """How a head is trained."""

    def read(self, data: Any, columns: Sequence[str], on_error: str) -> tuple[list[Any], Labels]:
        """Returns labelled samples.

        Args:
            data: Files.
            columns: Columns of tables; (): the usual names.
            on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

        Raises:
            RequestError: A row is invalid, or there are no valid rows.
        """

    def labels_of(self, data: Any, columns: Sequence[str]) -> list[str]:
        """Returns the labels of data, sorted; "O" is the first one.

        Args:
            data: Files.
            columns: Columns of tables; (): the usual names.
        """

    def texts(self, samples: Sequence[Any]) -> list[Any]:
        """Returns what the tokenizer takes of samples.

        Args:
            samples: Samples of `read`.
        """

    def loss(self, logits: torch.Tensor, samples: Sequence[Any], labels: Labels, tokenizer: Tokenizer) -> torch.Tensor:
        """Returns the loss of a batch.

        Args:
            logits: Output of the network.
            samples: Samples of `read`.
            labels: Their labels.
            tokenizer: Tokenizer of the network.
        """


def task_of(head: Head | None, features: Mapping[str, Any]) -> Task | None:
    """Returns how a head is trained; None for heads that score pairs, and for sentence encoders.

    Args:
        head: Head of the network.
        features: Preprocessing of its card.

    Raises:
        RequestError: Networks with this head are not trained here.
    """
    if type(head) is SequenceClassification:
        return _Classification(features)
    if isinstance(head, TokenClassification):
        return _Tagging(features)
    if head is not None and (head.HAS_LAYERS or isinstance(head, ZeroShot)):
        raise RequestError(
            f"found a {head.TITLE}, which is not fine-tuned here; expected a sentence encoder, cross-encoder, text "
            "classifier or token classifier"
        )
    return None


def _require(samples: Sequence[Any], errors: Sequence[str], data: Any, expected: str) -> None:
    """Raises RequestError without valid samples."""
    if not samples:
        first = f" ({errors[0]})" if errors else ""
        raise RequestError(f"found no labels in {text_files.describe(data)}{first}; expected {expected}")


def _reporter(errors: list[str], on_error: str) -> Any:
    """Returns a function that gathers errors, or raises the first one."""

    def report(location: str, error: str) -> None:
        if error and on_error == "raise":
            raise RequestError(f"{location} {error}")
        errors.extend([f"{location} {error}"] * bool(error))

    return report


class _Classification:
    """Cross entropy of one label a text, binary cross entropy of several, or the squared error of a number."""

    def __init__(self, features: Mapping[str, Any]) -> None:
        self.names, self.function = list(features["names"]), features["function_to_apply"]

    def read(self, data: Any, columns: Sequence[str], on_error: str) -> tuple[list[Any], Labels]:
        errors: list[str] = []
        report = _reporter(errors, on_error)
        texts: list[Any] = []
        if self.function == NONE:
            numbers = []
            for row in text_files.read_rows(data, max(len(columns) - 1, 1), columns, extra=1):
                number, error = text_files.parse_label(row)
                report(row.location, error)
                if not error:
                    texts.append(row.texts[:-1])
                    numbers.append([number])
            _require(texts, errors, data, "a text and a number a row")
            return self._plain(texts), np.array(numbers, np.float32)
        texts, found = labelled.read_texts(data, labelled.Labels(self.names), columns, report)
        labels = np.zeros((len(texts), len(self.names)), np.float32)
        for i, several in enumerate(found):
            if self.function != SIGMOID and len(several) != 1:
                raise RequestError(f"found {len(several)} labels of text {i + 1}; expected one, as the model's softmax")
            labels[i, several] = 1
        return self._plain(texts), labels

    def labels_of(self, data: Any, columns: Sequence[str]) -> list[str]:
        if self.function == NONE:
            raise RequestError("found new_labels of a regression, whose labels are numbers; leave it out")
        rows = text_files.read_rows(data, max(len(columns) - 1, 1), columns, extra=1)
        found = [row.texts[-1] for row in rows if not row.error]
        several = self.function == SIGMOID
        return sorted({name.strip() for label in found for name in (labelled.parts(label) if several else [label])})

    def _plain(self, texts: Sequence[tuple[str, ...]]) -> list[Any]:
        return [each[0] if len(each) == 1 else each for each in texts]

    def texts(self, samples: Sequence[Any]) -> list[Any]:
        return list(samples)

    def loss(self, logits: torch.Tensor, samples: Sequence[Any], labels: Labels, tokenizer: Tokenizer) -> torch.Tensor:
        target = torch.from_numpy(labels)
        if self.function == NONE:
            return F.mse_loss(logits, target)
        if self.function == SIGMOID:
            return F.binary_cross_entropy_with_logits(logits, target)
        return F.cross_entropy(logits, target.argmax(dim=1))


class _Tagging:
    """Cross entropy of the first token of every word."""

    def labels_of(self, data: Any, columns: Sequence[str]) -> list[str]:
        found = {tag for sentence in labelled.read_sentences(data) for tag in sentence.tags}
        return sorted(found, key=lambda tag: (tag != "O", tag))

    def __init__(self, features: Mapping[str, Any]) -> None:
        self.names = list(features["names"])

    def read(self, data: Any, columns: Sequence[str], on_error: str) -> tuple[list[Any], Labels]:
        errors: list[str] = []
        sentences = labelled.tagged(data, labelled.Labels(self.names), _reporter(errors, on_error))
        _require(sentences, errors, data, "words with labels: CoNLL, .jsonl or .parquet")
        return [(each.words, each.tags) for each in sentences], np.zeros(len(sentences), np.float32)

    def texts(self, samples: Sequence[Any]) -> list[Any]:
        return [" ".join(words) for words, _ in samples]

    def loss(self, logits: torch.Tensor, samples: Sequence[Any], labels: Labels, tokenizer: Tokenizer) -> torch.Tensor:
        target = torch.full(logits.shape[:2], IGNORED)
        number = {name: i for i, name in enumerate(self.names)}
        for row, ((words, tags), encoding) in enumerate(
            zip(samples, tokenizer(self.texts(samples)).context, strict=True)
        ):
            for token, word in word_of_token(words, encoding).items():
                target[row, token] = number[tags[word]]
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
