"""Target attention and Dice in the native kernels: the bits of the numpy reference on every instruction set."""

import numpy as np
import pytest
from helpers.click_layers import ranked

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.recommenders import native, reference, steps
from pipelines.kernels.recommenders.native import SharedInputs, click_program
from pipelines.kernels.recommenders.program import ClickProgram

WIDTH, FIRST, SECOND, ROWS, PLACES, GAPS = 12, 20, 6, 9, 7, 5
PADDING = ROWS - 1
ISAS = extension.isas() if extension.native() is not None else []


def floats(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def padded(x):
    return np.pad(x, ((0, 0), (0, -x.shape[1] % steps.LANES)))


def unit(rng, width, plain):
    none = np.zeros(0, np.float32)
    return (none, none, none, floats(rng, width)) if plain else tuple(floats(rng, width) for _ in range(4))


def integers(rng, dtype, most, *shape):
    return rng.integers(-most, most + 1, shape, dtype)


def curves(rng, units, spread):
    """Scale, shift and coefficients, with values on both sides of all segments."""
    shift = (steps.SEGMENTS / 2 + rng.normal(size=units)).astype(np.float32)
    return np.full(units, 30 / spread, np.float32), shift, floats(rng, units, 3, steps.SEGMENTS) * np.float32(50)


def gaps_of(rng, places, width):
    """Arrays of the time gaps of a sequence; those of their ids come last."""
    scores, items = floats(rng, GAPS), padded(floats(rng, GAPS, width))
    return {"gap_begin": 2 + places, "gap_items": items, "gap_scores": scores}


def rows_of(places, gaps):
    return np.array([ROWS, 0, *[ROWS] * places, *[GAPS] * (places * gaps)], np.int32)


def program_of(
    seed=0,
    softmax=False,
    plain=False,
    width=WIDTH,
    first=FIRST,
    second=SECOND,
    places=PLACES,
    epsilon=0.0,
    gaps=False,
    **changed,
):
    rng = np.random.default_rng(seed)
    codes = np.pad(integers(rng, np.int16, 11585, ROWS, width), ((0, 0), (0, -width % 32)))
    arrays = {"items": padded(floats(rng, ROWS, width)), "codes": codes}
    arrays |= {name: padded(integers(rng, np.int32, 10**6, ROWS, first)) for name in ("keys", "queries")}
    arrays |= {"product": integers(rng, np.int16, 2000, width, first), "bias": integers(rng, np.int32, 10**6, second)}
    arrays |= {"hidden": integers(rng, np.int16, 900, first, second)}
    for name, units, spread in (("one", first, 10**6), ("two", second, 10**5)):
        parts = zip(("scale", "shift", "curve"), curves(rng, units, spread), strict=True)
        arrays |= {f"{name}_{part}": values for part, values in parts}
    arrays["two_curve"] /= np.float32(1e4)
    attention = {"out": 0, "column": 0, "begin": 2, "count": places, "padding": PADDING, **arrays}
    attention |= {"score_bias": 0.25, "softmax": softmax} | (gaps_of(rng, places, width) if gaps else {}) | changed
    after = steps.Dice(0, 1, *unit(rng, width, plain), epsilon)
    slots = (("f4", width), ("f4", width))
    return ClickProgram(rows_of(places, gaps), 0, 0, slots, (steps.TargetAttention(**attention), after), (0, 1))


def ids_of(count, seed=1, places=PLACES, gaps=False):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, PADDING, (count, 2 + places), np.int32)
    lengths = rng.integers(0, places + 1, count)
    ids[:, 2:][np.arange(places) >= lengths[:, None]] = PADDING
    ids[0, 2:] = PADDING  # an empty sequence
    return np.hstack([ids, rng.integers(0, GAPS, (count, places * gaps), np.int32)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", [{}, {"softmax": True}, {"raw": True}], ids=str)
@pytest.mark.parametrize("activation", [{}, {"plain": True}, {"epsilon": 1e-3}, {"gaps": True}], ids=str)
def test_same_bits(isa, weights, activation):
    program, ids = program_of(**activation, **weights), ids_of(150, gaps="gaps" in activation)
    expected = reference.run(program, ids)
    outputs = click_program(program, isa)(ids, None, None)
    for one, other in zip(outputs, expected, strict=True):
        assert one.tobytes() == other.tobytes()
    assert not expected[0][0].any() and np.isfinite(expected[1]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("width", "first", "second", "places"), [(1, 1, 1, 1), (33, 17, 21, 50), (64, 80, 40, 20)])
@pytest.mark.parametrize("count", [1, 3, 64, 65])
def test_sizes(isa, width, first, second, places, count):
    program = program_of(3, True, width=width, first=first, second=second, places=places, epsilon=0.1)
    ids = ids_of(count, 2, places)
    expected = reference.run(program, ids)
    for output, right in zip(click_program(program, isa)(ids, None, None), expected, strict=True):
        assert output.tobytes() == right.tobytes()
    assert not count > 1 or len(np.unique(expected[0])) > 2


@pytest.mark.parametrize("isa", ISAS)
def test_alone_and_with_others(isa):
    made, ids = click_program(program_of(), isa), ids_of(70)
    together = made(ids, None, None)
    for row in (0, 3, 69):
        assert all(
            a.tobytes() == b[row : row + 1].tobytes()
            for a, b in zip(made(ids[row : row + 1], None, None), together, strict=True)
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("places", [PLACES, 50])
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
def test_one_history_and_many_targets(isa, places, softmax, gaps):
    program = program_of(softmax=softmax, places=places, gaps=gaps)
    ids = ids_of(130, places=places, gaps=gaps)
    ids[:, 2:] = ids[5, 2:]  # longer than the number of different items, as the targets are
    user = SharedInputs(ids=range(2, ids.shape[1]))
    shared = click_program(program, isa, user)
    for count in (1, 2, 70, 130):
        alone = click_program(program, isa)(ids[:count], None, None)
        for one, other in zip(shared(ids[:count], None, None), alone, strict=True):
            assert one.tobytes() == other.tobytes()
    alone, last_first = click_program(program, isa)(ids, None, None), np.arange(130)[::-1].copy()
    items = click_program(program, isa, user, items=native.SCORES)
    for one, other in zip(ranked(items, user, [ids, None, None], last_first), alone, strict=True):
        assert one.tobytes() == other[last_first].tobytes()
    ids[:, 2 : 2 + places] = PADDING
    assert not shared(ids, None, None)[0].any()
    assert not ranked(items, user, [ids, None, None], last_first)[0].any()


def scored(gaps=False, **changed):
    rng = np.random.default_rng(2)
    attention = {"out": 0, "column": 0, "begin": 2, "count": PLACES, "padding": PADDING, "softmax": False}
    attention |= {"items": padded(floats(rng, ROWS, WIDTH)), "scores": floats(rng, ROWS, ROWS)}
    attention |= (gaps_of(rng, PLACES, WIDTH) if gaps else {}) | changed
    return ClickProgram(rows_of(PLACES, gaps), 0, 0, (("f4", WIDTH),), (steps.ScoredAttention(**attention),), (0,))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weights", [{}, {"softmax": True}, {"raw": True}], ids=str)
@pytest.mark.parametrize("gaps", [False, True])
def test_scores_of_all_pairs(isa, weights, gaps):
    program, ids = scored(gaps, **weights), ids_of(150, gaps=gaps)
    (expected,) = reference.run(program, ids)
    assert click_program(program, isa)(ids, None, None).tobytes() == expected.tobytes()
    assert not expected[0].any() and len(np.unique(expected)) > 100
    ids[:, 2:] = ids[5, 2:]
    shared = click_program(program, isa, SharedInputs(ids=range(2, ids.shape[1])))
    assert shared(ids, None, None).tobytes() == click_program(program, isa)(ids, None, None).tobytes()


@pytest.mark.parametrize(
    "changed",
    [
        {"scores": np.zeros((ROWS, ROWS - 1), np.float32)},
        {"begin": 3},
        {"padding": -1},
        {"raw": True, "softmax": True},
        {"gap_begin": 2 + PLACES},
        {"gap_begin": -2},
        {"gaps": True, "gap_begin": -1},
        {"gaps": True, "gap_begin": 3 + PLACES},
        {"gaps": True, "gap_scores": np.zeros(GAPS - 1, np.float32)},
        {"gaps": True, "gap_items": np.ones((GAPS, 16), np.float32)},
    ],
)
def test_scores_that_do_not_fit_are_refused(changed):
    with pytest.raises(RequestError, match="ScoredAttention"):
        scored(**changed)


def test_time_gaps_add_to_scores_and_items():
    program, ids = scored(gaps=True, raw=True), ids_of(1, gaps=True)
    (step,) = program.steps
    ids[0, :5], ids[0, 2 + PLACES] = [4, 0, 3, PADDING, PADDING], 2
    ids[0, 3 : 2 + PLACES] = PADDING
    expected = (step.items[3] + step.gap_items[2]) * (step.scores[4, 3] + step.gap_scores[2])
    np.testing.assert_allclose(reference.run(program, ids)[0][0], expected[:WIDTH], rtol=1e-6)


def test_empty_places_between_items_are_left_out():
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
        {"raw": True, "softmax": True},
        {"begin": 3},
        {"count": 0},
        {"padding": -1},
        {"bias": np.zeros(5, np.int32)},
        {"bias": np.full(SECOND, 2**31 - 1, np.int32)},
        {"keys": np.full((ROWS, 32), 2**31 - 1, np.int32)},
        {"codes": np.full((ROWS, 32), 5, np.int16)},
        {"codes": np.pad(np.full((ROWS, WIDTH), -11586, np.int16), ((0, 0), (0, 20)))},
        {"one_scale": np.full(FIRST, 600, np.float32)},
        {"one_curve": np.full((FIRST, 3, steps.SEGMENTS), np.inf, np.float32)},
        {"score_bias": np.nan},
    ],
)
def test_what_does_not_fit_is_refused(changed):
    with pytest.raises(RequestError, match="TargetAttention"):
        program_of(**changed)
