"""Click models whose first layers fold into their embedding tables, and one prepared for that."""

import numpy as np

from helpers.rewriting import model
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.rewrites.driver import rewrite
from zoo.recommenders.export.rewrites import FuseParallelEmbedding, FuseParallelSum

RNG = np.random.default_rng(0)
FOLD = "FoldParallelEmbedding"
CACHES = {"L1d": 2**15, "L2": 2**20, "L3": 2**25}


def normal(*shape, scale=1.0):
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def lookups(rows, columns=None, prefix="E"):
    return " ".join(
        f"i{prefix}{f} = Gather<axis=1>(ids, c{c}) e{prefix}{f} = Gather({prefix}{f}, i{prefix}{f})"
        for f, c in enumerate(columns or range(len(rows)))
    )


def network(
    rows=(7, 3, 11),
    width=6,
    hidden=40,
    parts=None,
    columns=None,
    ids="int32",
    dense=(("x", 4),),
    wide=True,
    summed=None,
    gemm="Gemm(v, W, b)",
    tail="",
    extra=None,
):
    """(float model, feeds): lookups and numbers -> hidden -> 8 -> 1, and a sum of scalars beside it."""
    widths = width if isinstance(width, tuple) else (width,) * len(rows)
    columns = list(columns or range(len(rows)))
    order = parts or [*(f"eE{f}" for f in range(len(rows))), *(name for name, _ in dense)]
    sizes = {f"eE{f}": w for f, w in enumerate(widths)} | dict(dense)
    total = sum(sizes[each] for each in order)
    weights = {f"E{f}": normal(r, w, scale=0.3) for f, (r, w) in enumerate(zip(rows, widths, strict=True))}
    weights |= {f"c{c}": np.int64(c) for c in range(max(columns) + 1)}
    weights |= {"W": normal(total, hidden) / np.float32(np.sqrt(total)), "b": normal(hidden, scale=0.2)}
    weights |= {"V": normal(hidden, 8) / np.float32(np.sqrt(hidden)), "d": normal(8), "U": normal(8, 1), "t": normal(1)}
    if "transB" in gemm:
        weights["W"] = weights["W"].T.copy()
    lines = [
        lookups(rows, columns),
        f"v = Concat<axis=1>({', '.join(order)}) g = {gemm} h = Relu(g) m = Gemm(h, V, d) r = Relu(m) z = Gemm(r, U, "
        "t)",
    ]
    if wide:
        weights |= {f"S{f}": normal(r, 1) for f, r in enumerate(rows)}
        lines.append(lookups(rows, columns, "S"))
        terms = [f"eS{f}" for f in summed or range(len(rows))]
        lines.append(" ".join(f"s{i} = Add({f's{i - 1}' if i else 'z'}, {term})" for i, term in enumerate(terms)))
    lines.append(f"y = Sigmoid({f's{len(rows) - 1}' if wide else 'z'}) {tail}")
    inputs = [f"{ids}[n,{max(columns) + 1}] ids", *(f"float[n,{m}] {name}" for name, m in dense)]
    text = f"({', '.join(inputs)}) => (float[n,1] y) {{ {' '.join(lines)} }}"
    used = {
        name: array for name, array in (weights | (extra or {})).items() if f"{name})" in text or f"{name}," in text
    }
    values = np.zeros((200, max(columns) + 1), np.dtype(ids))
    for f, c in enumerate(columns):
        values[:, c] = RNG.integers(0, rows[f], 200)
        values[:2, c] = 0, rows[f] - 1
    feeds = {"ids": values} | {name: RNG.uniform(-0.5, 1, (200, m)).astype(np.float32) for name, m in dense}
    return model(text, **used), feeds


def prepared(found, feeds, fuse=True):
    """(rewritten graph, its table)."""
    rewrite(found, [FuseParallelEmbedding(), FuseParallelSum()] if fuse else [])
    return found, calibrate(found, [feeds], "minmax")
