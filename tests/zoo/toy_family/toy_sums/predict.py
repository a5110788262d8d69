"""Rows of numbers to sums."""

import numpy as np

from pipelines.data.tables import writing
from pipelines.models.pipeline import GraphPipeline
from toy_sums.data import COLUMNS, read


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
        return {"numbers": (np.dtype(np.float32), (None, COLUMNS))}

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
        numbers = np.resize(read(data)[0], (count, COLUMNS)) if data else np.ones((count, COLUMNS))
        return ["\t".join(map(str, row)) for row in numbers.tolist()]
