"""The settings of a training of recommenders."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from pipelines.core.errors import RequestError
from zoo.training.settings import BELOW_1, FROM_0, ROWS, SEED, SHARE, Range, require_settings

NEW_IDS = ("unknown", "similar")  # initial values of the rows of new ids
FINETUNE_RATE = 0.1  # of the learning rate of a training from random weights
HELD_OUT = 0.15  # of the rows of a fine-tuning, which may be fewer than training from scratch holds out
RANGES = {
    "seed": SEED,
    "dropout": BELOW_1,
    "ema": BELOW_1,
    "unknown": BELOW_1,
    "distillation": SHARE,
    "negative_rate": SHARE,
    "held_out": ROWS,
    **dict.fromkeys(("l2_embeddings", "l2_scalars", "l2_layers", "min_delta", "evict_after", "evict_below"), FROM_0),
}


@dataclass(frozen=True)
class TrainConfig:
    """Training recipe of recommenders.

    Attributes:
        embedding_size: Columns of an embedding table.
        hidden: Widths of the hidden layers.
        held_out: Number of held-out rows, or their share if below 1; they are the last rows by timestamp or position.
        min_delta: Decrease of the held-out LogLoss, after matching the click rate, that makes an epoch the best.
        patience: Epochs without a new best before early stopping.
        refit: Train again from the start on all rows, for the best number of epochs.
        ema: Momentum of the weight average over training steps; the averaged weights are evaluated and saved.
        l2_embeddings: Strengths of the Gaussian prior of embedding tables, relative to the sum of the rows' losses. Its
            mean is 0, or the initial weights in fine-tuning. Of several strengths the search tries one after the other
            while the held-out LogLoss improves; sparser categories need larger ones.
        l2_scalars: The same for first-order weights; one strength.
        l2_layers: The same for linear layers; one strength.
        min_count: Occurrences below which a category counts as unknown.
        epochs: Maximum number of epochs.
        batch_size: Rows of a batch, over all processes.
        learning_rate: Learning rate of Adam.
        dropout: Dropout probability of the hidden layers.
        negative_rate: Share of the rows without a click that the log kept, above 0 to 1: the model's probabilities are
            corrected to those of all rows. 0: all, or in fine-tuning the share of the model.
        grow: Fine-tuning gives new ids rows of their own; without it they stay unknown.
        new_ids: Start of the rows of new ids in fine-tuning: "unknown", the row of unknown values, or "similar", the
            mean of the ids with the same values in the columns that belong to the id, such as the genres of an item;
            the row of unknown values where there are none.
        freeze_towers: Fine-tuning trains embedding tables alone.
        evict_after: Fine-tuning evicts the ids that did not occur in this many trainings, itself included; 0: none.
        evict_below: Fine-tuning evicts the ids with fewer occurrences in all trainings, itself included; 0: none.
        seed: Seed of weights, order and dropout.
        unknown: Minimum share of the categories of every column that training replaces by the unknown category. A
            column with a larger share of new values among the held-out rows uses that share.
        qat: Quantization-aware fine-tuning (`zoo.recommenders.training.qat`), in one process and at a tenth of the
            learning rate; the model keeps the trained ranges.
        teacher: Teacher model for knowledge distillation.
        distillation: Share of the teacher's probability in a label (`zoo.recommenders.training.distillation`).

    Raises:
        RequestError: A value is out of range.
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
    negative_rate: float = 0.0
    grow: bool = True
    new_ids: str = "unknown"
    freeze_towers: bool = False
    evict_after: int = 0
    evict_below: int = 0
    seed: int = 0

    ranges: ClassVar[dict[str, Range]] = {}  # of a family's own settings, where they are not numbers above 0
    absent: ClassVar[dict[str, Any]] = {}  # values of the settings that records of older models do not have
    fewest: ClassVar[int] = 100_000  # rows that a prior is weighed against: of fewer it would silence the network

    def __post_init__(self) -> None:
        require_settings(asdict(self), RANGES | self.ranges)
        if self.new_ids not in NEW_IDS:
            raise RequestError(f"found new_ids {self.new_ids!r}, expected {' or '.join(NEW_IDS)}")


@dataclass(frozen=True)
class ProductsConfig(TrainConfig):
    """Training recipe of networks to whose logit products of embeddings can be added.

    Attributes:
        products: Whether the sum of the dot products of all pairs of embeddings is added to the logit, as in DeepFM. On
            MovieLens the products, above all that of an item and the history, raise the AUC by 0.006 for later weeks.
    """

    products: bool = True
    absent: ClassVar[dict[str, Any]] = {"products": False}


def for_finetuning(config: TrainConfig) -> Any:
    """Returns the settings for fine-tuning.

    Args:
        config: Settings for training from scratch.

    Returns:
        Settings with `FINETUNE_RATE` of the learning rate, one prior strength, and no random unknown categories. A
        share of the rows is held out, where training from scratch holds out a number of them.
    """
    return replace(
        config,
        learning_rate=config.learning_rate * FINETUNE_RATE,
        unknown=0.0,
        l2_embeddings=config.l2_embeddings[:1],
        held_out=config.held_out if config.held_out < 1 else HELD_OUT,
    )
