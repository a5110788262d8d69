"""SASRec (Kang & McAuley 2018, "Self-Attentive Sequential Recommendation"), with the blocks of HSTU as an option."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pipelines.models.family import RunOption
from zoo.recommenders.family import KEEP
from zoo.recommenders.models.two_tower import TWO_TOWER, TwoTowerFamily
from zoo.recommenders.train_config import TrainConfig
from zoo.training.lazy_module import LazyModule
from zoo.training.settings import FROM_0

if TYPE_CHECKING:
    import torch

    from pipelines.models.pipeline import Pipeline
    from zoo.recommenders.data.features import Features

FULL = 50_000  # rows of a table up to which the softmax is over all items


@dataclass(frozen=True)
class SASRecConfig(TrainConfig):
    """Training settings of SASRec.

    Attributes:
        hidden: Width of the feed-forward networks; one value.
        blocks: Number of blocks.
        heads: Number of attention heads.
        block: "sasrec" or "hstu".
        negatives: Items of a sampled softmax, drawn from the items of the batch, with the correction of their
            frequency; 0 for a softmax over all items, up to `FULL` of them.
        temperature: Divisor of the cosines in the softmax.
        past: Weight of the losses of earlier positions; that of the newest one is 1. The rows of a log repeat them, so
            that they only matter where the log begins with long histories.
        columns: Whether the vector of an item in training is that of its id plus those of its own columns, the columns
            of the tower "item" (`ItemColumns`). On MovieLens they raise recall@10 by 0.008.
        disliked: Weight of the softmax over items in rows whose label is 0. In training, a linear layer maps the state
            of the history to the state of such a row, so that the vectors also learn from items that were shown. On
            MovieLens this raises recall@10 by 0.008.
    """

    embedding_size: int = 64
    hidden: tuple[int, ...] = (64,)
    blocks: int = 2
    heads: int = 1
    block: str = "sasrec"
    negatives: int = 0
    temperature: float = 0.07
    past: float = 0.0
    columns: bool = True
    disliked: float = 1.0
    dropout: float = 0.2
    learning_rate: float = 1e-3
    l2_embeddings: tuple[float, ...] = (10.0,)
    ranges: ClassVar = {"negatives": FROM_0, "past": FROM_0, "disliked": FROM_0}


class SASRec(LazyModule):
    """Next-item recommender: the state of a sequence against the vectors of all items.

    Both are L2-normalized, so that the index of two-tower models finds the best items. The newest position of a history
    predicts the row's item where its label is 1; with `past` earlier positions predict what followed, too. The
    probability of a click is a logistic function of the cosine. Vectors of time gaps add to those of the positions.

    Training from random weights adds the vectors of the items' columns to those of their ids, and predicts the items of
    rows with the label 0 by a layer of their own. The trained table takes the columns in, and the layer is dropped.

    Attributes:
        columns: Columns of the items, in training from random weights.
        dislike: Layer for rows with the label 0, in training from random weights.
    """

    outputs = ("user", "item")
    sequences = True
    embeddings: Any
    seen: Any
    columns: Any
    dislike: Any

    def __init__(self, features: Features, config: SASRecConfig) -> None:
        import torch
        from torch import nn

        from zoo.recommenders.models.layers import Embeddings, L2Normalize, RowDot
        from zoo.recommenders.models.sequences.blocks import NewestState, SequenceEncoder
        from zoo.recommenders.models.sequences.layers import (
            FieldLookup,
            SequenceLookup,
            SequenceMask,
            gaps_of,
            sequences_of,
        )

        super().__init__()
        self.sequence, self.key = sequences_of(features)[0]
        size = self.output_size = config.embedding_size
        gaps = gaps_of(features, self.sequence)
        tables = (self.key, self.sequence) if gaps is None else (self.key, self.sequence, gaps)
        self.embeddings = Embeddings(tables, size, sequences=True)
        self.gaps = None if gaps is None else SequenceLookup(self.embeddings, gaps)
        self.items = FieldLookup(self.embeddings, self.key)
        self.history = SequenceLookup(self.embeddings, self.sequence)
        self.mask = SequenceMask(self.sequence)
        self.encoder = SequenceEncoder(
            size, self.sequence.width, config.heads, config.hidden[0], config.blocks, config.dropout, config.block
        )
        self.encoder.every = config.past > 0
        self.newest, self.unit, self.item_unit, self.dot = NewestState(), L2Normalize(), L2Normalize(), RowDot()
        self.logit = nn.Linear(1, 1)
        nn.init.constant_(self.logit.weight, 2.0)
        nn.init.zeros_(self.logit.bias)
        last = self.sequence.last
        self.first, self.end = 1, last if last else self.sequence.rows
        self.negatives = config.negatives or (0 if self.end <= FULL else 1024)
        self.temperature, self.past, self.config, self.features = config.temperature, config.past, config, features
        self.columns = self.dislike = None
        self.register_buffer("seen", torch.ones(self.sequence.rows))

    def begin_training(self, parts: Iterable[Mapping[str, torch.Tensor]]) -> None:
        """Makes what only training from random weights has: columns of the items, and the layer of rows with label 0.

        Args:
            parts: Batches of the training rows: {"ids", "numbers", "scales"}.
        """
        from torch import nn

        from zoo.recommenders.models.sequences.item_columns import ItemColumns

        if self.config.columns:
            columns = ItemColumns(self.features, self.key, self.output_size)
            if not columns.is_empty:
                columns.read(parts, self.first)
                self.columns = columns
        if self.config.disliked:
            self.dislike = nn.Linear(self.output_size, self.output_size)
            nn.init.eye_(self.dislike.weight)
            nn.init.zeros_(self.dislike.bias)

    def end_training(self) -> None:
        """Adds the vectors of the columns to the table, and drops what only training has."""
        import torch

        with torch.no_grad():
            if self.columns is not None:
                table = self.embeddings.table(0)
                for rows in torch.tensor_split(torch.arange(self.first, self.end), 1 + (self.end - self.first) // FULL):
                    table[rows] += self.columns(rows)
        self.columns = self.dislike = None

    def _vectors(self, items: torch.Tensor) -> Any:
        """Vectors of the rows of the table, int [...], with their columns in training: float32 [..., size]."""
        import torch
        from torch.nn import functional

        if self.columns is None:
            return self.embeddings.lookup(items)
        rows, places = torch.unique(items, return_inverse=True)
        vectors = self.embeddings.lookup(rows) + self.columns(rows)
        return functional.embedding(places, vectors)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """Computes logits and vectors.

        Args:
            ids: Table rows, int32 [n, columns].
            numbers: Not used.
            scales: Not used.

        Returns:
            Logits, float32 [n, 1], L2-normalized vectors of histories and of items, float32 [n, size] each; in training
            also the states of all positions, or of the newest one without `past`, float32 [n, positions, size].
        """
        if self.columns is None:
            history, candidate = self.history(ids), self.items(ids)
        else:
            start = self.sequence.start
            history = self._vectors(ids[:, start : start + self.sequence.width])
            candidate = self._vectors(ids[:, self.key.start])
        gaps = () if self.gaps is None else (self.gaps(ids),)
        states = self.encoder(history, self.mask(ids), *gaps)
        user, item = self.unit(self.newest(states)), self.item_unit(candidate)
        results = self.logit(self.dot(user, item)), user, item
        return (*results, states) if self.training else results

    def losses(self, outputs: Any, ids: torch.Tensor, label: torch.Tensor) -> Any:
        """Computes losses: softmax of the next items, and the cross-entropy of the click, which fits the logit alone.

        Args:
            outputs: Results of `forward`.
            ids: Table rows, int32 [n, columns].
            label: Clicks, float32 [n].

        Returns:
            Losses, float32 [n].
        """
        import torch
        from torch.nn import functional

        logit, user, item, states = outputs
        shift = (logit - self.logit(self.dot(user, item)))[:, 0].detach()  # of a log of sampled negatives
        cosine = self.dot(user.detach(), item.detach())
        logits = self.logit(cosine)[:, 0] + shift
        click = functional.binary_cross_entropy_with_logits(logits, label, reduction="none")
        history = ids[:, self.sequence.start : self.sequence.start + self.sequence.width].long()
        targets = ids[:, self.key.start, None].long()
        if self.dislike is None:
            targets = targets * (label[:, None] > 0)
        else:
            newest = torch.where(label[:, None] > 0, states[:, 0], self.dislike(states[:, 0]))
            states = torch.cat([newest[:, None], states[:, 1:]], 1)
        targets = torch.cat([targets, history[:, :-1]], 1) if self.past else targets
        valid = self._known(targets)
        valid[:, 1:] &= (self._known(history[:, 1:]) | (history[:, 1:] == 0))[:, : targets.shape[1] - 1]
        weights = torch.full(targets.shape, self.past)
        weights[:, 0] = torch.where(label > 0, 1.0, self.config.disliked)
        places = valid.nonzero(as_tuple=True)
        losses = torch.zeros(targets.shape)
        if len(places[0]):
            chosen = self._softmax(functional.normalize(states[places], dim=1), targets[places])
            losses = losses.index_put(places, chosen * weights[places])
        return click + losses.sum(1)

    def _known(self, ids: torch.Tensor) -> Any:
        """Whether ids are those of items."""
        return (ids >= self.first) & (ids < self.end)

    def _softmax(self, states: torch.Tensor, targets: torch.Tensor) -> Any:
        """Cross-entropy of the targets, int64 [n], for L2-normalized states, float32 [n, size]: float32 [n]."""
        import torch
        from torch.nn import functional

        if not self.negatives:
            items = functional.normalize(self._vectors(torch.arange(self.first, self.end)), dim=1)
            return functional.cross_entropy(states @ items.T / self.temperature, targets - self.first, reduction="none")
        with torch.no_grad():
            self.seen.index_add_(0, targets, torch.ones(len(targets)))
            drawn = targets[torch.randint(len(targets), (self.negatives,))]
            frequency = (self.seen / self.seen.sum()).log()
        rows = functional.normalize(self._vectors(torch.cat([drawn, targets])), dim=1)
        others, own = rows[: self.negatives], rows[self.negatives :]
        scores = states @ others.T / self.temperature - frequency[drawn]
        scores = scores.masked_fill(drawn == targets[:, None], -math.inf)
        true = (states * own).sum(1, keepdim=True) / self.temperature - frequency[targets, None]
        return torch.logsumexp(torch.cat([true, scores], 1), 1) - true[:, 0]

    def held_out_metrics(self, parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """Computes the cross-entropy and the recall of the next item on clicked rows, for the choice of the epoch.

        Args:
            parts: Batches of rows: {"ids", "numbers", "scales", "label"}.

        Returns:
            {"shifted": cross-entropy in nats, "recall@10", "ndcg@10"}; items of the history are left out.
        """
        import torch
        from torch.nn import functional

        items = functional.normalize(self._vectors(torch.arange(self.first, self.end)), dim=1)
        losses, ranks = [], []
        for part in parts:
            rows = part["label"] > 0
            ids = part["ids"][rows]
            targets = ids[:, self.key.start].long()
            valid = self._known(targets)
            ids, targets = ids[valid], targets[valid]
            if not len(ids):
                continue
            scores = self(ids, part["numbers"], part["scales"])[1] @ items.T
            losses.append(functional.cross_entropy(scores / self.temperature, targets - self.first, reduction="none"))
            history = ids[:, self.sequence.start : self.sequence.start + self.sequence.width].long()
            left_out = torch.where(self._known(history), history - self.first, targets[:, None] - self.first)
            own = scores.gather(1, targets[:, None] - self.first)
            ranks.append((scores.scatter(1, left_out, -math.inf) >= own).sum(1) + 1)
        if not losses:
            return {"shifted": math.inf, "recall@10": 0.0, "ndcg@10": 0.0}
        rank, loss = torch.cat(ranks), torch.cat(losses)
        gain = torch.where(rank <= 10, 1 / torch.log2(1.0 + rank), torch.zeros(()))
        recall = (rank <= 10).float()
        return {"shifted": float(loss.mean()), "recall@10": float(recall.mean()), "ndcg@10": float(gain.mean())}


@dataclass(frozen=True, kw_only=True)
class NextItemFamily(TwoTowerFamily):
    """Family of next-item recommenders."""

    def pipeline(self) -> type[Pipeline]:
        """See `Family`."""
        from zoo.recommenders.retrieval.next_items import NextItemPipeline

        return NextItemPipeline

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Family` and `zoo.recommenders.retrieval.metrics.evaluate_next_items`."""
        from zoo.recommenders.retrieval.metrics import evaluate_next_items

        return evaluate_next_items(pipelines, data, on_error)


SASREC = NextItemFamily(
    name="sasrec",
    title="SASRec (Kang & McAuley 2018): the next item of a history, by self-attention",
    build=SASRec,
    config=SASRecConfig(),
    summary="{rows:,} rows, the best of {items:,} items each, {rows_per_second:,.0f} rows/s, {precision} in {engine}",
    run_options=(
        KEEP,
        RunOption("items", str, None, "File of items with their columns, to choose from. [default: all known items]"),
        *TWO_TOWER.run_options[2:],
    ),
)
