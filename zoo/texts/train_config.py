"""Fine-tuning configuration of text encoders."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from zoo.training.settings import FROM_0, SEED, SHARE, Range, require_settings

RANGES = {
    "weight_decay": FROM_0,
    "warm_up": SHARE,
    "max_length": FROM_0,
    "seed": SEED,
    "batch_size": Range("2 or more", lambda n: n > 1),
}


@dataclass(frozen=True)
class TrainConfig:
    """Fine-tuning configuration.

    Attributes:
        epochs: Number of epochs.
        batch_size: Pairs per batch.
        learning_rate: Peak learning rate.
        weight_decay: Weight decay of matrices.
        warm_up: Share of all steps with linear warm-up; the rate then decays linearly to 0.
        temperature: Temperature of the cosines of in-batch negatives.
        max_length: Maximum number of tokens of a text; 0: that of the model.
        checkpoint_steps: Steps between two checkpoints.
        prompts: Prompts of the first and of the second texts, such as query,document, or one of both texts; "": the
            default prompt of the model, as at inference; ",": none.
        new_labels: Whether a classifier gets the labels of the data and a new last layer; otherwise it keeps its own.
        label_all_tokens: Whether a token classifier learns the labels of all tokens; otherwise of the first tokens of
            words.
        encoder: Model whose network and tokenizer a new model of another task starts from (`zoo train`).
        columns: Columns of tables, separated by commas; "": the default columns.
        seed: Seed of all random numbers.
        device: Device of torch, such as cuda; "": cpu.

    Raises:
        RequestError: A value is out of range.
    """

    epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 2e-5
    weight_decay: float = 0.01
    warm_up: float = 0.1
    temperature: float = 0.05
    max_length: int = 128
    checkpoint_steps: int = 25
    prompts: str = ""
    new_labels: bool = False
    label_all_tokens: bool = False
    encoder: str = ""
    columns: str = ""
    seed: int = 0
    device: str = ""

    def __post_init__(self) -> None:
        require_settings(asdict(self), RANGES)
