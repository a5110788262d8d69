"""Programs of the native recommender kernels, random ones, and inputs for them."""

import itertools

import numpy as np

from pipelines.kernels.recommenders import native
from pipelines.kernels.recommenders.operators import LinearLayer
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import Dense, LookupSum, Mixed, Numbers, Total


def first_layer(rng, fields=3, rows=7, width=40, numbers=4, shift=6, x=2, out=1):
    """A folded layer whose bytes are spread over 0 to 255; numbers are in slot `x`."""
    padded = -(-width // 64) * 64
    table = np.full((fields * rows, padded), 128, np.uint8)
    table[:, :width] = rng.integers(1, 256, (fields * rows, width))
    spread = 2.0**shift * 73 * fields**0.5 + 2048 * 300 * numbers**0.5
    return Mixed(
        x=x if numbers else -1,
        first=0,
        weight=rng.integers(-2000, 2001, (numbers, padded)).astype(np.int16),
        scale=(rng.uniform(0.5, 1.5, padded) * 100 / spread).astype(np.float32),
        bias=rng.normal(100, 50, padded).astype(np.float32),
        outs=((out, width, True),),
        columns=np.arange(fields, dtype=np.int32),
        offsets=(np.arange(fields) * rows).astype(np.int32),
        rows=np.full(fields, rows, np.int32),
        shift=shift,
        table=table,
    )


def dense(rng, inputs, outputs, zero=3, low=0):
    weight = rng.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    bias = rng.integers(-10000, 10000, outputs).astype(np.int32)
    scale = (rng.uniform(0.5, 1.5, outputs) * 100 / (127 * 110 * inputs**0.5)).astype(np.float32)
    return LinearLayer(weight, bias, scale, zero, low)


def network(rng, sizes=(40, 9, 1), fields=3, rows=7, numbers=4, sigmoid=False):
    """A program: a folded layer, linear ones down to one float, a sum of looked-up floats."""
    slots = [("f4", 1), ("u1", sizes[0]), ("i2", max(numbers, 1)), ("f4", 1)]
    steps = [first_layer(rng, fields, rows, sizes[0], numbers)]
    if numbers:
        steps.insert(0, Numbers(2, 0, np.arange(numbers, dtype=np.int32), np.full(numbers, 1024, np.float32)))
    last = 1
    for inputs, outputs in itertools.pairwise(sizes):
        slots.append(("f4" if outputs == 1 else "u1", outputs))
        steps.append(Dense(last, len(slots) - 1, dense(rng, inputs, outputs, None if outputs == 1 else 3)))
        last = len(slots) - 1
    floats = rng.standard_normal(fields * rows).astype(np.float32)
    steps.append(LookupSum(3, floats, *(getattr(steps[-len(sizes)], name) for name in ("columns", "offsets", "rows"))))
    steps.append(Total(0, ((last, 1.0), (3, 1.0)), 0.0, sigmoid))
    return ClickProgram(np.full(fields, rows, np.int32), numbers, 0, tuple(slots), tuple(steps), (0,))


def feeds(rng, program, count, dtype=np.int32):
    ids = rng.integers(0, program.rows, (count, program.rows.size), dtype)
    return ids, rng.uniform(-2.2, 2.2, (count, program.numbers)).astype(np.float32), None


def dense_program(layer, x):
    """A program of `layer` alone, in which id i chooses row i of x uint8 [n, K]; bytes come out as floats, by a layer
    that passes them on.
    """
    inputs, outputs = layer.weight.shape
    table = np.pad(x.astype(np.int16), ((0, 1), (0, -inputs % 64)))
    width = table.shape[1]
    chosen = Mixed(
        -1,
        0,
        np.zeros((0, width), np.int16),
        np.ones(width, np.float32),
        np.zeros(width, np.float32),
        ((0, inputs, True),),
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
        np.full(1, len(table), np.int32),
        0,
        table,
    )
    kind = "f4" if layer.zero_point is None else "u1"
    slots, steps = [("u1", inputs), (kind, outputs)], [chosen, Dense(0, 1, layer)]
    if kind == "u1":
        same_bytes = LinearLayer(
            np.eye(outputs, dtype=np.int8), np.zeros(outputs, np.int32), np.ones(outputs, np.float32)
        )
        slots.append(("f4", outputs))
        steps.append(Dense(1, 2, same_bytes))
    return ClickProgram(np.full(1, len(table), np.int32), 0, 0, tuple(slots), tuple(steps), (len(slots) - 1,))


def check_dense(layer, isa, x):
    """The native layer must return the bits of `LinearLayer.compute`."""
    ids = np.arange(len(x), dtype=np.int32)[:, None]
    output = native.click_program(dense_program(layer, x), isa)(ids, None, None)
    same([output], [layer.compute(x).astype(np.float32)])


def same(found, expected):
    assert len(found) == len(expected)
    for array, wanted in zip(found, expected, strict=True):
        assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
        assert array.tobytes() == wanted.tobytes()


def ranked(made, shared, arrays, positions):
    """Results of the user of the first row and of precomputed items, those of all rows, at these positions.

    made: the native program of these shared inputs, and of items.
    """
    items = made.items(len(arrays[0]))
    user, rows = [None] * len(arrays), [None] * len(arrays)
    for index, (array, columns) in enumerate(zip(arrays, (shared.ids, shared.numbers, shared.scales), strict=True)):
        if array is not None:
            rows[index], user[index] = array.copy(), np.zeros_like(array[:1])
            rows[index][:, list(columns)], user[index][:, list(columns)] = 0, array[0, list(columns)]
    middle = len(arrays[0]) // 3
    for first, end in ((0, middle), (middle, len(arrays[0]))):
        made.fill(items, first, *(None if feed is None else feed[first:end] for feed in rows))
    assert items.nbytes == len(items) * made.item_bytes >= len(items) * made.score_bytes
    return made.rank(items, positions, *user)
