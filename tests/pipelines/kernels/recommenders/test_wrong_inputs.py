"""What is no right input of the native click kernels is refused, and the kernel still works."""

import functools

import numpy as np
import pytest
from helpers.click_layers import feeds, network, same
from hypothesis import given
from hypothesis import strategies as st

from pipelines.kernels import extension
from pipelines.kernels.recommenders import native, reference

pytestmark = pytest.mark.skipif(extension.native() is None, reason=extension.missing())
REFUSED = (IndexError, TypeError, ValueError)


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


NETWORK = network(np.random.default_rng(0))


@functools.cache
def kernel_of(isa):
    """(kernel of ids and numbers, right arguments, results)."""
    kernel, arrays = native.click_program(NETWORK, isa), feeds(np.random.default_rng(1), NETWORK, 5)
    return (lambda ids, x: kernel(ids, x, None)), arrays[:2], reference.run(NETWORK, *arrays)


def works(kernel, arguments, expected):
    outputs = kernel(*arguments)
    same(outputs if isinstance(outputs, tuple) else [outputs], expected)


@pytest.mark.parametrize(
    "wrong",
    WRONG,
    ids=lambda wrong: f"{type(wrong).__name__} {getattr(wrong, 'dtype', '')} {getattr(wrong, 'shape', '')}",
)
def test_what_is_no_right_array_is_refused_and_the_kernel_still_works(rng, isa, wrong):
    kernel, arguments, expected = kernel_of(isa)
    for place in range(len(arguments)):
        with pytest.raises(REFUSED):
            kernel(*arguments[:place], wrong, *arguments[place + 1 :])
    for passed in ((), (*arguments, 1)):
        with pytest.raises(TypeError):
            kernel(*passed)
    works(kernel, arguments, expected)


@pytest.mark.parametrize("wrong", [-1, 7, 2**31 - 1, -(2**31), 2**32, 2**32 + 1, -(2**63), 2**63 - 1, 2**40])
def test_ids_that_are_no_rows_are_refused(rng, isa, wrong):
    for dtype in (np.int32, np.int64) if -(2**31) <= wrong < 2**31 else (np.int64,):
        kernel, (good, x), expected = kernel_of(isa)
        ids = good.astype(dtype)
        ids[3, 1] = wrong
        with pytest.raises(IndexError, match=rf"found id {wrong} in row 3, column 1; expected 0 to 6"):
            kernel(ids, x)
        works(kernel, (good, x), expected)


def test_an_id_is_refused_in_every_place(rng, isa):
    kernel = native.click_program(network(rng, (40, 1), 2, 3, 0), isa)
    for count, row, column in ((1, 0, 0), (256, 255, 1), (257, 256, 1), (4099, 4098, 0)):
        ids = np.zeros((count, 2), np.int64)
        ids[row, column] = 3
        with pytest.raises(IndexError, match=f"row {row}, column {column}"):
            kernel(ids, None, None)


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


def test_other_layouts_are_refused_and_read_only_arrays_taken(rng, isa):
    kernel, arguments, expected = kernel_of(isa)
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
    kernel, arguments, expected = kernel_of(data.draw(st.sampled_from(extension.isas())))
    given_arrays = [data.draw(arrays() | st.just(good)) for good in arguments]
    if data.draw(st.booleans()) and given_arrays[0].ndim:  # as many numbers as ids
        given_arrays[1:] = [np.resize(good, (len(given_arrays[0]), *good.shape[1:])) for good in arguments[1:]]
    try:
        output = kernel(*given_arrays)
    except REFUSED as error:
        assert str(error)
    else:
        assert given_arrays[1].shape == (len(given_arrays[0]), NETWORK.numbers)
        same([output], reference.run(NETWORK, *given_arrays))
    works(kernel, arguments, expected)


def test_the_shapes_of_ids_and_numbers_are_checked(rng, isa):
    kernel, (ids, x), _ = kernel_of(isa)
    for a, b in (
        (ids[:4], x),
        (ids, x[:4]),
        (ids, np.ascontiguousarray(x[:, :3])),
        (np.ascontiguousarray(ids[:, :2]), x),
        (ids, None),
    ):
        with pytest.raises(ValueError):
            kernel(a, b)
    for columns in (0, 2, 4):
        with pytest.raises(ValueError, match="columns"):
            kernel(np.zeros((0, columns), np.int32), np.zeros((0, 4), np.float32))
