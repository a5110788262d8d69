"""Click programs: the native kernels return the bits of `reference.run` in every instruction set; what does not fit is
refused.
"""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from helpers.arrays import floats
from helpers.tiers import one_in

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.recommenders import from_graph, native, reference
from pipelines.kernels.recommenders.operators import LinearLayer
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import (
    CODES,
    SLACK,
    CodeBytes,
    ColumnBytes,
    Cross,
    CrossLayer,
    Dense,
    Dots,
    Factorization,
    Gather,
    Leaky,
    LookupSum,
    Mixed,
    Mixture,
    Normalize,
    Numbers,
    Product,
    Quantize,
    Tanh,
    Total,
    Weighted,
)

needs_kernels = pytest.mark.skipif(extension.native() is None, reason=extension.missing())
ROWS = np.array([9, 9, 9, 5, 0, 9], np.int32)  # column 4 is not read
BATCHES = (0, 1, 2, 3, 4, 5, 63, 64, 65, 200)


def codes(rng, *shape, most=CODES):
    return rng.integers(-most, most + 1, shape).astype(np.int16)


def table(rng, rows, stride, most=CODES):
    return codes(rng, rows * stride + SLACK, most=most)


def mixed(rng, x, inputs, outs, fields=0, wide=False, first=0, shift=3, spread=1.0):
    """A step whose results are spread over the range of bytes, codes or about 1."""
    width = sum(-(-columns // 64) * 64 for _, columns, _ in outs)
    weight = rng.integers(-200, 201, (inputs, width)).astype(np.int16)
    rows = None
    if fields:
        most = (2**15 - 1) // fields
        rows = codes(rng, 9 * fields, width, most=most) if wide else rng.integers(1, 256, (9 * fields, width), np.uint8)
    reach = 100.0 * 2000 * max(inputs, 1) ** 0.5 + (50 << shift)
    return Mixed(
        x,
        first,
        weight,
        (rng.uniform(0.5, 1.5, width) * spread / reach).astype(np.float32),
        floats(rng, width, scale=spread / 4),
        tuple(outs),
        np.array([0, 1, 2, 3, 5][:fields], np.int32),
        (np.arange(fields) * 9).astype(np.int32),
        np.full(fields, 9, np.int32),
        shift,
        rows,
    )


def looked_up(rng, width, *more, extra=()):
    """(slots, steps): numbers and lookups of every kind as codes in slot 0."""
    slots = [("i2", 3 + 4 * width), *extra]
    steps = [
        Numbers(0, 0, np.arange(3, dtype=np.int32), np.array([900, 1.5, 1e30], np.float32)),
        Gather(0, 3, table(rng, 9, width), 9, width, width, 0),
        Gather(0, 3 + width, table(rng, 9, width + 2), 9, width + 2, width, 0, 3, "sum", 0.37),
        Gather(0, 3 + 2 * width, table(rng, 5, width), 5, width, width, 3, 1, "mean", 0.9, 1),
        Gather(0, 3 + 3 * width, table(rng, 9, width), 9, width, width, 1, 2, "max"),
    ]
    return slots, [*steps, *more]


def program(slots, steps, outputs):
    return ClickProgram(ROWS, 3, 2, tuple(slots), tuple(steps), tuple(outputs))


def feeds(rng, count, dtype=np.int32):
    ids = rng.integers(0, [9, 9, 9, 5, 2**31 - 1, 9], (count, 6)).astype(dtype)
    return ids, floats(rng, count, 3), rng.uniform(0, 1.5, (count, 2)).astype(np.float32)


def check(made, isa, *arrays):
    outputs = native.click_program(made, isa)(*arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = reference.run(made, *arrays)
    assert len(outputs) == len(wanted)
    for array, expected in zip(outputs, wanted, strict=True):
        assert (array.dtype, array.shape) == (np.float32, expected.shape)
        assert array.tobytes() == expected.tobytes()
    return outputs


# --- the same bits as the reference


@needs_kernels
@pytest.mark.parametrize("width", [1, 8, 15, 16, 17, 33, 64, 70])
def test_lookups(rng, isa, width):
    total = 3 + 4 * width
    slots, steps = looked_up(rng, width, mixed(rng, 0, total, [(1, total, False)]), extra=[("f4", total)])
    for count in BATCHES:
        check(program(slots, steps, [1]), isa, *feeds(rng, count, np.int64 if count % 2 else np.int32))


@needs_kernels
@pytest.mark.parametrize("fields", [0, 1, 5])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("inputs", one_in(2, [0, 1, 2, 35]))
def test_layers_that_share_their_rows(rng, isa, fields, wide, inputs):
    if not fields and not inputs:
        return
    sizes = ((1, 40), (2, 64), (3, 70), (4, 5), (5, 130))
    kinds = ("u1", "i2", "f4", "i2", "f4")
    slots, steps = looked_up(rng, 8, extra=[(kind, size) for kind, (_, size) in zip(kinds, sizes, strict=True)])
    outs = [(slot, size, kind == "i2" and slot == 4) for kind, (slot, size) in zip(kinds, sizes, strict=True)]
    layer = mixed(rng, 0 if inputs else -1, inputs, outs, fields, wide, 0, 4, 200.0)
    slots += [("f4", 9), ("f4", 1), ("f4", 1)]
    dense = LinearLayer(
        rng.integers(-127, 128, (40, 9)).astype(np.int8), np.zeros(9, np.int32), np.full(9, 1e-4, np.float32)
    )
    steps += [layer, Dense(1, 6, dense), Weighted(2, 1, floats(rng, 60), 7), Weighted(4, 0, floats(rng, 5), 8)]
    for count in BATCHES:
        check(program(slots, steps, [3, 5, 6, 7, 8]), isa, *feeds(rng, count))


@needs_kernels
@pytest.mark.parametrize("wide", [False, True])
def test_layers_of_several_blocks_of_columns(rng, isa, wide):
    """Blocks are 256 columns; bytes are stored four vectors at a time."""
    sizes, kinds = ((1, 700), (2, 257), (3, 15)), ("u1", "i2", "f4")
    slots, steps = looked_up(rng, 8, extra=[(kind, size) for kind, (_, size) in zip(kinds, sizes, strict=True)])
    layer = mixed(rng, 0, 35, [(slot, size, False) for slot, size in sizes], 5, wide, 0, 4, 200.0)
    layer = replace(layer, bias=np.where(np.arange(layer.bias.size) % 50 == 0, np.float32(3e38), layer.bias))
    dense = LinearLayer(
        rng.integers(-127, 128, (700, 9)).astype(np.int8), np.zeros(9, np.int32), np.full(9, 1e-4, np.float32)
    )
    steps += [layer, Dense(1, 4, dense), Weighted(2, 0, floats(rng, 257), 5)]
    made = program([*slots, ("f4", 9), ("f4", 1)], steps, [3, 4, 5])
    for count in BATCHES:
        check(made, isa, *feeds(rng, count))


@needs_kernels
@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize(("fields", "inputs"), [(5, 35), (5, 0), (0, 35), (0, 0)])
def test_sums_of_bytes_beside_codes_and_rows(rng, isa, fields, inputs, ahead):
    sizes, kinds = ((1, 70), (2, 40), (3, 15)), ("u1", "i2", "f4")
    slots, steps = looked_up(rng, 8, extra=[(kind, size) for kind, (_, size) in zip(kinds, sizes, strict=True)])
    slots += [("u1", 41), ("f4", 256), ("f4", 9), ("f4", 1)]
    rows = rng.integers(0, 256, 9 * 13, np.uint8)
    steps += [Gather(4, 0, rows, 9, 13, 11, 5), CodeBytes(0, 2, 4, 11, 30)]
    steps.append(
        Dense(
            4,
            5,
            LinearLayer(
                codes(rng, 41, 256, most=127).astype(np.int8),
                codes(rng, 256).astype(np.int32),
                floats(rng, 256, scale=1e-3).ravel(),
            ),
        )
    )
    layer = mixed(rng, 0 if inputs else -1, inputs, [(s, n, s == 2) for s, n in sizes], fields, False, 0, 4, 200.0)
    steps.append(replace(layer, added=5, ahead=ahead))
    dense = LinearLayer(
        codes(rng, 70, 9, most=127).astype(np.int8), np.zeros(9, np.int32), np.full(9, 1e-4, np.float32)
    )
    steps += [Dense(1, 6, dense), Weighted(2, 0, floats(rng, 40), 7)]
    for count in BATCHES:
        check(program(slots, steps, [3, 5, 6, 7]), isa, *feeds(rng, count))


@needs_kernels
def test_pairs_of_inputs_without_weights_are_left_out(rng, isa):
    slots, steps = looked_up(rng, 8, extra=[("f4", 64)])
    layer = mixed(rng, 0, 35, [(1, 64, False)], 5)
    weight = layer.weight.copy()
    weight[5:29] = 0
    for matrix in (weight, np.zeros_like(weight)):
        made = program(slots, [*steps, replace(layer, weight=matrix)], [1])
        for count in BATCHES:
            check(made, isa, *feeds(rng, count))


def lookup_sum(rng, fields=5):
    """The floats of `fields` columns that stand behind each other in one table."""
    columns = np.array([0, 1, 2, 3, 5], np.int32)[:fields]
    offsets = np.arange(fields, dtype=np.int32) * 9
    return LookupSum(0, floats(rng, 9 * fields), columns, offsets, ROWS[columns])


@needs_kernels
@pytest.mark.parametrize("fields", [1, 2, 5])
def test_sums_of_looked_up_floats(rng, isa, fields):
    made = program([("f4", 1)], [lookup_sum(rng, fields)], [0])
    for count in BATCHES:
        check(made, isa, *feeds(rng, count, np.int64 if count % 2 else np.int32))


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": np.array([0, 4], np.int32)},
        {"columns": np.array([0, 6], np.int32)},
        {"columns": np.array([0], np.int32)},
        {"rows": np.array([9, 8], np.int32)},
        {"rows": np.array([9, 0], np.int32)},
        {"offsets": np.array([0, 10], np.int32)},
        {"offsets": np.array([-1, 9], np.int32)},
        {"table": np.full(18, np.inf, np.float32)},
        {"table": np.zeros(18, np.int16)},
        {"out": 1},
    ],
)
def test_sums_of_looked_up_floats_that_do_not_fit_are_refused(rng, changes):
    with pytest.raises(RequestError):
        program([("f4", 1)], [replace(lookup_sum(rng, 2), **changes)], [0])


@needs_kernels
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("wide", [False, True])
def test_sums_at_their_bounds(rng, isa, sign, wide):
    """Every code, row and weight at its end, the sums just below 2^31."""
    weight = np.full((4, 64), sign * 32767, np.int16)
    top = 2**15 // 5 - 1 if wide else 127
    rows = np.full((9, 64), sign * top + (0 if wide else 128), np.int16 if wide else np.uint8)
    layer = replace(
        mixed(rng, 0, 4, [(1, 64, False)], 5, wide, 0, 14),
        weight=weight,
        table=rows,
        offsets=np.zeros(5, np.int32),
        scale=np.full(64, 2.0**-20, np.float32),
        bias=np.zeros(64, np.float32),
    )
    steps = [Gather(0, 0, np.full(9 * 4 + SLACK, CODES, np.int16), 9, 4, 4, 0), layer]
    made = ClickProgram(ROWS, 3, 2, (("i2", 4), ("f4", 64)), tuple(steps), (1,))
    check(made, isa, *feeds(rng, 7))
    with pytest.raises(RequestError, match="overflow"):
        replace(
            made,
            steps=(steps[0], replace(layer, weight=np.full((17, 64), 32767, np.int16))),
            slots=(("i2", 17), ("f4", 64)),
        )


@needs_kernels
@pytest.mark.parametrize("width", [1, 30, 64, 97])
@pytest.mark.parametrize("dead", [0.0, 0.7, 1.0])
def test_zeros_behind_a_relu_are_passed_over(rng, isa, width, dead):
    """Numbers stand behind the lookup here."""
    first = mixed(rng, 0, 12, [(1, width, True)], 2, True, spread=2000.0)
    unused = rng.random(first.bias.size) < dead
    first = replace(first, bias=np.where(unused, np.float32(-1e9), first.bias))
    steps = [
        Gather(0, 0, table(rng, 9, 9), 9, 9, 9, 0),
        Numbers(0, 9, np.arange(3, dtype=np.int32), np.array([900, 1.5, 1e30], np.float32)),
        first,
        mixed(rng, 1, width, [(2, 40, True)], spread=2000.0),
        mixed(rng, 2, 40, [(3, 5, False)]),
    ]
    for count in BATCHES:
        check(program([("i2", 12), ("i2", width), ("i2", 40), ("f4", 5)], steps, [3]), isa, *feeds(rng, count))


@needs_kernels
@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 20])
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_long_lists_at_their_bounds(rng, isa, count, sign):
    made = ClickProgram(
        np.full(count, 9, np.int32),
        0,
        0,
        (("i2", 33), ("f4", 1)),
        (
            Gather(0, 0, np.full(9 * 33 + SLACK, sign * CODES, np.int16), 9, 33, 33, 0, count, "sum", 1 / count),
            Weighted(0, 0, np.ones(33, np.float32), 1),
        ),
        (1,),
    )
    (output,) = check(made, isa, rng.integers(0, 9, (5, count)).astype(np.int32), None, None)
    np.testing.assert_allclose(output, sign * 33 * CODES, rtol=1e-3)


