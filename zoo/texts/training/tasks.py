"""Training tasks of text networks with heads: their data, the inputs of a batch, and the loss."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.texts.data import text_files
from zoo.texts.data.tokenizer import Tokenizer, Tokens
from zoo.texts.heads import labelled
from zoo.texts.heads.sequence_classification import NONE, SIGMOID
from zoo.texts.train_config import TrainConfig

IGNORED = -100  # target of tokens that have none


class Examples(NamedTuple):
    """Samples of a batch as the network sees them.

    Attributes:
        tokens: Tokens.
        targets: What the loss compares with: float32 or int64, its first axis the samples.
    """

    tokens: Tokens
    targets: NDArray[Any]


class Task(abc.ABC):
    """Training of a head.

    Attributes:
        HAS_NAMES: Whether the outputs have names, which are the labels of the data.
    """

    HAS_NAMES: ClassVar[bool] = True

    def __init__(self, features: Mapping[str, Any], config: TrainConfig) -> None:
        """Opens a task.

        Args:
            features: Preprocessing of the model's card.
            config: Training configuration.
        """
        self.features, self.config = features, config
        self.names = list(features.get("names", []))
        self.columns = [name for name in config.columns.split(",") if name]

    @abc.abstractmethod
    def read(self, data: Any, on_error: str) -> list[Any]:
        """Returns the samples of data; they are JSON values.

        Args:
            data: Files.
            on_error: "raise" to stop at the first invalid row, "skip" to leave it out.

        Raises:
            RequestError: A row is invalid, or there are no valid rows.
        """

    def labels_of(self, data: Any) -> list[str]:
        """Returns the labels of data, in the order of the outputs.

        Args:
            data: Files.

        Raises:
            RequestError: The outputs have no names.
        """
        raise RequestError("found new_labels of a model whose outputs have no names; leave it out")

    @abc.abstractmethod
    def examples(self, samples: Sequence[Any], tokenizer: Tokenizer, rng: np.random.Generator) -> Examples:
        """Tokenizes samples.

        Args:
            samples: Samples of `read`.
            tokenizer: Tokenizer of the network.
            rng: Random numbers of the batch.
        """

    @abc.abstractmethod
    def loss(self, output: Any, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a batch.

        Args:
            output: Output of the network of transformers.
            targets: Those of `examples`.
            mask: Attention mask, int64 [samples, tokens].
        """

    def texts(self, samples: Sequence[Any]) -> list[Any]:
        """Returns the texts, or pairs of texts, of samples, as the calibration tokenizes them.

        Args:
            samples: Samples of `read`.
        """
        return [sample[0] for sample in samples]


def require(samples: Sequence[Any], errors: Sequence[str], data: Any, expected: str) -> None:
    """Checks that there are valid samples.

    Args:
        samples: The samples.
        errors: Errors of the others.
        data: Files, for the message.
        expected: What they should have.

    Raises:
        RequestError: There are none.
    """
    if not samples:
        first = f" ({errors[0]})" if errors else ""
        raise RequestError(f"found no samples in {text_files.describe(data)}{first}; expected {expected}")


def reporter(errors: list[str], on_error: str) -> Any:
    """Returns a function that gathers the errors of rows, or raises the first one.

    Args:
        errors: List that it appends to.
        on_error: "raise" or "skip".
    """

    def report(location: str, error: str) -> None:
        if error and on_error == "raise":
            raise RequestError(f"{location} {error}")
        errors.extend([f"{location} {error}"] * bool(error))

    return report


