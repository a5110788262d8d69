"""Training of a recommender on the rows of a log: search of the prior with early stopping, and a refit on all rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.analysis.metrics import auc
from pipelines.core.console import print_line
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.core.progress import progress, silent
from pipelines.quantization.training.qat import freeze_ranges
from zoo.recommenders.data.features import Features
from zoo.recommenders.metrics import EPSILON, click_metrics, known_rows, logloss, mean_metrics
from zoo.recommenders.train_config import TrainConfig
from zoo.recommenders.training.distillation import Teacher
from zoo.recommenders.training.row_store import CategoryCounts, RowStore
from zoo.recommenders.training.trainer import Trainer
from zoo.training.runs import QAT_FROZEN, save_checkpoint

STATE = "checkpoint/state.pt"
ROWS = "rows"  # start of the names of files beside the checkpoint with the rows of tables beyond memory
FINISHED = "finished"  # phase of a checkpoint that is no longer needed, and holds no weights
LARGEST_SHIFT = 40.0  # of a logit: beyond both ends of the clipped logits, -16 to 16, and the logit of any click rate
SHIFT_STEPS = 100
AUC_OF_PARTS = "auc_of_parts"
PARTS = 10  # of the held-out rows


@dataclass(frozen=True)
class Fitting:
    """Trains networks on the rows of a log, with a checkpoint after every epoch.

    Attributes:
        output: Folder of the checkpoint.
        store: Rows of the log.
        features: Features of the networks.
        config: Training recipe.
        new_trainer: `new_trainer(rows, l2, files)` returns the trainer of a new network, for the number of training
            rows, the strength of the prior of embedding tables, and the path of its files.
        shares: Share of the categories of every column that training replaces by the unknown category.
        teacher: Teacher of a distillation, or None.
        categories: `categories(rows)` counts the ids of the first rows.
    """

    output: Path
    store: RowStore
    features: Features
    config: TrainConfig
    new_trainer: Callable[[int, float, Path], Trainer]
    shares: torch.Tensor
    teacher: Teacher | None
    categories: Callable[[int], CategoryCounts]

    def run(self, state: dict[str, Any], split: int) -> Trainer:
        """Searches, and then trains on all rows with `refit`; begins where `state` stands.

        Args:
            state: State of the training, updated in place.
            split: Number of training rows of the search.

        Returns:
            The trainer of the last network.
        """
        if state["phase"] == "search":
            trainer = self.search(state, split)
            if not self.config.refit:
                return trainer
            del trainer, state["best_weights"]  # new weights are trained on all rows
            state["winner"].pop("weights")
            state |= {"phase": "refit", "epoch": 0, "trainer": None}
        return self.fit(state, len(self.store), state["winner"]["epoch"], state["winner"]["l2"])

    def search(self, state: dict[str, Any], split: int) -> Trainer:
        """Tries the strengths of `l2_embeddings` in order, while the AUC of the held-out rows improves.

        A weaker prior makes extreme probabilities, which raise the LogLoss before the order of the rows suffers; so AUC
        compares trials. A later strength has to gain more than one standard error (as in the one-standard-error rule,
        Breiman et al. 1984): of two equals the first is kept.

        Args:
            state: State of the training, updated in place; "winner" is the best trial.
            split: Number of training rows; the rows after them are held out.

        Returns:
            The trainer of the last trial.
        """
        while True:
            l2 = self.config.l2_embeddings[state["trial"]]
            trainer = self.fit(state, split, self.config.epochs, l2)
            best, winner = state["best"], state["winner"]
            error = max(self.config.min_delta, gain_error(best, winner))
            better = not winner or best["auc"] > winner["auc"] + error
            if winner and trainer.group.rank == 0:
                gain, kept = best["auc"] - winner["auc"], l2 if better else winner["l2"]
                print_line(f"l2_embeddings {l2:g}: AUC {gain:+.4f} (standard error {error:.4f}); {kept:g} is kept")
            if better:
                kept = {"l2": l2, "weights": state["best_weights"], "history": state["history"]}
                state["winner"] = {**best, **kept}  # its weights: the name of their file, or those of an old checkpoint
            state["trial"] += 1
            if not better or state["trial"] == len(self.config.l2_embeddings):
                return trainer
            del trainer  # its tables and their moments, before those of the next trial are made
            state |= new_trial()

    def fit(self, state: dict[str, Any], rows: int, epochs: int, l2: float) -> Trainer:
        """Trains on the first rows. The search evaluates every epoch on the rows after them and stops early.

        Args:
            state: State of the training, updated in place; in the search "best" is the best epoch.
            rows: Number of training rows.
            epochs: Maximum number of epochs.
            l2: Strength of the prior of embedding tables.

        Returns:
            The trainer.
        """
        files = (self.output / STATE).with_name(f"{ROWS}-{state['phase']}-{state['trial']}")
        config, trainer = self.config, self.new_trainer(rows, l2, files)
        search, group = state["phase"] == "search", trainer.group
        categories = self.categories(rows)
        if state.get("trainer"):
            trainer.restore(state.pop("trainer"))
        while state["epoch"] < epochs:
            if search and _is_done(state, config):
                break
            epoch = state["epoch"] + 1
            loss = self._epoch(trainer, categories, rows, epoch, epochs, state["phase"])
            kind = f", l2_embeddings {l2:g}" if search and len(config.l2_embeddings) > 1 else ""
            line = f"{state['phase']}{kind}: epoch {epoch}/{epochs}  loss {loss:.4f}"
            if search:
                held_out = trainer.predict(self.store.parts(rows, len(self.store)), categories)
                metrics = held_out_metrics(*held_out, self.features.schema.labels)
                metrics |= trainer.own_metrics(self.store.parts(rows, len(self.store)), categories)
                state["history"].append({"epoch": epoch, "train_logloss": loss, **metrics})
                if not state["best"] or metrics["shifted"] < state["best"]["shifted"] - config.min_delta:
                    state["best"] = {"epoch": epoch, **metrics, AUC_OF_PARTS: auc_of_parts(*held_out)}
                    state["best_weights"] = self._keep(trainer, f"best-{state['trial']}-{epoch}.pt")
                line += f"  held out {metrics['logloss']:.4f}  AUC {metrics['auc']:.4f}"
                line += f"  NDCG@10 {metrics['ndcg@10']:.4f}" if "ndcg@10" in metrics else ""
            state |= {"epoch": epoch, "trainer": trainer.state()}
            if group.rank == 0:
                save_checkpoint(self.output / STATE, state)
                self._remove_weights((state.get("best_weights"), state["winner"].get("weights")), files.name)
                print_line(line)
            group.checkpointed(self.output)
        return trainer

    def _keep(self, trainer: Trainer, name: str) -> str:
        """Writes the averaged weights beside the checkpoint if they can become the final model; returns the name."""
        if self.config.refit:  # the final weights are trained anew
            return ""
        if trainer.group.rank == 0:
            path = (self.output / STATE).with_name(name)
            save_checkpoint(path, {"weights": trainer.snapshot(path)})
        return name

    def _remove_weights(self, kept: Collection[Any], rows: str = "") -> None:
        """Removes the weights of `_keep` that are not among the names `kept`, and rows of other trainers."""
        folder = (self.output / STATE).parent
        spent = [path for path in folder.glob("best-*.pt*") if f"{path.name.partition('.pt')[0]}.pt" not in kept]
        spent += [path for path in folder.glob(f"{ROWS}-*") if not rows or not path.name.startswith(f"{rows}-")]
        for path in spent:
            path.unlink()

    def finish(self, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Replaces the checkpoint by a note that the training is finished.

        Args:
            state: State of the training.
            metrics: Metrics of the model.
        """
        save_checkpoint(self.output / STATE, {"run": state["run"], "phase": FINISHED, "metrics": dict(metrics)})
        self._remove_weights(())

    def best_weights(self, state: Mapping[str, Any]) -> list[torch.Tensor]:
        """Returns the weights of the winner of the search.

        Args:
            state: State of the training.

        Raises:
            RequestError: The file of the weights is missing or damaged.
        """
        kept = state["winner"]["weights"]
        if not isinstance(kept, str):  # of a checkpoint of version 0.2.0
            return list(kept)
        path = (self.output / STATE).with_name(kept)
        try:
            return list(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["weights"])
        except Exception as error:  # torch, zipfile and pickle raise their own kinds for every sort of damage
            raise RequestError(
                f"cannot read {path} ({one_line(error)}), which {STATE} needs; train again into an empty folder"
            ) from error

    def _epoch(
        self, trainer: Trainer, categories: CategoryCounts, rows: int, epoch: int, epochs: int, phase: str
    ) -> float:
        """Trains on the first `rows` rows once, in random order; returns the mean loss."""
        config, group = self.config, trainer.group
        order = np.random.default_rng([config.seed, epoch]).permutation(rows)
        random = torch.Generator().manual_seed(config.seed * 1000 + epoch)
        torch.manual_seed(config.seed * 1000 + epoch + group.rank)  # for dropout
        loss = seen = 0.0
        shown = progress if group.rank == 0 else silent
        with shown(f"{phase}: epoch {epoch} of {epochs}", rows) as advance:
            for begin in range(0, rows, config.batch_size):
                places = order[begin : begin + config.batch_size]
                batch = self.store.rows(places)
                total = max(float(batch["weight"].sum()), 1e-12)
                if self.teacher is not None:
                    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
                    batch["label"] = torch.from_numpy(self.teacher.labels(arrays, arrays["label"], places))
                batch["ids"] = categories.mask_random(batch["ids"], self.shares, random)
                if config.qat and trainer.steps >= (1 - QAT_FROZEN) * epochs * math.ceil(rows / config.batch_size):
                    freeze_ranges(trainer.model)
                mine = slice(group.rank, None, group.count)
                loss += trainer.step({name: tensor[mine] for name, tensor in batch.items()}, total)
                seen += total
                advance(len(batch["label"]))
        if not math.isfinite(loss):
            raise ZooError(f"training diverged in epoch {epoch}; train again with a lower learning_rate")
        return loss / seen