@needs_kernels
@pytest.mark.parametrize("width", [1, 7, 16, 19, 40, 128])
def test_interactions(rng, isa, width):
    offsets = np.array([3, 3 + width, 3 + 3 * width], np.int32)
    slots, steps = looked_up(
        rng,
        width,
        Factorization(0, 1, offsets, width, 1e-6),
        Dots(0, 2, 0, offsets, width, np.array([1e-3, 0, 3e-4], np.float32)),
        mixed(rng, 2, 3, [(3, 4, False)]),
        extra=[("f4", 1), ("i2", 3), ("f4", 4)],
    )
    for count in (0, 1, 5, 65):
        check(program(slots, steps, [1, 3]), isa, *feeds(rng, count))


@needs_kernels
@pytest.mark.parametrize("count", [2, 3, 16, 17, 18, 40, 128])
def test_dots_of_many_vectors(rng, isa, count):
    offsets = rng.integers(0, 3 + 4 * 20 - 11, count).astype(np.int32)
    pairs = count * (count - 1) // 2
    slots, steps = looked_up(
        rng,
        20,
        Dots(0, 1, 0, offsets, 11, floats(rng, pairs, scale=1e-5)),
        Weighted(1, 0, floats(rng, pairs), 2),
        extra=[("i2", pairs), ("f4", 1)],
    )
    check(program(slots, steps, [2]), isa, *feeds(rng, 7))


