"""Training of masked language models and of extractive question answering, on one window of a long text a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from pipelines.core.errors import RequestError
from zoo.texts.data import text_files
from zoo.texts.data.tokenizer import Tokenizer, Tokens
from zoo.texts.heads import question_answering
from zoo.texts.heads.fill_mask import FillMask
from zoo.texts.heads.question_answering import QuestionAnswering
from zoo.texts.heads.sequence_classification import SequenceClassification
from zoo.texts.heads.token_classification import TokenClassification
from zoo.texts.heads.zero_shot import ZeroShot
from zoo.texts.models.head import Head
from zoo.texts.train_config import TrainConfig
from zoo.texts.training.tasks import IGNORED, Classification, Examples, Inference, Tagging, Task, reporter, require

MASKED, KEPT, RANDOM = 0.15, 0.1, 0.1  # shares of tokens, and of the masked ones (Devlin et al. 2019, "BERT")
ANSWERED = 0.5  # share of the windows that are chosen among those with the answer
LOWEST = -1e9  # logit of padding


class MaskedLanguage(Task):
    """Cross entropy of tokens that are masked, replaced by others, or kept."""

    HAS_NAMES: ClassVar[bool] = False

    def read(self, data: Any, on_error: str) -> list[Any]:
        """See `Task`: samples are texts."""
        errors: list[str] = []
        report = reporter(errors, on_error)
        samples: list[Any] = []
        for row in text_files.read_rows(data, 1, self.columns):
            error = row.error or ("" if row.texts[0].strip() else "has no text")
            report(row.location, error)
            if not error:
                samples.append(row.texts[0])
        require(samples, errors, data, "a text a row")
        return samples

    def texts(self, samples: Sequence[Any]) -> list[Any]:
        """See `Task`."""
        return list(samples)

    def examples(self, samples: Sequence[Any], tokenizer: Tokenizer, rng: np.random.Generator) -> Examples:
        """See `Task`."""
        mask = tokenizer.number(self.features["mask"])
        if mask is None:
            raise RequestError("the tokenizer has no mask token; import the model again")
        chosen = [windows[rng.integers(len(windows))] for windows in tokenizer.windows(samples, 0)]
        tokens = Tokens.of(chosen, [False] * len(chosen))
        special = np.concatenate([np.array(encoding.special_tokens_mask, np.bool_) for encoding in chosen])
        masked = (rng.random(len(special)) < MASKED) & ~special
        what = rng.random(len(special))
        ids = np.where(masked & (what >= KEPT + RANDOM), mask, tokens.ids)
        others = rng.integers(0, tokenizer.size, len(special))
        ids = np.where(masked & (what < RANDOM), others, ids).astype(np.int32)
        flat = np.where(masked, tokens.ids, IGNORED).astype(np.float32)
        targets = tokens.spread(flat[:, None] - IGNORED)[..., 0].astype(np.int64) + IGNORED
        return Examples(tokens._replace(ids=ids), targets)

    def loss(self, output: Any, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See `Task`."""
        counted = targets != IGNORED
        return F.cross_entropy(output.logits[counted], targets[counted]) if counted.any() else output.logits.sum() * 0


class Answering(Task):
    """Cross entropy of the first and the last token of an answer; the first token of the text is no answer.

    Samples are (question, context, first character of the answer, character after it); -1 without an answer.
    """

    HAS_NAMES: ClassVar[bool] = False

    def read(self, data: Any, on_error: str) -> list[Any]:
        """See `Task`."""
        errors: list[str] = []
        report = reporter(errors, on_error)
        samples: list[Any] = []
        for location, question in question_answering.read_questions(data):
            span = question.span() if question else None
            error = 'is no {"question", "context", "answers"}' if question is None else ""
            report(location, error or ("has an answer that is not in the context" if span is None else ""))
            if question and span:
                samples.append((question.question, question.context, *span))
        require(samples, errors, data, "question, context and answers")
        return samples

    def texts(self, samples: Sequence[Any]) -> list[Any]:
        """See `Task`."""
        return [sample[:2] for sample in samples]

    def examples(self, samples: Sequence[Any], tokenizer: Tokenizer, rng: np.random.Generator) -> Examples:
        """See `Task`."""
        stride = tokenizer.max_length // 3  # as 128 of the usual 384
        windows = tokenizer.windows(self.texts(samples), stride, strategy="only_second")
        chosen, targets = [], np.zeros((len(samples), 2), np.int64)
        for row, group, (_, _, start, end) in zip(targets, windows, samples, strict=True):
            spans = [_span(encoding, start, end) for encoding in group]
            answered = [i for i, span in enumerate(spans) if span[1]]
            pick = answered if answered and rng.random() < ANSWERED else range(len(group))
            i = int(pick[rng.integers(len(pick))])
            chosen.append(group[i])
            row[:] = spans[i]
        return Examples(Tokens.of(chosen, [False] * len(chosen)), targets)

    def loss(self, output: Any, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See `Task`."""
        logits = [scores.masked_fill(mask == 0, LOWEST) for scores in (output.start_logits, output.end_logits)]
        losses = [F.cross_entropy(scores, targets[:, i]) for i, scores in enumerate(logits)]
        return torch.stack(losses).mean()


def _span(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """Returns the first and the last token of an answer in a window; (0, 0) if the window lacks a part of it."""
    inside = [
        i
        for i, (sequence, (first, last)) in enumerate(zip(encoding.sequence_ids, encoding.offsets, strict=True))
        if sequence == 1 and last > start and first < end and last > first
    ]
    if start < 0 or not inside:
        return 0, 0
    whole = encoding.offsets[inside[0]][0] <= start and encoding.offsets[inside[-1]][1] >= end
    return (inside[0], inside[-1]) if whole else (0, 0)


def task_of(head: Head | None, features: Mapping[str, Any], config: TrainConfig) -> Task | None:
    """Returns how a head is trained; None for heads that score pairs, and for sentence encoders.

    Args:
        head: Head of the network.
        features: Preprocessing of its card.
        config: Training configuration.

    Raises:
        RequestError: Networks with this head are not trained here.
    """
    tasks: dict[type[Head], type[Task]] = {
        SequenceClassification: Classification,
        ZeroShot: Inference,
        TokenClassification: Tagging,
        FillMask: MaskedLanguage,
        QuestionAnswering: Answering,
    }
    if head is None:
        return None
    if task := tasks.get(type(head)):
        return task(features, config)
    if head.HAS_LAYERS:
        raise RequestError(f"found a {head.TITLE}, which is not fine-tuned here; expected another text network")
    return None
