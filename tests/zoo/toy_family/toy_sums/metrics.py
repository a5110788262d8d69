"""R squared, and what int8 changes of it."""

import numpy as np

from pipelines.analysis.metrics import against_fp32
from toy_sums.data import read


def evaluate(pipelines, data, on_error="raise"):
    """R squared of every precision on the same rows, and its difference to fp32."""
    numbers, labels = read(data)
    outputs = {name: each.predict({"numbers": numbers})["sum"][:, 0] for name, each in pipelines.items()}
    compared = against_fp32(
        outputs,
        lambda sums: {"r2": r2(labels, sums)},
        lambda fp32, other: {"difference": {"r2": r2(labels, other) - r2(labels, fp32)}},
    )
    return {"samples": len(labels), **compared}


def r2(labels, sums):
    """The share of the labels' variance that the sums explain."""
    return float(1 - np.square(labels - sums).sum() / np.square(labels - labels.mean()).sum())
