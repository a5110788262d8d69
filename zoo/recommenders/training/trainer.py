"""A recommender's recipe and its steps: the loss, the priors, the average of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import distributed, nn
from torch.nn import functional

from pipelines.quantization.training import qat
from zoo.recommenders.models.layers import Embeddings, Scalars
from zoo.recommenders.training.row_store import Categories
from zoo.recommenders.training.sparse_adam import LazyRows
from zoo.training.runs import BELOW_1, FROM_0, SEED, SHARE, Processes, Range, require_settings

RANGES = {
    "seed": SEED,
    "dropout": BELOW_1,
    "ema": BELOW_1,
    "unknown": BELOW_1,
    "distillation": SHARE,
    **dict.fromkeys(("l2_embeddings", "l2_scalars", "l2_layers", "min_delta"), FROM_0),
}
LARGE = 2**17  # rows of tables beyond which a step changes those of its batch alone


@dataclass(frozen=True)
class TrainConfig:
    """The training recipe of recommenders.

    embedding_size: columns of a table. hidden: outputs of the layers. held_out: how many of the last rows (by the
    timestamp, where there is one) are held out, a count or a share below 1. min_delta: by how much their
    LogLoss, of logits shifted to their share of clicks, must fall below the best one's to make an epoch the best.
    patience: epochs without a new best that end the search. refit: train once more from the start on all rows, for as
    many epochs as were best.
    ema: momentum of the average of the weights over training steps; the average is what is evaluated and kept. l2_*:
    weigh the squared distance of all entries of tables, of first-order weights and of layers from 0 (in fine-tuning:
    from the starting weights) against the *sum* of the rows' losses, as a Gaussian prior does, so that they hold for
    any number of rows; of several l2_embeddings the search tries one after the other while the held-out rows say that
    it helps: the sparser the categories, the more. unknown: the least share of each column's categories that training
    replaces by the unknown one, which stands for all that were rarer than min_count and for those to come; a column
    with more new values than that among the held-out rows, such as users where new ones keep coming, has as many
    replaced. qat: fine-tune with the rounding of int8 (`zoo.recommenders.training.qat`), whose ranges the model then
    keeps: in one
    process, at a tenth of the learning rate. teacher: a model whose probabilities are the share `distillation` of each
    label (`zoo.recommenders.training.distillation`).
    Raises RequestError for values out of range.
    """

    embedding_size: int = 16
    hidden: tuple[int, ...] = (128, 64)
    epochs: int = 40
    batch_size: int = 256
    learning_rate: float = 2e-3
    dropout: float = 0.0
    ema: float = 0.999
    l2_embeddings: tuple[float, ...] = (10.0, 1000.0, 20000.0)
    l2_scalars: float = 10.0
    l2_layers: float = 50.0
    unknown: float = 0.05
    min_count: int = 1
    patience: int = 5
    min_delta: float = 0.0001
    held_out: float = 0.1
    refit: bool = True
    teacher: str = ""
    distillation: float = 0.5
    qat: bool = False
    seed: int = 0

    ranges: ClassVar[dict[str, Range]] = {}  # of a family's own settings, where they are not numbers above 0
    fewest: ClassVar[int] = 100_000  # rows that a prior is weighed against: of fewer it would silence the network

    def __post_init__(self) -> None:
        require_settings(asdict(self), RANGES | self.ranges)


class Trainer:
    """A model in training on `rows` rows, its optimizer and the running average of its weights: all that a checkpoint
    holds. With several processes each takes a share of every batch, and all apply the same sum of gradients.

    Of tables of more than `LARGE` rows a step changes the rows of its batch alone, see `LazyRows`; of others all. lazy:
    the large ones, by their place among the weights.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, rows: int, group: Processes) -> None:
        self.model, self.config, self.group = model, config, group
        self.weights = list(model.parameters())
        self.average = [each.detach().clone() for each in self.weights]
        large = [m for m in model.modules() if isinstance(m, Embeddings) and len(m.weight) > LARGE]
        for module in large:
            module.sparse = True
        lazy = {id(m.weight): m.padding for m in large}
        self.start = [torch.zeros(()) if id(each) in lazy else torch.zeros_like(each) for each in self.weights]
        kinds = {
            id(m.weight): config.l2_scalars if isinstance(m, Scalars) else config.l2_embeddings[0]
            for m in model.modules()
            if isinstance(m, Embeddings)
        }
        self.strength = [
            kinds.get(id(each), config.l2_layers if each.ndim > 1 and each.numel() > 1 else 0.0)
            * 2
            / max(rows, config.fewest)
            for each in self.weights
        ]
        self.lazy = {
            place: LazyRows(each, config.learning_rate, self.strength[place], config.ema, lazy[id(each)])
            for place, each in enumerate(self.weights)
            if id(each) in lazy
        }
        self.dense = [place for place in range(len(self.weights)) if place not in self.lazy]
        dense = [m for m in model.modules() if isinstance(m, Embeddings) and not m.sparse]
        self.padded = [m for m in dense if m.padding]
        self.optimizer = torch.optim.Adam(
            [self.weights[place] for place in self.dense], config.learning_rate, foreach=True
        )
        self.steps = 0

    def hold(self) -> None:
        """Pull towards the weights as they are now, not towards 0 (L2-SP, Li et al. 2018)."""
        self.start = [each.detach().clone() for each in self.weights]

    def step(self, batch: Mapping[str, torch.Tensor], total: float) -> float:
        """Train on this process's share of a batch whose weights sum to `total`; returns the sum of all its losses."""
        self.model.train()
        losses = self.losses(batch)
        loss = (losses * batch["weight"]).sum()
        self.optimizer.zero_grad(set_to_none=False)
        torch.autograd.backward(loss / total)
        summed = loss.detach()
        if self.group.count > 1:
            for place in self.dense:
                each = self.weights[place]
                each.grad = torch.zeros_like(each) if each.grad is None else each.grad
                distributed.all_reduce(each.grad)
            distributed.all_reduce(summed)
        with torch.no_grad():
            for place in self.dense:
                weight, strength = self.weights[place], self.strength[place]
                if strength and weight.grad is not None:
                    weight.grad.add_(weight - self.start[place], alpha=strength)
            for module in self.padded:
                if module.weight.grad is not None:
                    module.weight.grad[module.padding] = 0
            self.optimizer.step()
            self.steps += 1
            keep = min(self.config.ema, (1 + self.steps) / (10 + self.steps))  # forget the first weights quickly
            weights = [self.weights[place].detach() for place in self.dense]
            torch._foreach_lerp_([self.average[place] for place in self.dense], weights, 1 - keep)
            for place, rows in self.lazy.items():
                rows.step(self.steps, self.start[place], self.average[place], self.group)
        return float(summed)

    def losses(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of each row, [n]: the cross-entropy of the click, unless the model has `losses` of its own."""
        found = self.model(batch["ids"], batch["numbers"], batch["scales"])
        own = getattr(self.model, "losses", None)
        if own is not None:
            return own(found, batch["ids"], batch["label"])  # type: ignore[no-any-return]
        logits = _first(found)
        return functional.binary_cross_entropy_with_logits(logits[:, 0], batch["label"], reduction="none")

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The model with the averaged weights, in evaluation."""
        self.settle()
        own = [each.detach().clone() for each in self.weights]
        self._set(self.average)
        self.model.eval()
        try:
            with torch.inference_mode():
                yield self.model
        finally:
            self._set(own)

    def kept(self) -> list[torch.Tensor]:
        """What is left of a training that ends here: the averaged weights, and the ranges of int8 that are trained."""
        return [each.clone() for each in (*self.average, *self._ranges())]

    @torch.no_grad()
    def take(self, kept: Sequence[torch.Tensor]) -> None:
        """Go back to what `kept` gave."""
        self.average = [each.clone() for each in kept[: len(self.average)]]
        for own, each in zip(self._ranges(), kept[len(self.average) :], strict=True):
            own.copy_(each)

    def _ranges(self) -> list[torch.Tensor]:
        return [x for each in self.model.modules() if isinstance(each, qat.Range) for x in (each.ends, each.count)]

    @torch.no_grad()
    def _set(self, values: Sequence[torch.Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)

    def predict(self, parts: Iterator[dict[str, torch.Tensor]], categories: Categories) -> tuple[Any, Any]:
        """Probabilities and labels of rows, with the averaged weights, float64 [n]."""
        scores, labels = [], []
        with self.averaged() as model:
            for part in parts:
                logits = _first(model(categories.usual(part["ids"]), part["numbers"], part["scales"]))
                scores.append(torch.sigmoid(logits[:, 0].double()).numpy())
                labels.append(part["label"].numpy())
        return np.concatenate(scores), np.concatenate(labels)

    def settle(self) -> None:
        """Make up for what happened to the rows of large tables since they were in a batch."""
        for place, rows in self.lazy.items():
            rows.settle(self.steps, self.start[place], self.average[place])

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        self.settle()
        optimizer = self.optimizer.state_dict()
        return {
            "model": self.model.state_dict(),
            "average": self.average,
            "start": self.start,
            "optimizer": optimizer,
            "steps": self.steps,
            "lazy": {place: rows.state() for place, rows in self.lazy.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        self.model.load_state_dict(state["model"])
        self.average, self.start, self.steps = list(state["average"]), list(state["start"]), state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])
        for place, rows in self.lazy.items():
            rows.restore(state["lazy"][place])


def _first(found: Any) -> Any:
    """The logits of what a model gives."""
    return found[0] if isinstance(found, tuple) else found
