"""The settings of a training of recommenders."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from zoo.training.runs import BELOW_1, FROM_0, SEED, SHARE, Range, require_settings

RANGES = {
    "seed": SEED,
    "dropout": BELOW_1,
    "ema": BELOW_1,
    "unknown": BELOW_1,
    "distillation": SHARE,
    **dict.fromkeys(("l2_embeddings", "l2_scalars", "l2_layers", "min_delta"), FROM_0),
}


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


def for_finetuning(config: TrainConfig) -> Any:
    """The recipe for going on from trained weights: small steps."""
    return replace(config, learning_rate=config.learning_rate / 10, unknown=0.0, l2_embeddings=config.l2_embeddings[:1])
