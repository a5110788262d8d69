"""Fine-tuning configuration of text encoders."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.training.runs import FROM_0, SEED, SHARE, Range

RANGES = {
    "weight_decay": FROM_0,
    "warm_up": SHARE,
    "max_length": FROM_0,
    "seed": SEED,
    "batch_size": Range("2 or more", lambda n: n > 1),
}


@dataclass(frozen=True)
class TrainConfig:
    """How a training goes.

    warm_up: share of all steps in which the rate rises; then it falls to 0, both linearly. temperature: of the cosines
    of in-batch negatives. max_length: tokens of a text, 0 for the model's own. checkpoint_steps: between two
    checkpoints.
    """

    epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 2e-5
    weight_decay: float = 0.01
    warm_up: float = 0.1
    temperature: float = 0.05
    max_length: int = 128
    checkpoint_steps: int = 25
    columns: str = ""
    seed: int = 0
