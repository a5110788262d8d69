"""Least squares on a layer of random hyperplanes: seconds of numpy."""

from dataclasses import asdict, dataclass

import numpy as np

from pipelines.core.files import write_json
from toy_sums.data import COLUMNS, read
from toy_sums.metrics import r2


@dataclass(frozen=True)
class TrainConfig:
    """The training recipe."""

    hidden: int = 64
    seed: int = 0


TRAIN = TrainConfig()


def train(data, output, *, config=TRAIN, resume=False, start_from=None, on_error="raise"):
    """Write model.npz, train.json and calibration.npz; returns {"r2"} on the training rows."""
    numbers, labels = read(data)
    first = np.random.default_rng(config.seed).normal(size=(COLUMNS, config.hidden)).astype(np.float32)
    hidden = np.maximum(numbers @ first, 0)
    second = np.linalg.lstsq(hidden, labels, rcond=None)[0].astype(np.float32)
    metrics = {"r2": r2(labels, hidden @ second)}
    output.mkdir(parents=True, exist_ok=True)
    np.savez(output / "model.npz", first=first, second=second[:, None])
    np.savez(output / "calibration.npz", numbers=numbers[:256])
    record = {"features": {"columns": COLUMNS}, "rows": len(labels), "metrics": metrics, "config": asdict(config)}
    write_json(output / "train.json", record)
    return metrics
