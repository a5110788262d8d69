"""Creates the trainers of a training: one for every prior that the search tries, and one of all rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pipelines.core.console import print_line
from zoo.recommenders.models.checkpoints import Build
from zoo.recommenders.models.multitask.outputs import parents_of
from zoo.recommenders.train_config import TrainConfig
from zoo.recommenders.training.growth.growing import new_row_rates
from zoo.recommenders.training.growth.vectors import center_priors, fill_vectors
from zoo.recommenders.training.negative_sampling import log_odds, require_one_sampled_label, start_at_all_rows
from zoo.recommenders.training.qat import FakeQuantization
from zoo.recommenders.training.row_store import CategoryCounts, RowStore
from zoo.recommenders.training.start import Start
from zoo.recommenders.training.tables.networks import new_network
from zoo.recommenders.training.trainer import Trainer
from zoo.training.runs import Processes, fill


@dataclass
class TrainerFactory:
    """Creates trainers of networks with the same first weights.

    Attributes:
        build: Creates the untrained network from features and settings.
        config: Training settings.
        start: Where the training starts.
        store: Rows of the log.
        group: Processes that train together.
        categories: `categories(rows)` counts the ids of the first rows.
        quantization: Fake quantization of the network, or None.
        announced: Whether the sizes of large tables have been printed.
    """

    build: Build
    config: TrainConfig
    start: Start
    store: RowStore
    group: Processes
    categories: Callable[[int], CategoryCounts]
    quantization: FakeQuantization | None
    announced: bool = field(default=False, init=False)

    def __call__(self, rows: int, l2: float, files: Path) -> Trainer:
        """Creates the trainer of a network.

        Args:
            rows: Number of training rows.
            l2: Strength of the prior of embedding tables.
            files: Path of the files of rows, see `Trainer`.

        Returns:
            The trainer.
        """
        torch.manual_seed(self.config.seed)
        model, start = self._network(rows), self.start
        if self.quantization is not None:
            model = self.quantization.prepare(model)
        config = replace(self.config, l2_embeddings=(l2,))
        table_rate, row_rates = new_row_rates(model, start.model) if start.model and start.adds_ids else (1.0, None)
        trainer = Trainer(model, config, rows, self.group, table_rate, row_rates, files)
        if start.model is not None:
            trainer.center_priors()
        elif start.vectors:
            center_priors(trainer, start.vectors)
        self._announce(trainer, files.parent)
        return trainer

    def _network(self, rows: int) -> nn.Module:
        """Creates a network with its first weights."""
        config, start = self.config, self.start
        model = new_network(self.build, start.features, config, self.group.count)
        require_one_sampled_label(config.negative_rate, start.features.schema, parents_of(model))
        if start.model is not None:
            fill(model, start.model.state, start.folder or "")
            return model
        fill_vectors(model, start.vectors)
        if (begin := getattr(model, "begin_training", None)) is not None:
            categories = self.categories(rows)
            begin({**part, "ids": categories.replace_rare(part["ids"])} for part in self.store.parts(0, rows))
        if config.negative_rate:
            example = self.store.rows(np.arange(min(len(self.store), 64)))
            inputs = example["ids"], example["numbers"], example["scales"]
            start_at_all_rows(model, inputs, log_odds(config.negative_rate))
        return model

    def _announce(self, trainer: Trainer, folder: Path) -> None:
        """Prints the sizes of large tables, once."""
        if not trainer.sparse or self.announced or self.group.rank != 0:
            return
        self.announced = True
        heights = ", ".join(f"{len(table.weight):,}" for table in trainer.sparse.values())
        kept = f"; trained rows are kept in {folder}" if trainer.stored else ""
        print_line(f"tables of {heights} rows: a step changes the rows of its batch alone{kept}")