@needs_kernels
@pytest.mark.parametrize("width", [2, 16, 23])
def test_crosses(rng, isa, width):
    total = 3 + 4 * width
    slots, steps = looked_up(
        rng,
        width,
        mixed(rng, 0, total, [(1, total, False)], 2, spread=0.5),
        Cross(0, 1, 2, True, 0.4, 3),
        mixed(rng, 3, total, [(1, total, False)], spread=0.5),
        Cross(0, 1, 2, False, 0.3, 3, 4, floats(rng, total)),
        Weighted(3, 0, floats(rng, total), 5),
        extra=[("f4", total), ("f4", total), ("i2", total), ("f4", 1), ("f4", 1)],
    )
    for count in (0, 1, 6, 65):
        check(program(slots, steps, [4, 5]), isa, *feeds(rng, count))


@needs_kernels
@pytest.mark.parametrize("width", [2, 16, 23])
def test_bytes_of_crosses_and_of_codes_have_a_scale_of_each_column(rng, isa, width):
    total = 3 + 4 * width
    whole = LinearLayer(
        codes(rng, total, total, most=127).astype(np.int8),
        codes(rng, total).astype(np.int32),
        floats(rng, total, scale=1e-5).ravel(),
    )
    factors = np.where(np.arange(total) % 5 == 0, np.float32(3e38), floats(rng, total, scale=0.05).ravel())
    slots, steps = looked_up(
        rng,
        width,
        ColumnBytes(0, 0, 1, floats(rng, total, scale=0.05).ravel()),
        Dense(1, 2, whole),
        Cross(0, 2, 3, True, bytes=4, factors=factors),
        Dense(4, 2, whole),
        Cross(0, 2, 3, False, 0.3, 5, 6, floats(rng, total), 4, floats(rng, total, scale=0.05).ravel()),
        Dense(4, 2, whole),
        extra=[("u1", total), ("f4", total), ("f4", total), ("u1", total), ("i2", total), ("f4", 1)],
    )
    for count in (0, 1, 6, 65):
        check(program(slots, steps, [2, 6]), isa, *feeds(rng, count))


