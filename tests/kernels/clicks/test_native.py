"""The native kernels, in every instruction set that this CPU runs, return the bits of `reference`; what is no right
input is refused.
"""

import gc
import itertools
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.clicks import native as kernels
from pipelines.kernels.clicks import reference
from pipelines.kernels.clicks.operators import FIELDS, EmbeddingLayer, LinearLayer

pytestmark = pytest.mark.skipif(extension.native() is None, reason=extension.missing())
RNG = np.random.default_rng(0)
BATCHES = (0, 1, 2, 5, 6, 7, 255, 256, 257)
REFUSED = (IndexError, TypeError, ValueError)


@pytest.fixture(params=extension.isas() or ["none"])
def isa(request):
    return request.param


def embedding(fields=3, rows=7, width=40, numbers=4, shift=None, wide=True, **changes):
    """A layer whose hidden values are spread over 0 to 255."""
    total, padded = fields * rows, -(-width // 64) * 64
    shift = shift if shift is not None else 14 if fields <= 30 else 10
    table = np.full((total, padded), 128, np.uint8)
    table[:, :width] = RNG.integers(1, 256, (total, width))
    spread = 2.0**shift * 73 * fields**0.5 + 2048 * 300 * numbers**0.5
    made = {
        "table": table,
        "columns": np.arange(fields, dtype=np.int32),
        "offsets": (np.arange(fields) * rows).astype(np.int32),
        "rows": np.full(fields, rows, np.int32),
        "weight": RNG.integers(-2000, 2001, (numbers, width)).astype(np.int16),
        "scale": (RNG.uniform(0.5, 1.5, width) * 100 / spread).astype(np.float32),
        "bias": RNG.normal(100, 50, width).astype(np.float32),
        "number_scale": np.full(numbers, 1024, np.float32),
        "shift": shift,
        "wide": RNG.standard_normal(total).astype(np.float32) if wide else None,
    }
    return EmbeddingLayer(**(made | changes))


def feeds(layer, count, dtype=np.int32):
    ids = RNG.integers(0, layer.rows, (count, layer.columns.size), dtype)
    return ids, RNG.uniform(-2.2, 2.2, (count, layer.number_scale.size)).astype(np.float32)


def dense(inputs, outputs, zero=3, low=0):
    weight = RNG.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    bias = RNG.integers(-10000, 10000, outputs).astype(np.int32)
    scale = (RNG.uniform(0.5, 1.5, outputs) * 100 / (127 * 110 * inputs**0.5)).astype(np.float32)
    return LinearLayer(weight, bias, scale, zero, low)


def same(found, expected):
    assert len(found) == len(expected)
    for each, wanted in zip(found, expected, strict=True):
        assert (each.dtype, each.shape) == (wanted.dtype, wanted.shape)
        assert each.tobytes() == wanted.tobytes()


def check(layer, isa, ids, numbers):
    """The native result, which must be that of the reference; numbers may be None where the layer has none."""
    found = kernels.parallel_embedding(layer, isa)(ids, numbers if layer.number_scale.size else None)
    same(found, reference.parallel_embedding(layer, ids, numbers))
    return found


# --- the same bits as the reference


def test_the_fastest_version_is_chosen():
    layer = embedding()
    assert extension.isas()[-1] == "portable"
    assert kernels.parallel_embedding(layer).isa == extension.isas()[0] == kernels.linear(dense(3, 2)).isa


@pytest.mark.parametrize("width", [1, 40, 64, 65, 1000, 1024])
@pytest.mark.parametrize(("fields", "numbers"), [(1, 0), (1, 1), (2, 2), (26, 13), (FIELDS, 3)])
def test_embeddings_of_all_shapes(isa, width, fields, numbers):
    layer = embedding(fields, 5, width, numbers, wide=bool(width % 2))
    native = kernels.parallel_embedding(layer, isa)
    assert native.isa == isa
    for count in (0, 1, 2, 7):
        ids, x = feeds(layer, count, np.int64 if count % 2 else np.int32)
        same(native(ids, x if numbers else None), reference.parallel_embedding(layer, ids, x))


@pytest.mark.parametrize("count", [*BATCHES, 4099])
def test_embeddings_of_all_batches(isa, count):
    layer = embedding(4, 9, 70, 3)
    for dtype in (np.int32, np.int64):
        hidden, _ = check(layer, isa, *feeds(layer, count, dtype))
        assert count < 2 or len(np.unique(hidden)) > 50


@pytest.mark.parametrize("entry", [1, 255])
@pytest.mark.parametrize(("fields", "shift"), [(FIELDS, 0), (FIELDS, 14), (1, 14), (26, 14)])
def test_sums_at_the_bounds_of_16_and_32_bits(isa, fields, shift, entry):
    """All rows at their end; numbers at theirs, with weights that reach the last int32 before the overflow."""
    room = (2**31 - 1 - (127 << shift) * fields) // 2048
    weights = np.array([min(32767, room - 32767 * k) if room > 32767 * k else 0 for k in range(34)], np.int16)
    weight = np.repeat(weights[:, None] * np.int16(1 if entry == 255 else -1), 65, axis=1)
    layer = embedding(
        fields,
        2,
        65,
        34,
        shift,
        weight=weight,
        number_scale=np.ones(34, np.float32),
        scale=np.full(65, 2.0**-23, np.float32),
    )
    layer.table[:, :65] = entry
    assert 2**31 - 2048 <= layer.reach().max() < 2**31
    ids, _ = feeds(layer, 7)
    for reach in (3000, -3000, 2047):
        check(layer, isa, ids, np.full((7, 34), reach, np.float32))
        check(replace(layer, scale=np.full(65, 2.0**-3, np.float32)), isa, ids, np.full((7, 34), reach, np.float32))


def test_numbers_that_are_none_or_beyond_all_bounds(isa):
    odd = [
        np.nan,
        np.inf,
        -np.inf,
        3.4e38,
        -3.4e38,
        1e-45,
        -0.0,
        0.5 / 1024,
        1.5 / 1024,
        -0.5 / 1024,
        2.0,
        -2.0,
        2.0005,
        1.9995,
        2047.5 / 1024,
    ]
    layer = embedding(2, 3, 65, 5)
    x = RNG.choice(np.array(odd, np.float32), (300, 5))
    ids, _ = feeds(layer, 300)
    with np.errstate(over="ignore"):
        check(layer, isa, ids, x)
        check(
            replace(layer, number_scale=np.array([0, 1e30, -3, 1e-38, 3.4e38], np.float32)), isa, ids, np.nan_to_num(x)
        )


def test_results_at_a_half_round_to_even(isa):
    layer = embedding(1, 255, 64, 0, 0, scale=np.full(64, 0.5, np.float32), bias=np.full(64, 64, np.float32))
    layer.table[:] = np.arange(1, 256, dtype=np.uint8)[:, None]
    hidden, _ = check(layer, isa, np.arange(255)[:, None], np.zeros((255, 0), np.float32))
    assert hidden[127:132, 0].tolist() == [64, 64, 65, 66, 66]


def test_fields_may_share_columns_and_rows_and_skip_columns(isa):
    of = embedding(4, 6, 40, 2)
    layer = replace(
        of,
        columns=np.array([5, 1, 1, 3], np.int32),
        offsets=np.array([0, 20, 3, 0], np.int32),
        rows=np.array([24, 4, 4, 1], np.int32),
    )
    ids = RNG.integers(-(2**31), 2**31, (50, 7), np.int64)  # what no field reads is not looked at
    ids[:, [5, 1, 3]] = RNG.integers(0, [24, 4, 1], (50, 3))
    check(layer, isa, ids, feeds(layer, 50)[1])


@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 5, 63, 64, 65, 130, 1024])
@pytest.mark.parametrize("outputs", [1, 7, 8, 9, 15, 16, 17, 64, 65, 100])
def test_linear_layers_of_all_shapes(isa, inputs, outputs):
    for zero, low in ((None, 0), (0, 0), (3, 0), (128, 128), (255, 7)):
        layer = dense(inputs, outputs, zero, low)
        native = kernels.linear(layer, isa)
        assert native.isa == isa
        for count in (0, 1, 7):
            x = RNG.integers(0, 256, (count, inputs), np.uint8)
            same([native(x)], [reference.linear(layer, x)])