def held_out_metrics(
    labels: NDArray[Any], probabilities: NDArray[Any], weights: NDArray[Any] | None, names: Sequence[str]
) -> dict[str, Any]:
    """Computes the metrics of an epoch.

    Args:
        labels: 0 or 1, [n]; or [n, labels], NaN where missing.
        probabilities: float64, the same shape.
        weights: Sample weights, [n]; None: 1.
        names: Names of the labels.

    Returns:
        As `label_metrics`, each also with "shifted", see `shifted_logloss`.
    """
    if labels.ndim == 1:
        rows = labels, probabilities, weights
        return {**click_metrics(*rows), "shifted": shifted_logloss(*rows)}
    columns = zip(names, labels.T, probabilities.T, strict=True)
    parts = {name: known_rows(label, scores, weights) for name, label, scores in columns}
    return mean_metrics({name: held_out_metrics(*rows, ()) for name, rows in parts.items()})


def auc_of_parts(labels: NDArray[Any], probabilities: NDArray[Any], weights: NDArray[Any] | None = None) -> list[float]:
    """Computes the AUC of consecutive parts of the held-out rows, from which `gain_error` takes its standard error.

    Args:
        labels: 0 or 1, [n]; or [n, labels], NaN where missing.
        probabilities: float64, the same shape.
        weights: Sample weights, [n]; None: 1.

    Returns:
        `PARTS` values, means over the labels; NaN for a part without both labels.
    """
    columns = zip(np.atleast_2d(labels.T), np.atleast_2d(probabilities.T), strict=True)
    by_label = []
    for column, scores in columns:
        truth, predicted, counts = known_rows(column, scores, weights)
        parts = np.array_split(np.arange(len(truth)), PARTS)
        values = np.full(len(parts), np.nan)
        for index, part in enumerate(parts):
            if len(set(truth[part])) > 1:
                own = None if counts is None else counts[part].astype(np.float64)
                values[index] = auc(truth[part], predicted[part], own)
        by_label.append(values)
    return [float(value) for value in np.mean(by_label, axis=0)]