@needs_kernels
@pytest.mark.parametrize("width", [2, 63, 65, 130])
def test_cross_layers_in_panels_are_a_layer_and_a_cross(rng, isa, width):
    total = 3 + 4 * width
    layer = LinearLayer(
        codes(rng, total, total, most=127).astype(np.int8),
        codes(rng, total).astype(np.int32),
        floats(rng, total, scale=1e-5).ravel(),
    )
    factors = [floats(rng, total, scale=0.05).ravel() for _ in range(3)]
    extra = [("u1", total), ("f4", total), ("u1", total), ("i2", total), ("f4", total), ("f4", total)]
    slots, steps = looked_up(rng, width, ColumnBytes(0, 0, 1, factors[0]), extra=extra)
    joined = [
        CrossLayer(1, layer, 0, 2, True, bytes=3, factors=factors[1]),
        CrossLayer(3, layer, 0, 2, False, 0.3, 4, 1, factors[2]),
    ]
    apart = [
        Dense(1, 6, layer),
        Cross(0, 6, 2, True, bytes=3, factors=factors[1]),
        Dense(3, 6, layer),
        Cross(0, 6, 2, False, 0.3, 4, bytes=1, factors=factors[2]),
    ]
    for count in (0, 1, 6, 65):
        feed = feeds(rng, count)
        fused, expected = (program(slots, [*steps, *layers, Dense(1, 5, layer)], [2, 5]) for layers in (joined, apart))
        check(fused, isa, *feed)
        for a, b in zip(*(native.click_program(network, isa)(*feed) for network in (fused, expected)), strict=True):
            assert a.tobytes() == b.tobytes()