@pytest.mark.parametrize(("inputs", "outputs"), [(7, 9), (70, 130), (64, 5), (33, 3)])
def test_linear_layers_of_all_batches(isa, inputs, outputs):
    for zero in (None, 5):
        layer = dense(inputs, outputs, zero)
        native = kernels.linear(layer, isa)
        for count in (*range(16), 63, 64, 65, 239, 240, 241, *BATCHES, 4099):
            x = RNG.integers(0, 256, (count, inputs), np.uint8)
            same([native(x)], [reference.linear(layer, x)])


@pytest.mark.parametrize("active", [0, 0.002, 0.02, 0.3])
def test_inputs_that_are_mostly_zero(isa, active):
    layer, real = dense(1021, 70), dense(1021, 70, None)
    for count in (1, 2, 5, 6, 13, 250):
        x = np.where(RNG.random((count, 1021)) < active, RNG.integers(1, 256, (count, 1021)), 0).astype(np.uint8)
        x[:, -1] = RNG.integers(0, 2, count)
        for each in (layer, real):
            same([kernels.linear(each, isa)(x)], [reference.linear(each, x)])


@pytest.mark.parametrize("outputs", [3, 70])
@pytest.mark.parametrize("sign", [1, -1])
def test_linear_sums_at_their_bounds(isa, outputs, sign):
    """All inputs 255, all weights at their end, and a bias that fills what an int32 has left."""
    for inputs, weight, kinds in ((2, 127, 4), (1024, 127, 4), (66000, 127, 1), (65700, 128, 1)):
        if (weight, sign) == (128, 1):
            continue
        reach = 255 * weight * inputs
        bias = np.full(outputs, sign * (2**31 - 1 - reach), np.int32)
        for zero, scale in ((None, 1.0), (0, 2.0**-23), (255, 2.0**-2), (100, -(2.0**-2)))[:kinds]:
            w = np.full((inputs, outputs), sign * weight, np.int8)
            layer = LinearLayer(w, bias, np.full(outputs, scale, np.float32), zero, 0)
            x = np.full((7 if inputs < 9999 else 1, inputs), 255, np.uint8)
            same([kernels.linear(layer, isa)(x)], [reference.linear(layer, x)])


