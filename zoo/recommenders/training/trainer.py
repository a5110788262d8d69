"""Training recipe and optimization step of recommenders: loss, priors and weight averaging."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from pipelines.quantization.training import qat
from zoo.recommenders.metrics import unless_ones
from zoo.recommenders.models.layers import Embeddings, FirstOrder
from zoo.recommenders.models.multitask.outputs import first_of, label_losses, parents_of, probabilities
from zoo.recommenders.train_config import TrainConfig
from zoo.recommenders.training.negative_sampling import log_odds, shifted
from zoo.recommenders.training.row_store import CategoryCounts
from zoo.recommenders.training.tables.sparse_adam import SparseAdam
from zoo.recommenders.training.tables.stored_adam import StoredAdam
from zoo.training.runs import Processes


class Trainer:
    """A model in training with its optimizer and weight average.

    With several processes every process takes a share of each batch, and all apply the same sum of gradients. In tables
    of more than `LARGE_ROWS` rows a step changes only the rows of its batch, see `SparseAdam`; those on the device
    "meta" are trained in files, see `StoredAdam`.

    Args:
        model: Network to train.
        config: Training recipe; with `freeze_towers` the weights that are no embedding tables stay.
        rows: Number of training rows, which scales the priors.
        group: Processes that train together.
        table_rate: Factor of the learning rate of embedding tables.
        row_rates: {id of a table: factor of the learning rate of its rows, float32 [rows, 1]}, besides `table_rate`.
        files: Path of the files of rows, without the number of the table at the end.

    Attributes:
        sparse: {index among the weights: large table}.
        stored: {index among the weights: table in a file}.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        rows: int,
        group: Processes,
        table_rate: float = 1.0,
        row_rates: Mapping[int, torch.Tensor] | None = None,
        files: Path = Path("rows"),
    ) -> None:
        self.model, self.config, self.group = model, config, group
        tables = {id(m.weight) for m in model.modules() if isinstance(m, Embeddings)}
        for weight in model.parameters():
            weight.requires_grad_(id(weight) in tables or not config.freeze_towers)
        self.weights = list(model.parameters())
        self.average = [weight.detach().clone() for weight in self.weights]
        large = [m for m in model.modules() if isinstance(m, Embeddings) and m.large]
        for module in large:
            module.sparse = True
        lazy = {id(m.weight): m for m in large}
        self.start = [torch.zeros(()) if id(weight) in lazy else torch.zeros_like(weight) for weight in self.weights]
        kinds = {
            id(m.weight): config.l2_scalars if isinstance(m, FirstOrder) else config.l2_embeddings[0]
            for m in model.modules()
            if isinstance(m, Embeddings)
        }
        self.strength = [
            kinds.get(id(weight), config.l2_layers if weight.ndim > 1 and weight.numel() > 1 else 0.0)
            * 2
            / max(rows, config.fewest)
            for weight in self.weights
        ]
        self.sparse: dict[int, SparseAdam] = {}
        self.stored: dict[int, StoredAdam] = {}
        for place, param in enumerate(self.weights):
            if (table := lazy.get(id(param))) is None:
                continue
            recipe = config.learning_rate * table_rate, self.strength[place], config.ema
            if param.is_meta:
                self.stored[place] = StoredAdam(table, files.with_name(f"{files.name}-{place}"), *recipe)
            self.sparse[place] = self.stored.get(place) or SparseAdam(param, *recipe, table.padding)
        trained = [place for place, weight in enumerate(self.weights) if weight.requires_grad]
        self.dense = [place for place in trained if place not in self.sparse]
        dense = [m for m in model.modules() if isinstance(m, Embeddings) and not m.sparse]
        self.padded = [m for m in dense if m.padding]
        rates = dict.fromkeys([config.learning_rate * table_rate, config.learning_rate])  # one, if they are the same
        groups: list[dict[str, Any]] = [{"params": [], "lr": rate} for rate in rates]
        for place in self.dense:
            groups[0 if id(self.weights[place]) in tables else -1]["params"].append(self.weights[place])
        self.optimizer = torch.optim.Adam([group for group in groups if group["params"]], foreach=True)
        by_id = row_rates or {}
        for place, rows_of_batch in self.sparse.items():
            rows_of_batch.row_rates = by_id.get(id(self.weights[place]))
        self.rates = {place: by_id[id(self.weights[place])] for place in self.dense if id(self.weights[place]) in by_id}
        self.steps, self.shift = 0, log_odds(config.negative_rate)

    def center_priors(self) -> None:
        """Sets the means of the priors to the current weights, instead of 0 (L2-SP, Li et al. 2018)."""
        self.start = [weight.detach().clone() for weight in self.weights]

    def step(self, batch: Mapping[str, torch.Tensor], total: float) -> float:
        """Trains on this process's share of a batch.

        Args:
            batch: Rows of this process: {"ids", "numbers", "scales", "label", "weight"}.
            total: Sum of the sample weights of the whole batch.

        Returns:
            Sum of the weighted losses of all processes.
        """
        self.model.train()
        losses = self.losses(batch)
        loss = (losses * batch["weight"]).sum()
        self.optimizer.zero_grad(set_to_none=False)
        torch.autograd.backward(loss / total)
        summed = loss.detach()
        if self.group.count > 1:
            for place in self.dense:
                param = self.weights[place]
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                distributed.all_reduce(param.grad)
            distributed.all_reduce(summed)
        with torch.no_grad():
            for place in self.dense:
                weight, strength = self.weights[place], self.strength[place]
                if strength and weight.grad is not None:
                    weight.grad.add_(weight - self.start[place], alpha=strength)
            for module in self.padded:
                if module.weight.grad is not None:
                    module.weight.grad[module.padding] = 0
            before = {place: self.weights[place].clone() for place in self.rates}
            self.optimizer.step()
            for place, rate in self.rates.items():
                self.weights[place].copy_(torch.lerp(before[place], self.weights[place], rate))
            self.steps += 1
            keep = min(self.config.ema, (1 + self.steps) / (10 + self.steps))  # forget the first weights quickly
            weights = [self.weights[place].detach() for place in self.dense]
            torch._foreach_lerp_([self.average[place] for place in self.dense], weights, 1 - keep)
            for place, rows in self.sparse.items():
                rows.step(self.steps, self.start[place], self.average[place], self.group)
        return float(summed)

    def losses(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Computes the loss of every row: `losses` of the model if it has one, else the cross-entropy of the label.

        Args:
            batch: {"ids", "numbers", "scales", "label"}. Losses of several labels are added, those that are missing
                left out.

        Returns:
            Losses, float32 [n].
        """
        results = shifted(self.model(batch["ids"], batch["numbers"], batch["scales"]), self.shift)
        own = getattr(self.model, "losses", None)
        if own is not None:
            return own(results, batch["ids"], batch["label"])  # type: ignore[no-any-return]
        return label_losses(first_of(results), batch["label"], parents_of(self.model))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Yields the model with the averaged weights in evaluation mode, which it reads where they lie."""
        self.catch_up()
        own = [weight.data for weight in self.weights]
        try:
            for weight, average in zip(self.weights, self.average, strict=True):
                weight.data = average
            for table in self.stored.values():
                table.averaged = True
            self.model.eval()
            with torch.inference_mode():
                yield self.model
        finally:
            for weight, data in zip(self.weights, own, strict=True):
                weight.data = data
            for table in self.stored.values():
                table.averaged = False

    def snapshot(self, path: Path) -> list[Any]:
        """Returns the averaged weights and the trained int8 ranges, which further steps change.

        Args:
            path: Path of copies of tables in files, without the number of the table at the end.
        """
        self.catch_up()
        copies = {place: table.snapshot(path.with_name(f"{path.name}.{place}")) for place, table in self.stored.items()}
        return [*(copies.get(place, mean) for place, mean in enumerate(self.average)), *self._ranges()]

    @torch.no_grad()
    def load_snapshot(self, snapshot: Sequence[Any]) -> None:
        """Restores values from `snapshot`.

        Args:
            snapshot: Averaged weights, which the trainer takes over, then trained int8 ranges.
        """
        for place, table in self.stored.items():
            table.load_snapshot(snapshot[place])
        self.average = [
            own if place in self.stored else mean
            for place, (own, mean) in enumerate(zip(self.average, snapshot, strict=False))
        ]
        for own, tensor in zip(self._ranges(), snapshot[len(self.average) :], strict=True):
            own.copy_(tensor)

    def _ranges(self) -> list[torch.Tensor]:
        return [
            x for module in self.model.modules() if isinstance(module, qat.Range) for x in (module.ends, module.count)
        ]

    @torch.no_grad()
    def assign(self, values: Sequence[torch.Tensor]) -> None:
        """Overwrites the weights of the model.

        Args:
            values: New values, a tensor per weight in the order of `weights`.
        """
        for place, value in enumerate(values):
            if place not in self.stored:
                self.weights[place].copy_(value)

    def predict(self, parts: Iterator[dict[str, torch.Tensor]], categories: CategoryCounts) -> tuple[Any, Any, Any]:
        """Predicts with the averaged weights.

        Args:
            parts: Batches of rows.
            categories: Replacement of rare and new ids.

        Returns:
            Labels, float32 [n], probabilities, float64 [n], and sample weights, float32 [n]; None where all are 1. Of
            several labels, labels and probabilities are [n, labels].
        """
        scores, labels, weights = [], [], []
        with self.averaged() as model:
            for part in parts:
                results = model(categories.replace_rare(part["ids"]), part["numbers"], part["scales"])
                results = shifted(results, self.shift)
                scores.append(probabilities(model, results).numpy())
                labels.append(part["label"].numpy())
                weights.append(part["weight"].numpy())
        return np.concatenate(labels), np.concatenate(scores), unless_ones(np.concatenate(weights))

    def own_metrics(self, parts: Iterator[dict[str, torch.Tensor]], categories: CategoryCounts) -> dict[str, float]:
        """Computes the metrics that the network defines itself, with the averaged weights.

        Args:
            parts: Batches of rows.
            categories: Replacement of rare and new ids.

        Returns:
            Result of `held_out_metrics` of the network; {} without one.
        """
        if not hasattr(self.model, "held_out_metrics"):
            return {}
        with self.averaged() as model:
            replaced = ({**part, "ids": categories.replace_rare(part["ids"])} for part in parts)
            metrics: Any = model.held_out_metrics
            return dict(metrics(replaced))

    def catch_up(self) -> None:
        """Applies all missed steps to the rows of large tables."""
        for place, rows in self.sparse.items():
            rows.catch_up(self.steps, self.start[place], self.average[place])

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        self.catch_up()
        optimizer = self.optimizer.state_dict()
        return {
            "model": {name: tensor for name, tensor in self.model.state_dict().items() if not tensor.is_meta},
            "average": [None if mean.is_meta else mean for mean in self.average],
            "start": self.start,
            "optimizer": optimizer,
            "steps": self.steps,
            "lazy": {place: rows.state() for place, rows in self.sparse.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a checkpoint.

        Args:
            state: Result of `state`.
        """
        self.model.load_state_dict(state["model"], strict=not self.stored)
        self.average = [own if mean is None else mean for own, mean in zip(self.average, state["average"], strict=True)]
        self.start, self.steps = list(state["start"]), state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])
        for place, rows in self.sparse.items():
            rows.restore(state["lazy"][place])
