"""Rows of numbers to sums."""

from pathlib import Path

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.data.tables import writing
from pipelines.models.pipeline import GraphPipeline


def read(data):
    """(numbers float32 [n, 8], labels float32 [n] or None) of a file, a list with it, or a list of lines: eight numbers,
    tab separated, before them the label (their sum), where it is known.
    """
    if isinstance(data, list) and len(data) == 1 and "\t" not in data[0]:
        data = data[0]
    lines = Path(data).read_text().splitlines() if isinstance(data, str | Path) else data
    try:
        values = np.array([line.split("\t") for line in lines], np.float32)
    except ValueError as error:
        raise RequestError(f"found rows that are no 8 numbers: {error}") from error
    if values.ndim != 2 or values.shape[1] not in (8, 9):
        raise RequestError(f"found rows of the shape {values.shape}, expected 8 numbers in each")
    return np.ascontiguousarray(values[:, -8:]), values[:, 0] if values.shape[1] == 9 else None


class SumPipeline(GraphPipeline):
    """Sums rows; see `zoo.pipeline`."""

    def preprocess(self, raw):
        """Lines or a file -> {"numbers": float32 [n, 8]}."""
        return {"numbers": read(raw)[0]}

    def postprocess(self, out):
        """The sums as a list."""
        return out["sum"][:, 0].tolist()

    @property
    def input_ports(self):
        """dtype and shape of every graph input."""
        return {"numbers": (np.dtype(np.float32), (None, 8))}

    def run(self, inputs, output, on_error="raise", *, digits=2):
        """A file of rows to a file of sums, rounded to `digits` places."""
        sums = self(inputs)
        with writing(output, {"sum": np.float64}) as write:
            write({"sum": np.round(np.array(sums, np.float64), digits)})
        return {"sums": len(sums), "largest": max(sums), "engine": self.engine, "precision": self.precision}

    def calibration(self, data, count, on_error="raise"):
        """The first `count` rows as model inputs."""
        return {name: array[:count] for name, array in self.preprocess(data).items()}

    def example(self, count, data=None):
        """`count` raw rows for a benchmark."""
        numbers = np.resize(read(data)[0], (count, 8)) if data else np.ones((count, 8))
        return ["\t".join(map(str, row)) for row in numbers.tolist()]