def network(isa, sizes=(65, 33, 9, 1), fields=5, numbers=3, wide=True, sigmoid=False):
    """(native network, the same by the reference)."""
    first = embedding(fields, 8, sizes[0], numbers, wide=wide)
    layers = [dense(a, b, low=3) for a, b in itertools.pairwise(sizes[:-1])] + [dense(sizes[-2], 1, None)]
    native = kernels.click_network(
        kernels.parallel_embedding(first, isa), [kernels.linear(each, isa) for each in layers], sigmoid
    )

    def expected(ids, x):
        value, total = reference.parallel_embedding(first, ids, x)
        for layer in layers:
            value = reference.linear(layer, value)
        return value + total if wide else value

    return first, native, expected


@pytest.mark.parametrize("count", BATCHES)
@pytest.mark.parametrize(
    ("sizes", "numbers"), [((65, 33, 9, 1), 3), ((1, 1), 0), ((64, 200, 1), 1), ((40, 3, 130, 2, 1), 2)]
)
@pytest.mark.parametrize("wide", [True, False])
def test_networks_are_their_layers(isa, sizes, numbers, wide, count):
    first, native, expected = network(isa, sizes, numbers=numbers, wide=wide)
    ids, x = feeds(first, count)
    same([native(ids, x if numbers else None)], [expected(ids, x)])


