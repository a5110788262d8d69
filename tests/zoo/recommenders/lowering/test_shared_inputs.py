"""Programs whose user's inputs are shared by all samples return the bits of the plain program, in every family."""

import functools

import numpy as np
import pytest
from helpers.click_layers import ranked
from helpers.click_networks import FAMILIES, Network
from helpers.tiers import one_in

from pipelines.core import machine
from pipelines.kernels import extension
from pipelines.kernels.recommenders import native
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.kernels.recommenders.native import SharedInputs
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from zoo.recommenders.export.rewrites import passes
from zoo.recommenders.lowering.lower import lower

pytestmark = [
    pytest.mark.usefixtures("caches"),
    pytest.mark.skipif(extension.native() is None, reason=extension.missing()),
]
FIELDS = ((40, 1, ""), (7, 1, ""), (31, 1, ""), (25, 5, "mean"), (300, 1, ""), (60, 9, "sum"), (20, 4, "max"))
SIZES = (1, 2, 63, 64, 65, 300)


def random_fields(generator):
    """Fields of a random schema."""
    kinds = [(1, ""), (1, ""), (int(generator.integers(2, 9)), str(generator.choice(["mean", "sum", "max"])))]
    chosen = [kinds[generator.integers(0, 3)] for _ in range(generator.integers(5, 14))]
    return tuple((int(generator.integers(3, 900)), *kind) for kind in chosen)


def program(family, fields=FIELDS, form="", **options):
    """(network, its program in a form, or in the first one)."""
    net = Network(family, fields=fields, numbers=3, users=4, **options)
    net.model = net.model.clone()
    rewrite(net.model, passes({"schema": {}}))
    result, report = lower(net.model, calibrate(net.model, [net.feeds(400)], "minmax"), QuantRecipe(bound=0.02))
    assert result is not None, report["reason"]
    return net, click_program(next(node for node in result.graph if form in ("", node.name)))


known_program = functools.cache(program)


def shared_inputs(net, fields, numbers):
    ids = [column for f in fields for column in range(net.columns[f], net.columns[f + 1])]
    return SharedInputs(ids, numbers, [net.means.index(f) for f in fields if f in net.means])


def check(net, made, shared, isa):
    plain, quick = native.click_program(made, isa), native.click_program(made, isa, shared)
    with_items = native.click_program(made, isa, shared, items=native.RECORDS)
    for count in SIZES:
        feeds = net.feeds(count)
        for name, array in feeds.items():
            columns = list(getattr(shared, name))
            array[:, columns] = array[0, columns]
        arrays = [feeds["ids"], feeds["numbers"], feeds.get("scales")]
        expected, result = plain(*arrays), quick(*arrays)
        for a, b in zip(*(out if isinstance(out, tuple) else (out,) for out in (expected, result)), strict=True):
            assert a.tobytes() == b.tobytes(), (count, shared)
        positions = np.random.default_rng(count).permutation(count)
        result = ranked(with_items, shared, arrays, positions)
        for a, b in zip(*(out if isinstance(out, tuple) else (out,) for out in (expected, result)), strict=True):
            assert a[positions].tobytes() == b.tobytes(), (count, shared)


@pytest.mark.parametrize("isa", extension.isas())
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits(family, isa):
    net, made = known_program(family, width=12 if family != "two-tower" else 8)
    generator = np.random.default_rng(5)
    choices = [((0, 1, 2, 3), (0, 1)), ((0, 2, 4, 6), ()), ((), ()), (range(7), (0, 1, 2)), ((3, 5, 6), (1,))]
    choices += [(np.flatnonzero(generator.random(7) < 0.5).tolist(), [2]) for _ in range(2)]
    for fields, numbers in choices:
        check(net, made, shared_inputs(net, list(fields), list(numbers)), isa)


@pytest.mark.parametrize("family", one_in(2, FAMILIES))
def test_same_bits_for_random_schemas(family):
    generator = np.random.default_rng(11)
    for seed in range(3):
        fields = random_fields(generator)
        width = int(generator.integers(2, 18))
        net, made = program(family, fields, width=width, hidden=(int(generator.integers(20, 200)), 20), seed=seed)
        users = np.flatnonzero(generator.random(len(fields)) < 0.5).tolist()
        for isa in extension.isas():
            check(net, made, shared_inputs(net, users, [seed]), isa)