@needs_kernels
@pytest.mark.parametrize("width", [1, 16, 30])
def test_vectors_of_length_one(rng, isa, width):
    slots, steps = looked_up(
        rng,
        4,
        mixed(rng, 0, 19, [(1, width, False), (2, width, False)]),
        Normalize(1, 3, 1e-12),
        Normalize(2, 4, 0.0, 0.5, width == 16),
        Product(3, 4, 5),
        Quantize(2, 6, 0, 1000.0, True),
        Quantize(1, 6, width, 1000.0),
        Weighted(6, 0, floats(rng, 2 * width), 7),
        Total(8, ((5, 1.0), (7, 0.25)), -0.5, False),
        extra=[("f4", width)] * 4 + [("f4", 1), ("i2", 2 * width), ("f4", 1), ("f4", 1)],
    )
    for count in (0, 1, 6, 65):
        check(program(slots, steps, [3, 4, 8]), isa, *feeds(rng, count))


@needs_kernels
@pytest.mark.parametrize("width", [1, 16, 30])
def test_slopes_below_zero(rng, isa, width):
    slots, steps = looked_up(
        rng,
        4,
        mixed(rng, 0, 19, [(1, width, False)]),
        Leaky(1, 2, floats(rng, width)),
        Quantize(2, 3, 0, 1000.0),
        Weighted(3, 0, floats(rng, width), 4),
        extra=[("f4", width)] * 2 + [("i2", width), ("f4", 1)],
    )
    for count in (0, 1, 6, 65):
        check(program(slots, steps, [2, 4]), isa, *feeds(rng, count))
    with pytest.raises(RequestError, match="Leaky"):
        program(slots, [*steps[:-3], Leaky(1, 2, floats(rng, width + 1)), *steps[-2:]], [2])