def test_the_sigmoid_is_that_of_float_in_every_version():
    results = []
    ids, x = RNG.integers(0, 8, (4099, 5)), RNG.uniform(-2, 2, (4099, 3)).astype(np.float32)
    for isa in extension.isas():
        globals()["RNG"] = np.random.default_rng(3)  # the same layers for each
        _, native, expected = network(isa, sigmoid=True)
        results.append(native(ids, x))
        exact = 1 / (1 + np.exp(-expected(ids, x).astype(np.float64)))
        np.testing.assert_allclose(results[-1], exact, rtol=1e-6)
    for each in results:
        same([each], [results[0]])


# --- wrong inputs

WRONG = [
    None,
    1.5,
    "text",
    b"bytes",
    [],
    [[0, 1, 2]],
    object(),
    np.zeros((), np.int32),
    np.zeros(3, np.int32),
    np.zeros((2, 3, 1), np.int32),
    *(
        np.zeros((5, 3), kind)
        for kind in ("i1", "u1", "i2", "u4", "u8", "f2", "f8", "c8", "?", "O", "U3", ">i4", ">i8", ">f4", "M8[s]")
    ),
    np.zeros((5, 3), [("a", "i4")]),
    np.ma.masked_array(np.zeros((5, 3), np.float64)),
]
LAYER, DENSE = embedding(3, 7, 40, 4), dense(40, 9)
GOOD = feeds(LAYER, 5)


def kernels_of(isa):
    """(kernel, right arguments, results) of every kind, made once a version."""
    if isa not in MADE:
        first, native, expected = network(isa, (40, 9, 1), 3, 4)
        ids, x = feeds(first, 5)
        given = RNG.integers(0, 256, (5, 40), np.uint8)
        MADE[isa] = [
            (kernels.parallel_embedding(LAYER, isa), GOOD, reference.parallel_embedding(LAYER, *GOOD)),
            (native, (ids, x), (expected(ids, x),)),
            (kernels.linear(DENSE, isa), (given,), (reference.linear(DENSE, given),)),
        ]
    return MADE[isa]


MADE = {}


def works(kernel, arguments, expected):
    found = kernel(*arguments)
    same(found if isinstance(found, tuple) else [found], expected)


@pytest.mark.parametrize(
    "wrong",
    WRONG,
    ids=lambda wrong: f"{type(wrong).__name__} {getattr(wrong, 'dtype', '')} {getattr(wrong, 'shape', '')}",
)
def test_what_is_no_right_array_is_refused_and_the_kernel_still_works(isa, wrong):
    for kernel, arguments, expected in kernels_of(isa):
        for place in range(len(arguments)):
            with pytest.raises(REFUSED):
                kernel(*arguments[:place], wrong, *arguments[place + 1 :])
        for some in ((), (*arguments, 1)):
            with pytest.raises(TypeError):
                kernel(*some)
        works(kernel, arguments, expected)


@pytest.mark.parametrize("wrong", [-1, 7, 2**31 - 1, -(2**31), 2**32, 2**32 + 1, -(2**63), 2**63 - 1, 2**40])
def test_ids_that_are_no_rows_are_refused(isa, wrong):
    for dtype in (np.int32, np.int64) if -(2**31) <= wrong < 2**31 else (np.int64,):
        for (kernel, (good, x), expected), rows in zip(kernels_of(isa)[:2], (7, 8), strict=True):
            ids = good.astype(dtype)
            ids[3, 1] = wrong if wrong != 7 else rows
            with pytest.raises(IndexError, match=rf"found id {ids[3, 1]} in row 3, column 1; wanted 0 to {rows - 1}"):
                kernel(ids, x)
            works(kernel, (good, x), expected)


