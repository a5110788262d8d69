"""Rows of numbers: eight, tab separated, before them the label (their sum), where it is known."""

from pathlib import Path

import numpy as np

from pipelines.core.errors import RequestError

COLUMNS = 8


def read(data):
    """(numbers float32 [n, 8], labels float32 [n] or None) of a file, a list with it, or a list of lines."""
    if isinstance(data, list) and len(data) == 1 and "\t" not in data[0]:
        data = data[0]
    lines = Path(data).read_text().splitlines() if isinstance(data, str | Path) else data
    try:
        values = np.array([line.split("\t") for line in lines], np.float32)
    except ValueError as error:
        raise RequestError(f"found rows that are no {COLUMNS} numbers: {error}") from error
    if values.ndim != 2 or values.shape[1] not in (COLUMNS, COLUMNS + 1):
        raise RequestError(f"found rows of the shape {values.shape}, wanted {COLUMNS} numbers in each")
    labelled = values.shape[1] > COLUMNS
    return np.ascontiguousarray(values[:, labelled:]), values[:, 0] if labelled else None