class Classification(Task):
    """Cross entropy of one label a text, binary cross entropy of several, or the squared error of a number.

    Samples are (text, labels): numbers of the labels, or the number of a regression; the text may be a pair.
    """

    TEXTS: ClassVar[int] = 1  # texts of a row without `columns`

    @property
    def function(self) -> str:
        """What the pipeline applies to the logits."""
        return str(self.features["function_to_apply"])

    def read(self, data: Any, on_error: str) -> list[Any]:
        """See `Task`."""
        errors: list[str] = []
        report = reporter(errors, on_error)
        samples: list[Any] = []
        if self.function == NONE:
            for row in self._rows(data):
                number, error = text_files.parse_label(row)
                report(row.location, error)
                if not error:
                    samples.append((_plain(row.texts[:-1]), [number]))
            require(samples, errors, data, "a text and a number a row")
            return samples
        names = labelled.Labels(self.names)
        for row in self._rows(data):
            numbers, error = ([], row.error) if row.error else names.find(row.texts[-1])
            if not error and self.function != SIGMOID and len(numbers) != 1:
                error = f"has {len(numbers)} labels, expected one, as the model's softmax"
            report(row.location, error)
            if not error:
                samples.append((_plain(row.texts[:-1]), numbers))
        require(samples, errors, data, "a label behind the text" if self.TEXTS == 1 else "two texts and a label")
        return samples

    def labels_of(self, data: Any) -> list[str]:
        """See `Task`."""
        if self.function == NONE:
            raise RequestError("found new_labels of a regression, whose labels are numbers; leave it out")
        texts = [row.texts[-1] for row in self._rows(data) if not row.error]
        several = self.function == SIGMOID
        names = {name.strip() for label in texts for name in (labelled.parts(label) if several else [label])}
        return sorted(names, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))

    def _rows(self, data: Any) -> Any:
        return text_files.read_rows(data, max(len(self.columns) - 1, self.TEXTS), self.columns, extra=1)

    def examples(self, samples: Sequence[Any], tokenizer: Tokenizer, rng: np.random.Generator) -> Examples:
        """See `Task`."""
        tokens = tokenizer(self.texts(samples))
        if self.function == NONE:
            return Examples(tokens, np.array([numbers for _, numbers in samples], np.float32))
        targets = np.zeros((len(samples), len(self.names)), np.float32)
        for row, (_, numbers) in zip(targets, samples, strict=True):
            row[numbers] = 1
        return Examples(tokens, targets)

    def loss(self, output: Any, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See `Task`."""
        if self.function == NONE:
            return F.mse_loss(output.logits, targets)
        if self.function == SIGMOID:
            return F.binary_cross_entropy_with_logits(output.logits, targets)
        return F.cross_entropy(output.logits, targets.argmax(dim=1))


class Inference(Classification):
    """Natural language inference by zero-shot classifiers: a premise, a hypothesis, and the label of the pair."""

    TEXTS: ClassVar[int] = 2


def _plain(texts: Sequence[str]) -> str | tuple[str, ...]:
    return texts[0] if len(texts) == 1 else tuple(texts)


class Tagging(Task):
    """Cross entropy of the first tokens of words, or of all tokens.

    Samples are the fields of a `labelled.Sentence`.
    """

    def labels_of(self, data: Any) -> list[str]:
        """See `Task`: "O" is the first one; a label that begins words has one that continues them."""
        tags = {tag for sentence in labelled.read_sentences(data) for tag in sentence.tags}
        if self.config.label_all_tokens:
            tags |= {_continued(tag) for tag in tags}
        return sorted(tags, key=lambda tag: (tag != "O", tag))

    def read(self, data: Any, on_error: str) -> list[Any]:
        """See `Task`."""
        errors: list[str] = []
        sentences = labelled.tagged(data, labelled.Labels(self.names), reporter(errors, on_error))
        require(sentences, errors, data, "words with labels: CoNLL, .jsonl or .parquet")
        return [sentence._replace(location="") for sentence in sentences]

    def texts(self, samples: Sequence[Any]) -> list[Any]:
        """See `Task`."""
        return [sentence.text for sentence in samples]

    def examples(self, samples: Sequence[Any], tokenizer: Tokenizer, rng: np.random.Generator) -> Examples:
        """See `Task`."""
        tokens = tokenizer(self.texts(samples), offsets=True)
        number = {name: i for i, name in enumerate(self.names)}
        targets = np.full((len(samples), int(tokens.lengths.max(initial=1))), IGNORED, np.int64)
        for row, sentence, encoding in zip(targets, samples, tokens.context, strict=True):
            if self.config.label_all_tokens:  # whitespace, too
                row[[i for i, special in enumerate(encoding.special_tokens_mask) if not special]] = number["O"]
                words = sentence.tokens(encoding)
                for token, word in words.items():
                    row[token] = number[_continued(sentence.tags[word])]
                for (token, word), (following, other) in itertools.pairwise(words.items()):
                    if sentence.tags[other] == (tag := _continued(sentence.tags[word])):  # blanks within an entity
                        row[token + 1 : following] = number[tag]
            for token, word in sentence.first_tokens(encoding).items():
                row[token] = number[sentence.tags[word]]
        return Examples(tokens, targets)

    def loss(self, output: Any, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See `Task`."""
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _continued(tag: str) -> str:
    """Returns the label of a token within a word of a label."""
    return f"I-{tag[2:]}" if tag.startswith("B-") else tag