def test_an_id_is_refused_in_every_place(isa):
    layer = embedding(2, 3, 40, 0)
    native = kernels.parallel_embedding(layer, isa)
    for count, row, column in ((1, 0, 0), (256, 255, 1), (257, 256, 1), (4099, 4098, 0)):
        ids = np.zeros((count, 2), np.int64)
        ids[row, column] = 3
        with pytest.raises(IndexError, match=f"row {row}, column {column}"):
            native(ids, None)


def layouts(array):
    """The same values as arrays that do not lie as the kernels want them: none of them may be read as if they did."""
    yield np.repeat(array, 2, axis=0)[::2]
    yield np.repeat(array, 2, axis=1)[:, ::2]
    yield np.ascontiguousarray(array[::-1])[::-1]
    yield np.ascontiguousarray(array[:, ::-1])[:, ::-1]
    yield np.broadcast_to(array[:1], array.shape)
    yield np.asfortranarray(array)
    if array.itemsize > 1:
        yield np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


def test_other_layouts_are_refused_and_read_only_arrays_taken(isa):
    for kernel, arguments, expected in kernels_of(isa):
        for place, array in enumerate(arguments):
            for other in layouts(array):
                with pytest.raises(TypeError, match="layout"):
                    kernel(*arguments[:place], other, *arguments[place + 1 :])
        kept = [array.copy() for array in arguments]
        for array in kept:
            array.flags.writeable = False
        works(kernel, kept, expected)


shapes = st.tuples(
    st.sampled_from([0, 1, 2, 5, 6, 241, 256, 257, 4099]), st.sampled_from([0, 1, 2, 3, 4, 5, 39, 40, 41])
)
dtypes = st.sampled_from([np.int32, np.int64, np.float32, np.uint8, np.int8, np.float64, np.uint32])


@st.composite
def arrays(draw):
    """Any array: of any shape, dtype and layout, with values in and out of all ranges."""
    (rows, columns), dtype = draw(shapes), np.dtype(draw(dtypes))
    values = draw(st.sampled_from([[0], [0, 1, 2, 6], [0, 1, -1], [7, 0], [2**32 + 1, 0], [255, 3]]))
    made = np.resize(np.array(values, np.int64).astype(dtype), (rows, columns))
    match draw(
        st.sampled_from(["plain", "plain", "plain", "fortran", "strided", "reversed", "read-only", "flat", "deep"])
    ):
        case "fortran":
            return np.asfortranarray(made)
        case "strided":
            return np.repeat(made, 2, axis=1)[:, ::2]
        case "reversed":
            return made[::-1]
        case "read-only":
            made.flags.writeable = False
        case "flat":
            return made.ravel()
        case "deep":
            return made[:, :, None]
    return made


@given(st.data())
def test_any_arrays_give_an_error_or_the_right_result(data):
    """Never a crash, and no wrong result: what is taken is what the reference takes."""
    isa = data.draw(st.sampled_from(extension.isas()))
    for kernel, arguments, expected in kernels_of(isa):
        given_arrays = [data.draw(arrays() | st.just(good)) for good in arguments]
        if data.draw(st.booleans()) and given_arrays[0].ndim:  # as many numbers as ids
            given_arrays[1:] = [np.resize(good, (len(given_arrays[0]), *good.shape[1:])) for good in arguments[1:]]
        try:
            found = kernel(*given_arrays)
        except REFUSED as error:
            assert str(error)
        else:
            assert [(each.ndim, each.shape[1]) for each in given_arrays[1:]] == [
                (2, good.shape[1]) for good in arguments[1:]
            ]
            if expected[0].shape[1] == 40:
                same(found, reference.parallel_embedding(LAYER, *given_arrays))
            elif len(arguments) == 1:
                same([found], [reference.linear(DENSE, *given_arrays)])
            else:
                assert found.shape == (len(given_arrays[0]), 1)
        works(kernel, arguments, expected)