@needs_kernels
@pytest.mark.parametrize(("experts", "width"), [(1, 3), (2, 16), (3, 11), (20, 2)])
def test_a_mixture_of_experts(rng, isa, experts, width):
    size = experts * width
    slots, steps = looked_up(
        rng,
        4,
        mixed(rng, 0, 19, [(1, size, False), (2, experts, False)], spread=3.0),
        Tanh(1, 3),
        Mixture(3, 2, 4),
        Quantize(4, 5, 0, 1000.0),
        Weighted(5, 0, floats(rng, size), 6),
        extra=[("f4", size), ("f4", experts), ("f4", size), ("f4", size), ("i2", size), ("f4", 1)],
    )
    for count in (0, 1, 6, 65):
        check(program(slots, steps, [3, 4, 6]), isa, *feeds(rng, count))
    outputs = reference.run(program(slots, steps, [1, 2, 3, 4]), *feeds(rng, 50))
    np.testing.assert_allclose(outputs[2], np.tanh(outputs[0].astype(np.float64)), atol=3e-7)
    weights = np.exp(outputs[1].astype(np.float64))
    weights = np.repeat(weights / weights.sum(axis=1, keepdims=True), width, axis=1)
    np.testing.assert_allclose(outputs[3], outputs[2] * weights, atol=1e-6)


@needs_kernels
def test_the_sigmoid_is_that_of_float(rng, isa):
    slots, steps = looked_up(rng, 4, Weighted(0, 0, floats(rng, 19, scale=1e-3), 1), extra=[("f4", 1)] * 3)
    made = program(slots, [*steps, Total(2, ((1, 1.0),), 0.1, False), Total(3, ((1, 1.0),), 0.1, True)], [2, 3])
    logit, sigmoid = native.click_program(made, isa)(*feeds(rng, 300))
    np.testing.assert_allclose(sigmoid, 1 / (1 + np.exp(-logit.astype(np.float64))), rtol=1e-6)


@needs_kernels
def test_inputs_that_are_none_or_beyond_all_bounds(rng, isa):
    slots, steps = looked_up(rng, 8, mixed(rng, 0, 35, [(1, 35, False)]), extra=[("f4", 35)])
    ids, _, _ = feeds(rng, 60)
    odd = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        check(program(slots, steps, [1]), isa, ids, rng.choice(odd, (60, 3)), rng.choice(odd, (60, 2)))


@needs_kernels
@pytest.mark.parametrize("width", [1, 16, 37])
def test_numbers_times_vectors(rng, isa, width):
    columns = rng.integers(0, 3, width).astype(np.int32)
    steps = [
        Numbers(0, 0, np.arange(3, dtype=np.int32), np.array([900, 1.5, 1e30], np.float32)),
        Numbers(0, 3, columns, floats(rng, width, scale=700)),
        mixed(rng, 0, 3 + width, [(1, 20, False)]),
    ]
    for count in (0, 1, 5, 65):
        check(program([("i2", 3 + width), ("f4", 20)], steps, [1]), isa, *feeds(rng, count))


# --- wrong inputs


def small(rng):
    slots, steps = looked_up(
        rng, 4, Weighted(0, 0, floats(rng, 19), 1), Total(2, ((1, 1.0),), 0.0, False), extra=[("f4", 1)] * 2
    )
    return program(slots, steps, [2])


@needs_kernels
@pytest.mark.parametrize("wrong", [-1, 9, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63)])
def test_ids_that_are_no_rows_are_refused(rng, isa, wrong):
    kernel, (ids, numbers, scales) = native.click_program(small(rng), isa), feeds(rng, 200, np.int64)
    kernel(ids, numbers, scales)
    ids[130, 2] = wrong
    with pytest.raises(IndexError, match=f"found id {wrong} in row 130, column 2; expected 0 to 8"):
        kernel(ids, numbers, scales)


@needs_kernels
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_right_array_is_refused(rng, isa, place):
    kernel, good = native.click_program(small(rng), isa), feeds(rng, 5)
    wrong = [None, "text", [], np.zeros((5, 3), np.float64), np.zeros((5, 99), good[place].dtype), good[place][:4]]
    wrong += [np.repeat(good[place], 2, axis=0)[::2], good[place].ravel()]
    for argument in wrong if place else wrong[:-2]:
        if argument is good[place][:4] or (place == 0 and isinstance(argument, np.ndarray) and len(argument) == 4):
            continue
        with pytest.raises((TypeError, ValueError)):
            kernel(*good[:place], argument, *good[place + 1 :])
    for arguments in ((), good[:1], (*good, 1)):
        with pytest.raises((TypeError, ValueError)):
            kernel(*arguments)
    kernel(*good)


