"""Small planted logs of Criteo's form, configurations to train on them, and what training leaves; needs the train extra."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pipelines.core.files import read_json
from zoo.recommenders.models.wide_deep import WIDE_DEEP, train  # noqa: F401

COUNTS = {"numeric": 3, "categorical": 2, "buckets": 50}
SMALL = replace(
    WIDE_DEEP.headerless.config,
    **COUNTS,
    embedding_size=4,
    hidden=(8, 6),
    batch_size=64,
    held_out=0.25,
    learning_rate=0.01,
)
TINY = replace(SMALL, epochs=3, patience=2, min_delta=0.0, l2_embeddings=(10.0,), l2_scalars=1.0)
MADE = {"model.pt", "train.json", "schema.json", "learning_curve.png", "calibration.npz", "checkpoint"}


def write_log(path: Path, rows: int = 400, seed: int = 0, labelled: bool = True) -> Path:
    """Clicks hang on the first number and the first category."""
    random = np.random.default_rng(seed)
    numbers = random.integers(0, 100, (rows, 3))
    kinds = random.integers(0, 10, (rows, 2))
    chance = 1 / (1 + np.exp(-(3 * (kinds[:, 0] > 5) + numbers[:, 0] / 30 - 3)))
    labels = (random.random(rows) < chance).astype(int)
    lines = []
    for i in range(rows):
        values = [*numbers[i].tolist(), *[f"k{kind}" for kind in kinds[i]]]
        values[1] = "" if i % 7 == 0 else values[1]
        lines.append("\t".join(map(str, [labels[i], *values] if labelled else values)))
    path.write_text("\n".join(lines) + "\n")
    return path


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    state = torch.load(folder / "model.pt", weights_only=True)["state_dict"]
    return {name: tensor.numpy() for name, tensor in state.items()}


def record_of(folder: Path) -> dict:
    """What training wrote of itself, without the seconds it took."""
    return {name: value for name, value in read_json(folder / "train.json").items() if name != "seconds"}