def test_the_shapes_of_ids_numbers_and_inputs_are_checked(isa):
    (native, (ids, x), _), (net, _, _), (linear, _, _) = kernels_of(isa)
    for kernel in (native, net):
        for a, b in (
            (ids[:4], x),
            (ids, x[:4]),
            (ids, np.ascontiguousarray(x[:, :3])),
            (np.ascontiguousarray(ids[:, :2]), x),
            (ids, None),
        ):
            with pytest.raises(ValueError):
                kernel(a, b)
        for columns in (0, 2):
            with pytest.raises(ValueError, match="columns"):
                kernel(np.zeros((0, columns), np.int32), np.zeros((0, 4), np.float32))
    for columns in (0, 39, 41):
        with pytest.raises(ValueError, match="width"):
            linear(np.zeros((5, columns), np.uint8))


# --- objects


def test_a_version_that_is_not_there_is_refused():
    for name in ("neon", "AVX512", " ", "avx512\0"):
        with pytest.raises(ValueError, match="no kernels for"):
            kernels.parallel_embedding(LAYER, name)
        with pytest.raises(ValueError, match="no kernels for"):
            kernels.linear(DENSE, name)


def test_networks_whose_layers_do_not_follow_one_another_are_refused(isa):
    first = kernels.parallel_embedding(LAYER, isa)
    last, wide, middle = (kernels.linear(each, isa) for each in (dense(9, 1, None), dense(9, 2, None), DENSE))
    for layers in ([], [middle], [last], [middle, middle, last], [middle, wide], [middle, last, last], [last, middle]):
        with pytest.raises(ValueError, match="follow"):
            kernels.click_network(first, layers, False)
    for layers in ([middle, None], [None], [1], ["x"], [first]):
        with pytest.raises(TypeError):
            kernels.click_network(first, layers, False)
    for other in (None, middle, 1):
        with pytest.raises(TypeError):
            kernels.click_network(other, [middle, last], False)
    assert kernels.click_network(first, [middle, last], False)(*GOOD).shape == (5, 1)


