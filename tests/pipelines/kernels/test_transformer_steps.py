"""Small transformers over sequences in the native kernels: the bits of the numpy reference on every instruction set."""

from dataclasses import replace

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.recommenders import reference, steps
from pipelines.kernels.recommenders.native import SharedInputs, click_program
from pipelines.kernels.recommenders.program import ClickProgram

ROWS, GAPS = 9, 5
PADDING = ROWS - 1
ISAS = extension.isas() if extension.native() is not None else []


def floats(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def padded(x, room):
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, room - x.shape[-1])])


def pairs(rng, count, width, room):
    return padded(floats(rng, count, 2, width), room).reshape(count, 2 * room)


def rows_of(places, gaps):
    return np.array([ROWS, 0, *[ROWS] * places, *[GAPS] * (places * gaps)], np.int32)


def target_transformer(places=7, width=12, heads=3, hidden=20, seed=0, gaps=False, **changed):
    rng = np.random.default_rng(seed)
    room = -(-width // 16) * 16
    arrays = {"items": padded(floats(rng, ROWS, width), room), "keys_values": pairs(rng, ROWS, width, room)}
    arrays |= {"places": pairs(rng, 1 + places, width, room), "position": padded(floats(rng, width), room)}
    for name, inputs, outputs in (("query", width, width), ("joined", width, width), ("inner", width, hidden)):
        arrays |= {name: floats(rng, inputs, outputs), f"{name}_bias": floats(rng, outputs)}
    arrays |= {"outer": floats(rng, hidden, width), "outer_bias": floats(rng, width)}
    arrays |= {"slope": floats(rng, hidden), "norms": floats(rng, 4, width), "epsilon": 1e-5}
    arrays |= {"gap_begin": 2 + places, "gap_keys_values": pairs(rng, GAPS, width, room)} if gaps else {}
    arrays |= {"out": 0, "column": 0, "begin": 2, "count": places, "padding": PADDING, "heads": heads} | changed
    step = steps.TargetTransformer(**arrays)
    return ClickProgram(rows_of(places, gaps), 0, 0, (("f4", width),), (step,), (0,))


def sequence_encoder(places=7, width=24, heads=2, hidden=40, blocks=2, seed=0, exact=(), gaps=False, **changed):
    rng = np.random.default_rng(seed)
    columns = 16 * heads
    arrays = {"items": floats(rng, ROWS, width), "positions": floats(rng, places, width), "epsilon": 1e-5}
    arrays["norms"] = floats(rng, 2 * blocks + 1, 2, width)
    layers = {"query": (width, columns), "keys_values": (width, 2 * columns), "joined": (columns, width)}
    for name, shape in (layers | {"inner": (width, hidden), "outer": (hidden, width)}).items():
        arrays[name] = rng.integers(-127, 128, (blocks, *shape)).astype(np.int8)
        arrays[f"{name}_scale"] = floats(rng, blocks, 2, shape[1]) * np.float32(0.002)
    sizes = [width * columns, 2 * width * columns, columns * width, width * hidden, hidden * width]
    fine = floats(rng, sum(sizes[number % 5] for number in exact)) * np.float32(0.2)
    arrays |= {"exact": exact, "fine": fine}
    arrays |= {"gap_begin": 2 + places, "gap_items": floats(rng, GAPS, width)} if gaps else {}
    arrays |= {"out": 0, "begin": 2, "count": places, "padding": PADDING, "heads": heads} | changed
    step, own = steps.SequenceEncoder(**arrays), steps.Rows(1, 0, floats(rng, ROWS, 5))
    return ClickProgram(rows_of(places, gaps), 0, 0, (("f4", width), ("f4", 5)), (step, own), (0, 1))


PROGRAMS = {
    "target": target_transformer,
    "target, one head": lambda: target_transformer(places=50, width=32, heads=1, hidden=64),
    "target, many heads": lambda: target_transformer(places=40, width=32, heads=8, hidden=70),
    "target, time gaps": lambda: target_transformer(places=20, gaps=True),
    "encoder": sequence_encoder,
    "encoder, time gaps": lambda: sequence_encoder(places=20, gaps=True),
    "encoder, long": lambda: sequence_encoder(places=50, width=64, heads=1, hidden=64, blocks=2),
    "encoder, float layers": lambda: sequence_encoder(places=21, width=40, heads=3, hidden=70, exact=(0, 2, 4, 6, 8)),
    "encoder, all float": lambda: sequence_encoder(places=50, blocks=2, exact=tuple(range(10))),
    "encoder, one block": lambda: sequence_encoder(places=33, width=80, heads=5, hidden=33, blocks=1),
}


def ids_of(program, count, seed=1):
    rng = np.random.default_rng(seed)
    places = program.steps[0].count
    gaps = program.rows.size - 2 - places
    ids = rng.integers(0, PADDING, (count, 2 + places), np.int32)
    ids[:, 2:][np.arange(places) >= rng.integers(0, places + 1, count)[:, None]] = PADDING
    ids[0, 2:] = PADDING  # an empty sequence
    ids[-1, 2:] = rng.integers(0, PADDING, places)  # a full one
    ids[-2, 2 + rng.integers(0, places, 3)] = PADDING  # one with empty places
    return np.hstack([ids, rng.integers(0, GAPS, (count, gaps), np.int32)])


def results(made, ids):
    outputs = made(ids, None, None)
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_bits(name):
    program = PROGRAMS[name]()
    ids = ids_of(program, 70)
    expected = reference.run(program, ids)
    for isa in ISAS:
        for one, other in zip(results(click_program(program, isa), ids), expected, strict=True):
            assert np.isfinite(other).all()
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_alone_and_with_others(isa, name):
    program = PROGRAMS[name]()
    made, ids = click_program(program, isa), ids_of(program, 130)
    together = results(made, ids)
    for row in (0, 3, 64, 129):
        for a, b in zip(results(made, ids[row : row + 1]), together, strict=True):
            assert a.tobytes() == b[row : row + 1].tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_history_and_many_targets(isa, name):
    program = PROGRAMS[name]()
    ids = ids_of(program, 130)
    ids[:, 2:] = ids[5, 2:]
    shared = click_program(program, isa, SharedInputs(ids=range(2, program.rows.size)))
    for _ in range(2):
        for one, other in zip(results(shared, ids), results(click_program(program, isa), ids), strict=True):
            assert one.tobytes() == other.tobytes()
        ids[:, 2:] = ids[7, 2:] * 0 + 3  # another history in the same object


@pytest.mark.parametrize("name", PROGRAMS)
def test_padding_is_left_out(name):
    program = PROGRAMS[name]()
    ids = ids_of(program, 70)
    (step, *_) = program.steps
    other = {key: getattr(step, key).copy() for key in ("items", "keys_values") if hasattr(step, key)}
    if isinstance(step, steps.SequenceEncoder):
        other.pop("keys_values")
        ids = ids[ids[:, 2] != PADDING]
    for table in other.values():
        table[PADDING, :3] += 1
    changed = replace(program, steps=(replace(step, **other), *program.steps[1:]))
    assert reference.run(program, ids)[0].tobytes() == reference.run(changed, ids)[0].tobytes()


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (target_transformer, {"column": 9}),
        (target_transformer, {"begin": 3}),
        (target_transformer, {"heads": 5}),
        (target_transformer, {"padding": -1}),
        (target_transformer, {"slope": np.zeros(5, np.float32)}),
        (target_transformer, {"epsilon": np.nan}),
        (target_transformer, {"gaps": True, "gap_begin": 10}),
        (target_transformer, {"gaps": True, "gap_keys_values": np.zeros((GAPS, 16), np.float32)}),
        (sequence_encoder, {"gap_begin": 9}),
        (sequence_encoder, {"gaps": True, "gap_begin": -1}),
        (sequence_encoder, {"padding": -1}),
        (sequence_encoder, {"begin": 3}),
        (sequence_encoder, {"inner": np.zeros((2, 24, 41), np.int8)}),
        (sequence_encoder, {"exact": (10,), "fine": np.zeros(24 * 40, np.float32)}),
        (sequence_encoder, {"exact": (3, 3)}),
        (sequence_encoder, {"exact": (3,), "fine": np.zeros(5, np.float32)}),
        (sequence_encoder, {"norms": np.full((5, 2, 24), np.nan, np.float32)}),
    ],
)
def test_what_does_not_fit_is_refused(make, changed):
    with pytest.raises(RequestError, match=r"TargetTransformer|SequenceEncoder"):
        make(**changed)
