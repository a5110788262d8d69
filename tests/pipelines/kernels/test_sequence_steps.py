"""Target attention and Dice in the native kernels: the bits of the numpy reference on every instruction set."""

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.recommenders import reference, steps
from pipelines.kernels.recommenders.native import SharedInputs, click_program
from pipelines.kernels.recommenders.program import ClickProgram

WIDTH, FIRST, SECOND, ROWS, PLACES = 12, 20, 6, 9, 7
PADDING = ROWS - 1
ISAS = extension.isas() if extension.native() is not None else []


def floats(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def padded(x):
    return np.pad(x, ((0, 0), (0, -x.shape[1] % steps.LANES)))


def unit(rng, width, plain):
    none = np.zeros(0, np.float32)
    return (none, none, none, floats(rng, width)) if plain else tuple(floats(rng, width) for _ in range(4))


def program_of(seed=0, softmax=False, plain=False, **changed):
    rng = np.random.default_rng(seed)
    one, two = unit(rng, FIRST, plain), unit(rng, SECOND, plain)
    arrays = {"items": padded(floats(rng, ROWS, WIDTH)), "keys": padded(floats(rng, ROWS, FIRST))}
    arrays |= {"queries": padded(floats(rng, ROWS, FIRST)), "product": padded(floats(rng, WIDTH, FIRST))}
    arrays |= {"hidden": floats(rng, FIRST, SECOND), "bias": floats(rng, SECOND), "score": floats(rng, SECOND)}
    for name, values in (("one", one), ("two", two)):
        arrays |= {
            f"{name}_{part}": value for part, value in zip(("scale", "shift", "rise", "slope"), values, strict=True)
        }
    attention = {"out": 0, "column": 0, "begin": 2, "count": PLACES, "padding": PADDING, **arrays}
    attention |= {"score_bias": 0.25, "softmax": softmax} | changed
    after = steps.Dice(0, 1, *unit(rng, WIDTH, plain))
    rows = np.array([ROWS, 0, *[ROWS] * PLACES], np.int32)
    slots = (("f4", WIDTH), ("f4", WIDTH))
    return ClickProgram(rows, 0, 0, slots, (steps.TargetAttention(**attention), after), (0, 1))


def ids_of(count, seed=1):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, PADDING, (count, 2 + PLACES), np.int32)
    lengths = rng.integers(0, PLACES + 1, count)
    ids[:, 2:][np.arange(PLACES) >= lengths[:, None]] = PADDING
    ids[0, 2:] = PADDING  # an empty sequence
    return ids


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_same_bits(isa, softmax, plain):
    program, ids = program_of(softmax=softmax, plain=plain), ids_of(150)
    expected = reference.run(program, ids)
    found = click_program(program, isa)(ids, None, None)
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()
    assert not expected[0][0].any() and np.isfinite(expected[1]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_alone_and_with_others(isa):
    made, ids = click_program(program_of(), isa), ids_of(70)
    together = made(ids, None, None)
    for at in (0, 3, 69):
        assert all(
            a.tobytes() == b[at : at + 1].tobytes()
            for a, b in zip(made(ids[at : at + 1], None, None), together, strict=True)
        )


@pytest.mark.parametrize("isa", ISAS)
def test_one_history_and_many_targets(isa):
    ids = ids_of(130)
    ids[:, 2:] = ids[5, 2:]
    shared = click_program(program_of(), isa, SharedInputs(ids=range(2, 2 + PLACES)))
    for one, other in zip(shared(ids, None, None), click_program(program_of(), isa)(ids, None, None), strict=True):
        assert one.tobytes() == other.tobytes()


def test_gaps_between_items_are_left_out():
    ids = ids_of(1)
    ids[0, 2:] = [1, PADDING, 2, PADDING, 3, PADDING, PADDING]
    other = ids.copy()
    other[0, 2:] = [1, 2, 3, *[PADDING] * 4]
    program = program_of()
    assert reference.run(program, ids)[0].tobytes() == reference.run(program, other)[0].tobytes()


@pytest.mark.parametrize(
    "changed",
    [
        {"column": 9},
        {"begin": 3},
        {"count": 0},
        {"padding": -1},
        {"bias": np.zeros(5, np.float32)},
        {"score_bias": np.nan},
    ],
)
def test_what_does_not_fit_is_refused(changed):
    with pytest.raises(RequestError, match="TargetAttention"):
        program_of(**changed)