def test_the_extension_itself_refuses_arrays_that_do_not_fit():
    """Beneath `EmbeddingLayer` and `LinearLayer`, which check more."""
    module = extension.native()
    names = ("table", "columns", "offsets", "rows", "weight", "scale", "bias", "number_scale", "shift", "wide")
    right = {name: getattr(LAYER, name) for name in names} | {"isa": ""}
    module.ParallelEmbedding(**right)
    for name in names[:8] + names[9:]:
        array = right[name]
        for wrong in (array[:-1], array.astype(np.float64), array[..., None], np.repeat(array, 2, axis=0)[::2]):
            with pytest.raises((TypeError, ValueError)):
                module.ParallelEmbedding(**(right | {name: wrong}))
    for name, wrong in (
        ("shift", -1),
        ("shift", 15),
        ("columns", np.array([-1, 0, 1], np.int32)),
        ("offsets", np.array([-1, 7, 14], np.int32)),
        ("offsets", np.array([0, 7, 15], np.int32)),
        ("rows", np.array([0, 7, 7], np.int32)),
        ("rows", np.array([7, 7, 2**31 - 1], np.int32)),
        ("columns", np.zeros(0, np.int32)),
    ):
        with pytest.raises(ValueError, match="fit"):
            module.ParallelEmbedding(**(right | {name: wrong}))
    weight, bias, scale = np.ones((3, 2), np.int8), np.ones(2, np.int32), np.ones(2, np.float32)
    for wrong in (
        (weight, bias[:1], scale),
        (weight, bias, scale[:1]),
        (weight[:0], bias, scale),
        (weight[:, :0], bias[:0], scale[:0]),
    ):
        with pytest.raises(ValueError, match="fit"):
            module.Linear(*wrong, None, 0, "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"table": np.zeros((21, 40), np.uint8)}, "table uint8 [21, 40]; wanted uint8 [21, 64]"),
        ({"table": np.zeros((21, 64), np.int8)}, "table int8"),
        ({"scale": np.ones(40)}, "scale float64"),
        ({"wide": np.zeros(20, np.float32)}, "wide float32 [20]; wanted float32 [21]"),
        ({"rows": np.full(3, 8, np.int32)}, "fields outside its table of 21 rows"),
        ({"offsets": np.array([-1, 7, 14], np.int32)}, "fields outside"),
        ({"columns": np.array([-1, 0, 0], np.int32)}, "fields outside"),
        ({"shift": 15}, "shifts by 15; wanted 0 to 14"),
        ({"shift": -1}, "shifts by -1"),
        ({"bias": np.full(40, np.nan, np.float32)}, "not finite"),
        ({"number_scale": np.full(4, np.inf, np.float32)}, "not finite"),
        ({"scale": np.full(40, 1e5, np.float32)}, "beyond 32 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_embedding_layers_are_validated(changes, said):
    with pytest.raises(RequestError) as found:
        replace(LAYER, **changes)
    assert said in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize("fields", [0, FIELDS + 1])
def test_embedding_layers_of_too_many_fields_are_refused(fields):
    none = np.zeros(fields, np.int32)
    with pytest.raises(RequestError, match=f"{fields} fields; an int16 sum holds 1 to {FIELDS}"):
        replace(LAYER, columns=none, offsets=none, rows=none + 1)


def test_embedding_layers_that_could_overflow_are_refused():
    heavy = np.full((33, 40), 32767, np.int16)
    with pytest.raises(RequestError, match="overflow 32 bits; use a smaller shift"):
        replace(LAYER, weight=heavy, number_scale=np.ones(33, np.float32))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": np.zeros(3, np.int8)}, "wanted [inputs, outputs]"),
        ({"weight": np.zeros((0, 9), np.int8)}, "wanted [inputs, outputs]"),
        ({"weight": np.zeros((40, 9), np.uint8)}, "weight uint8"),
        ({"bias": np.zeros(9, np.int64)}, "bias int64"),
        ({"scale": np.zeros(8, np.float32)}, "scale float32 [8]; wanted float32 [9]"),
        ({"zero_point": 256}, "zero point 256"),
        ({"low": -1}, "lower bound -1"),
        ({"bias": np.full(9, 2**31 - 1, np.int32)}, "overflow 32 bits"),
        ({"scale": np.full(9, np.inf, np.float32)}, "overflow"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_linear_layers_are_validated(changes, said):
    with pytest.raises(RequestError) as found:
        replace(DENSE, **changes)
    assert said in str(found.value) and "\n" not in str(found.value)


def test_arrays_of_a_layer_may_lie_in_any_way(isa):
    """All but the table's are copied in any case."""
    layer = replace(
        LAYER,
        weight=np.asfortranarray(LAYER.weight),
        scale=np.repeat(LAYER.scale, 2)[::2],
        bias=next(unaligned(LAYER.bias)),
    )
    same(kernels.parallel_embedding(layer, isa)(*GOOD), reference.parallel_embedding(LAYER, *GOOD))
    x = RNG.integers(0, 256, (5, 40), np.uint8)
    same([kernels.linear(replace(DENSE, weight=np.asfortranarray(DENSE.weight)), isa)(x)], [reference.linear(DENSE, x)])


def unaligned(array):
    yield np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


def test_the_table_stays_in_its_file_and_all_else_is_copied(isa, tmp_path):
    path = tmp_path / "table"
    LAYER.table.tofile(path)
    table = np.memmap(path, np.uint8, "r+", shape=LAYER.table.shape)
    arrays = {
        name: getattr(LAYER, name).copy()
        for name in ("columns", "offsets", "rows", "weight", "scale", "bias", "number_scale", "wide")
    }
    shown = np.memmap(path, np.uint8, "r", shape=LAYER.table.shape)
    native = kernels.parallel_embedding(replace(LAYER, table=shown, **arrays), isa)
    del shown
    for array in arrays.values():
        array[:] = 0
    gc.collect()
    same(native(*GOOD), reference.parallel_embedding(LAYER, *GOOD))
    table[:, :40] = 77  # what is written to the file is what the kernel sees
    assert not np.array_equal(native(*GOOD)[0], reference.parallel_embedding(LAYER, *GOOD)[0])
    same(native(*GOOD), reference.parallel_embedding(replace(LAYER, table=np.asarray(table)), *GOOD))


def test_what_an_object_needs_lives_as_long_as_it_does(isa):
    net = network(isa, (40, 9, 1), 3, 4)[1]
    expected = net(*GOOD)
    hidden, wide = kernels.parallel_embedding(replace(LAYER, table=LAYER.table.copy()), isa)(
        *GOOD
    )  # outlive their kernel
    gc.collect()
    kept = [np.full(1 << size, 255, np.uint8) for size in range(6, 20)]  # takes what was freed
    same([net(*GOOD)], [expected])
    same((hidden, wide), reference.parallel_embedding(LAYER, *GOOD))
    hidden[:] = kept[0][0]  # results are the caller's own


# --- threads


def test_one_object_in_many_threads_gives_the_same_bits(isa):
    first, native, expected = network(isa, (130, 70, 9, 1), 6, 3)
    kernel = kernels.parallel_embedding(first, isa)
    batches = [feeds(first, count) for count in (1, 300, 17, 600, 256, 5)]
    wanted = [(expected(*each), reference.parallel_embedding(first, *each)) for each in batches]

    def work(number):
        for turn in range(12):
            place = (number + turn) % len(batches)
            same([native(*batches[place])], wanted[place][:1])
            same(kernel(*batches[place]), wanted[place][1])
            with pytest.raises(IndexError):
                native(batches[place][0] - 8, batches[place][1])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_other_threads_run_during_a_call():
    """While the lock is held, no Python code runs: a thread that counts would stand still for the whole call."""
    layer = dense(1024, 512)
    native = kernels.linear(layer, "portable")
    x = RNG.integers(0, 256, (2000, 1024), np.uint8)
    counted, over = [], threading.Event()

    def count():
        while not over.is_set():
            counted.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    while not counted:
        time.sleep(0.001)
    begin = time.perf_counter()
    native(x)
    end = time.perf_counter()
    over.set()
    thread.join()
    during = sum(begin < each < end for each in counted)
    assert during >= 3


# --- where there are no kernels


def test_without_the_extension_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pipelines.kernels._native", None)
    assert extension.native() is None and extension.isas() == []
    assert "install a C++17 compiler" in extension.missing() and "\n" not in extension.missing()
    with pytest.raises(RequestError, match="there are no native kernels here: .*; install a C"):
        kernels.linear(DENSE)


def test_the_extension_is_found_from_another_process_in_any_folder(tmp_path):
    code = "from pipelines.kernels import extension as found; print(found.missing() or found.isas()[-1])"
    found = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "portable"


@pytest.mark.skipif(not extension.isas(), reason=extension.missing())
def test_ids_that_change_during_a_call_are_never_followed(isa):
    """Another thread writes rows that do not exist into the batch between the check of the whole of it and the reading
    of a part.
    """
    kernel = kernels.parallel_embedding(embedding(3, 5, 64, 0), isa)
    ids, done = np.zeros((4099, 3), np.int32), threading.Event()

    def spoil():
        while not done.is_set():
            ids[:, 1] = 2**31 - 1
            ids[:, 1] = 0

    other = threading.Thread(target=spoil)
    other.start()
    outcomes = set()
    for _ in range(300):
        try:
            kernel(ids, None)
            outcomes.add("right")
        except IndexError:
            outcomes.add("refused")
    done.set()
    other.join()
    assert outcomes