@pytest.mark.parametrize("isa", extension.isas())
@pytest.mark.parametrize("level", ["L2", "DRAM"])
def test_same_bits_with_and_without_folded_tables(level, isa, monkeypatch):
    monkeypatch.setattr(machine, "caches", lambda: {"L2": 2**30, "L3": 2**31} if level == "L2" else {"L2": 1, "L3": 1})
    net, made = program("deepfm", width=16, hidden=(130, 20))
    check(net, made, shared_inputs(net, [0, 2, 3], [0]), isa)


@pytest.mark.parametrize("isa", extension.isas())
@pytest.mark.parametrize(
    ("family", "options"), one_in(2, [("dcn-v2", {"rank": 192}), ("dcn-v2", {"rank": 0}), ("gdcn", {})])
)
def test_same_bits_of_crosses_in_bytes(family, options, isa):
    net, made = known_program(family, form="int8", width=64, **options)
    choices = [((0, 2, 4), (0,)), ((), (0, 1)), (range(6), ()), (range(6), (0, 1))]
    choices += [((0, 1, 5, 6), (0, 1, 2)), ((4, 5, 6), ())]  # columns before and behind, and behind alone
    for fields, numbers in choices:
        check(net, made, shared_inputs(net, list(fields), list(numbers)), isa)


def test_the_first_sample_speaks_for_all():
    net, made = program("dcn-v2")
    quick = native.click_program(made, "", shared_inputs(net, [0, 1, 2], [0]))
    feeds = net.feeds(100)
    alike = {name: array.copy() for name, array in feeds.items()}
    alike["ids"][:, :3], alike["numbers"][:, 0] = feeds["ids"][0, :3], feeds["numbers"][0, 0]
    kept = [quick(*(inputs[name][:1] for name in ("ids", "numbers", "scales"))) for inputs in (feeds, alike)]
    assert kept[0].tobytes() == kept[1].tobytes()


def test_items_belong_to_their_program():
    net, made = program("wide-deep")
    shared = shared_inputs(net, [0, 1], [0])
    one, other = (native.click_program(made, "", shared, items=native.RECORDS) for _ in range(2))
    feeds = net.feeds(9)
    arrays = [feeds["ids"], feeds["numbers"], feeds.get("scales")]
    user = [None if array is None else array[:1] for array in arrays]
    items, none = one.items(9), np.zeros(0, np.int64)
    one.fill(items, 0, *arrays)
    assert len(items) == 9 and len(one.rank(items, none, *user)) == 0
    for call, kind, words in (
        (lambda: other.rank(items, none, *user), ValueError, "another program"),
        (lambda: other.fill(items, 0, *arrays), ValueError, "another program"),
        (lambda: one.fill(items, 1, *arrays), ValueError, "fewer items"),
        (lambda: one.fill(items, -1, *arrays), ValueError, "fewer items"),
        (lambda: one.fill(items, 0, arrays[0] + 999, *arrays[1:]), IndexError, "found id"),
        (lambda: one.rank(items, np.array([9]), *user), IndexError, "found the item 9 among 9"),
        (lambda: one.rank(items, np.array([-1]), *user), IndexError, "found the item -1"),
        (lambda: one.rank(items, np.array([0], np.int32), *user), TypeError, "positions"),
        (lambda: one.rank(items, none, *arrays), ValueError, "one user"),
        (lambda: one(*arrays), ValueError, "takes items"),
        (lambda: one.items(-1), ValueError, "items"),
        (lambda: native.click_program(made, "", shared).items(3), ValueError, "items"),
    ):
        with pytest.raises(kind, match=words):
            call()


@pytest.mark.parametrize("wrong", [SharedInputs(ids=[999]), SharedInputs(numbers=[-1]), SharedInputs(scales=[3])])
def test_unknown_columns_are_refused(wrong):
    _, made = program("wide-deep")
    with pytest.raises(ValueError, match="share"):
        native.click_program(made, "", wrong)
