"""A small click model folded for the native kernels, and batches for it."""

import numpy as np
import pytest

from helpers.rewriting import model
from pipelines.core import machine
from pipelines.engines.native.forms import Forms
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from zoo.recommenders.export.rewrites import FuseParallelEmbedding, FuseParallelSum
from zoo.recommenders.lowering.lower import lower

ROWS = (20_000, 3, 200)  # so many that the table lies in native.onnx.data
needs_kernels = pytest.mark.skipif(extension.native() is None, reason=extension.missing())


def folded(*, dense=True, wide=True, sigmoid=False, ids="int32"):
    """A click model of `ROWS` as fold makes it for the kernels, and its float form."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    fields, width = len(ROWS), 8 * len(ROWS) + (4 if dense else 0)
    weights = {f"E{f}": normal(rows, 8) for f, rows in enumerate(ROWS)} | {f"c{f}": np.int64(f) for f in range(fields)}
    weights |= {
        "W": normal(width, 64) / np.float32(width**0.5),
        "b": normal(64),
        "V": normal(64, 16) / np.float32(8),
        "d": normal(16),
    }
    weights |= {"U": normal(16, 1) / np.float32(4), "t": normal(1)}
    lines = [f"i{f} = Gather<axis=1>(ids, c{f}) e{f} = Gather(E{f}, i{f})" for f in range(fields)]
    parts = [*(f"e{f}" for f in range(fields)), *(["x"] if dense else [])]
    lines.append(
        f"v = Concat<axis=1>({', '.join(parts)}) g = Gemm(v, W, b) h = Relu(g) m = Gemm(h, V, d) r = Relu(m) z = "
        "Gemm(r, U, t)"
    )
    last = "z"
    if wide:
        weights |= {f"S{f}": normal(rows, 1) for f, rows in enumerate(ROWS)}
        for f in range(fields):
            lines.append(f"j{f} = Gather<axis=1>(ids, c{f}) k{f} = Gather(S{f}, j{f}) s{f} = Add({last}, k{f})")
            last = f"s{f}"
    lines.append(f"y = {'Sigmoid' if sigmoid else 'Identity'}({last})")
    inputs = f"{ids}[n,{fields}] ids{', float[n,4] x' if dense else ''}"
    float32 = model(f"({inputs}) => (float[n,1] y) {{ {' '.join(lines)} }}", **weights)
    rewrite(float32, [FuseParallelEmbedding(), FuseParallelSum()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "caches", lambda: {"L1d": 2**15, "L2": 2**22, "L3": 2**25})
        result, report = lower(float32, calibrate(float32, [feeds(1000, dense=dense, ids=ids)]), QuantRecipe())
    assert report["fold"], report
    return result, float32


def feeds(count, *, dense=True, ids="int32", seed=1):
    rng = np.random.default_rng(seed)
    batch = {"ids": rng.integers(0, ROWS, (count, len(ROWS)), np.dtype(ids))}
    return batch | ({"x": rng.uniform(-1, 1, (count, 4)).astype(np.float32)} if dense else {})


def one_line(error, *words):
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def first_form(path):
    """The engine native in the form of `by_reference`."""
    return f"native:{Forms(path).names[0]}"


def by_reference(path, batch):
    """The logits in numpy."""
    program = click_program(io.load_mapped(path).graph[0])
    (scores,) = reference.run(program, batch["ids"], batch["x"])
    return scores
