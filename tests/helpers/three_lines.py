"""A small model and its family, for tests of the build stages."""

import numpy as np

from helpers.rewriting import model
from pipelines.graph import io
from pipelines.models.family import Family
from pipelines.models.stages import build
from pipelines.rewrites.shared import SHARED

TEXT = "(float[n,8] x) => (float[n,2] y) { h = MatMul(x, w) a = Add(h, b) r = Relu(a) y = MatMul(r, v) }"


def weights(seed):
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in (("w", (8, 16)), ("b", (16,)), ("v", (16, 2)))
    }


class ThreeLines(Family):
    """A family whose checkpoint is a seed."""

    def pipeline(self):
        raise NotImplementedError

    def evaluate(self, pipelines, data, on_error):
        raise NotImplementedError

    def freeze(self, folder):
        """See `Freezable`."""
        io.save(model(TEXT, **weights(int((folder / "seed.txt").read_text()))), folder / "fp32.onnx")
        with (folder / "frozen.log").open("a") as log:
            log.write("frozen\n")
        return {"nodes": 4}

    def passes(self, preprocessing):
        """See `Family`."""
        assert preprocessing == {"mean": 0}
        return [kind() for kind in SHARED]


def samples(count=50):
    return np.random.default_rng(9).standard_normal((count, 8)).astype(np.float32)


def entry(**changes):
    return ThreeLines(**{"name": "fake", "title": "t", "task": "none", "checkpoint": "seed.txt"} | changes)


def outcome(folder, **options):
    return "".join(state[0] for state in build(folder, **options).values())  # m(ade), k(ept) or g(iven), in order