def step_of(made, kind):
    return next(step for step in made.steps if isinstance(step, kind))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Numbers, {"scale": np.ones(2, np.float32)}),
        (Numbers, {"columns": np.array([0, 1, 3], np.int32)}),
        (Numbers, {"columns": np.array([0, 1, -1], np.int32)}),
        (Numbers, {"columns": np.zeros(0, np.int32), "scale": np.zeros(0, np.float32)}),
        (Numbers, {"position": 1}),
        (Numbers, {"out": 1}),
        (Numbers, {"scale": np.full(3, np.nan, np.float32)}),
        (Gather, {"position": 17}),
        (Gather, {"position": -1}),
        (Gather, {"column": 6}),
        (Gather, {"column": 4}),
        (Gather, {"rows": 8}),
        (Gather, {"width": 5}),
        (Gather, {"count": 2}),
        (Gather, {"pool": "least"}),
        (Gather, {"pool": "mean"}),
        (Gather, {"pool": "mean", "mean": 2}),
        (Gather, {"table": np.zeros(9 * 4, np.int16)}),
        (Gather, {"table": np.full(9 * 4 + SLACK, CODES + 1, np.int16)}),
        (Weighted, {"first": 1}),
        (Weighted, {"x": 1}),
        (Weighted, {"x": 7}),
        (Total, {"terms": ((0, 1.0),)}),
        (Total, {"terms": ((2, 1.0),)}),
        (Total, {"bias": float("inf")}),
    ],
)
def test_steps_that_do_not_fit_are_refused(rng, kind, changes):
    made = small(rng)
    index = next(i for i, step in enumerate(made.steps) if isinstance(step, kind))
    steps = [*made.steps[:index], replace(made.steps[index], **changes), *made.steps[index + 1 :]]
    with pytest.raises(RequestError):
        replace(made, steps=tuple(steps))


@pytest.mark.parametrize(
    "changes",
    [
        {"first": 16},
        {"first": -1},
        {"shift": 15},
        {"weight": np.zeros((4, 128), np.int16)},
        {"scale": np.zeros(128, np.float32)},
        {"outs": ((1, 41, False),)},
        {"outs": ((1, 40, True),)},
        {"outs": ()},
        {"columns": np.array([0, 6], np.int32)},
        {"columns": np.array([0, 4], np.int32)},
        {"offsets": np.array([0, 10], np.int32)},
        {"rows": np.array([9, 8], np.int32)},
        {"table": None},
        {"table": np.zeros((18, 128), np.uint8)},
        {"table": np.full((18, 64), 2**14, np.int16)},
        {"scale": np.full(64, np.inf, np.float32)},
    ],
)
def test_mixed_layers_that_do_not_fit_are_refused(rng, changes):
    slots, steps = looked_up(rng, 4, mixed(rng, 0, 4, [(1, 40, False)], 2), extra=[("f4", 40)])
    program(slots, steps, [1])
    with pytest.raises(RequestError):
        program(slots, [*steps[:-1], replace(steps[-1], **changes)], [1])


def test_what_is_read_was_written_in_order(rng):
    slots, steps = looked_up(rng, 4, Weighted(0, 0, floats(rng, 19), 1), extra=[("f4", 1)])
    program(slots, steps, [1])
    for wrong in (steps[:-1], [steps[-1], *steps[:-1]], [steps[0], steps[2], steps[1], *steps[3:]]):
        with pytest.raises(RequestError):
            program(slots, wrong, [1])


# --- in a graph


def test_a_node_holds_a_program(rng):
    made = small(rng)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 17}, name="g")
    ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["n", 6]))
    node = from_graph.program_node(graph, made, [ids, None, None], ["y"], "p", {"ids", "y"})
    assert node.outputs[0].name == "y" and list(node.outputs[0].shape)[1] == 1
    network = from_graph.click_program(node)
    arrays = feeds(rng, 9)
    assert reference.run(network, *arrays)[0].tobytes() == reference.run(made, *arrays)[0].tobytes()
    assert [type(step) for step in network.steps] == [type(step) for step in made.steps]
    for text in ("", "{}", "[]", node.attributes["program"].as_string().replace("Total", "Sum")):
        node.attributes["program"] = ir.AttrString("program", text)
        with pytest.raises(RequestError, match="build the model again"):
            from_graph.click_program(node)
    with pytest.raises(RequestError, match="expected ClickProgram"):
        from_graph.click_program(ir.node("Relu", [ids]))