def gain_error(new: Mapping[str, Any], old: Mapping[str, Any]) -> float:
    """Computes the standard error of the difference of two AUCs, from the AUCs of parts of the held-out rows.

    Args:
        new: Best epoch of a trial with its `auc_of_parts`.
        old: The same of another trial.

    Returns:
        The error, 0 or more; 0 where fewer than two parts have both labels.
    """
    unknown = np.full(PARTS, np.nan)  # in older checkpoints
    gains = np.subtract(new.get(AUC_OF_PARTS, unknown), old.get(AUC_OF_PARTS, unknown))
    gains = gains[~np.isnan(gains)]
    return float(np.std(gains, ddof=1) / math.sqrt(len(gains))) if len(gains) > 1 else 0.0


def shifted_logloss(
    labels: NDArray[Any], probabilities: NDArray[np.float64], weights: NDArray[Any] | None = None
) -> float:
    """Computes the LogLoss after shifting all logits by a constant, so that expected and actual clicks are equal.

    This ignores changes of the overall click rate since training.

    Args:
        labels: 0 or 1, [n].
        probabilities: float64 [n].
        weights: Sample weights, 0 or more, [n]; None: 1.

    Returns:
        LogLoss in nats, weighted.
    """
    inside = np.clip(probabilities, EPSILON, 1 - EPSILON)
    logits = np.log(inside) - np.log1p(-inside)
    counts = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
    low, high, shift = -LARGEST_SHIFT, LARGEST_SHIFT, 0.0
    for _ in range(SHIFT_STEPS):  # Newton's steps; bisections where one leaves the bracket of the root
        p = 1 / (1 + np.exp(-(logits + shift)))
        excess, slope = float(counts @ (labels - p)), float(counts @ (p * (1 - p)))
        low, high = (shift, high) if excess > 0 else (low, shift)
        following = shift + excess / slope if slope else high
        following = following if low < following < high else (low + high) / 2
        if abs(following - shift) < 1e-9:
            break
        shift = following
    return logloss(labels, 1 / (1 + np.exp(-(logits + shift))), weights)


def _is_done(state: Mapping[str, Any], config: TrainConfig) -> bool:
    """Whether a trial of the search has no new best any more, or is well behind an earlier trial."""
    best, winner, epoch = state["best"], state["winner"], state["epoch"]
    if not best:
        return False
    behind = winner and best["auc"] <= winner["auc"] and epoch >= 2 * winner["epoch"] + config.patience
    return bool(behind) or epoch - best["epoch"] >= config.patience


def new_trial() -> dict[str, Any]:
    """Returns the state before the first epoch of a trial."""
    return {"epoch": 0, "trainer": None, "best": {}, "history": []}
