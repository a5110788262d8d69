"""Families of sequences as native programs: the numbers of their float graph, and the same bits for a shared user."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from helpers.click_layers import ranked
from helpers.tiers import one_in

import zoo
from pipelines.core.errors import RequestError
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.recommenders import native, reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.kernels.recommenders.native import SharedInputs
from pipelines.kernels.recommenders.steps import SequenceEncoder
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.lowering.sequences import pair_layers

torch = pytest.importorskip("torch", reason="needs the train extra")

pytestmark = [
    pytest.mark.usefixtures("caches"),
    pytest.mark.skipif(extension.native() is None, reason=extension.missing()),
]
SETTINGS = {"din": {"attention": (12, 5)}, "bst": {"inner": 24}, "sasrec": {"blocks": 2}}
TIMED = 10  # seeds of schemas with time gaps, from it on
TIMES = [(family, TIMED + seed) for family in SETTINGS for seed in range(2)] + [("din", 13)]
SOME = [("din", 3), ("din", 13)]  # whose items are too many for the scores of all pairs
CASES = [("din", 3)] + [(family, seed) for family in SETTINGS for seed in range(3)] + [("sasrec", 7)] + TIMES


def features_of(rng, timed=False):
    """A random schema: the item, its history, with time gaps if `timed`, and other columns of both sides."""

    def column(name, tower, **options):
        return {"name": name, "tower": tower, "kind": "category", **options}

    def hashed():
        return {"encoding": {"type": "hash", "buckets": int(rng.integers(5, 300))}}

    columns = [{"name": "clicked", "kind": "label"}, column("item_id", "item", **hashed())]
    history = {"kind": "categories", "separator": "|", "pooling": "none", "length": int(rng.integers(1, 51))}
    columns.append(column("history", "user", **history, shares="item_id"))
    times = {"kind": "categories", "separator": "|", "gaps_of": "history", "unit": "s"}
    gaps = {"encoding": {"type": "gaps", "buckets": 32}}
    columns += [column("times", "user", **times, **gaps)] if timed else []
    columns += [column(f"u{i}", "user", **hashed()) for i in range(rng.integers(1, 4))]
    columns += [column(f"i{i}", "item", **hashed()) for i in range(rng.integers(0, 3))]
    genres = {"kind": "categories", "separator": "|", "pooling": "mean", "length": 4, **hashed()}
    columns.append(column("genres", str(rng.choice(["user", "item"])), **genres))
    return Features(Schema.from_json({"canonical": True, "columns": columns}))


def feeds_of(features, count, rng):
    ids = np.zeros((count, sum(field.width for field in features.fields)), np.int32)
    for field in features.fields:
        span = slice(field.start, field.start + field.width)
        ids[:, span] = rng.integers(0, field.last or field.rows, (count, field.width))
        lengths = rng.integers(0, field.width + 1, count)
        lengths[0], lengths[-1] = 0, field.width
        if field.is_sequence:
            ids[:, span][np.arange(field.width) >= lengths[:, None]] = field.last
    widths = {name: int(shape[1]) for name, (_, shape) in features.inputs.items()}
    feeds = {"ids": ids}
    return feeds | ({"scales": rng.random((count, widths["scales"]), np.float32)} if "scales" in widths else {})


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """cases(family, seed): what `lowered` returns, made once."""
    return functools.cache(lambda family, seed: lowered(family, seed, tmp_path_factory.mktemp(family)))


def lowered(family, seed, tmp_path, grow=1.0, **settings):
    """(features, path of the float graph, its program) of a network with random weights."""
    from zoo.recommenders.export.fx_export import export

    rng = np.random.default_rng(seed)
    entry, features = zoo.entry(family), features_of(rng, seed >= TIMED)
    torch.manual_seed(seed)
    size = int(rng.choice([8, 24, 32]))
    own = {
        "embedding_size": size,
        "hidden": (20, 9),
        "heads": int(rng.choice([1, 2, 4])),
        **SETTINGS[family],
    } | settings
    options = {name: value for name, value in own.items() if hasattr(entry.config, name)}
    network = entry.build(features, replace(entry.config, **options)).eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim == 2 and "embed" not in name and "table" not in name:
                weight.mul_(grow)
    path = io.save(export(network, features), tmp_path / "fp32.onnx")
    model = io.load(path)
    rewrite(model, entry.passes({"schema": {}}))
    table = calibrate(model, [feeds_of(features, 300, rng)], "minmax")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_layers, "PAIR_SCORES", 0 if (family, seed) in SOME else 2**24)
        result, report, _ = entry.lower(model, table, QuantRecipe(), {})
    if result is None:
        raise RequestError(report["reason"])
    return features, path, click_program(result.graph[0])


def arrays_of(feeds):
    return feeds["ids"], None, feeds.get("scales")


def fed(program, feeds):
    """What the program takes."""
    return {name: array for name, array in feeds.items() if name != "scales" or program.means}


def tuple_of(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize(("family", "seed"), one_in(2, CASES))
def test_numbers_of_the_graph(family, seed, cases):
    features, path, program = cases(family, seed)
    feeds = feeds_of(features, 130, np.random.default_rng(seed + 50))
    expected = OnnxRuntimeSession(path, 1).run(feeds)
    feeds = fed(program, feeds)
    reference_results = reference.run(program, *arrays_of(feeds))
    for isa in extension.isas():
        results = tuple_of(native.click_program(program, isa)(*arrays_of(feeds)))
        for one, other in zip(results[1:], reference_results[1:], strict=True):
            assert one.tobytes() == other.tobytes()
        np.testing.assert_allclose(results[0], expected["probability"], atol=0.005)
        for one, other in zip(results[1:], list(expected.values())[1:], strict=True):
            np.testing.assert_allclose(one, other, atol=0.03)


@pytest.mark.parametrize("grow", [1, 2, 4])
def test_large_weights_of_an_encoder_stay_float(grow, tmp_path):
    features, path, program = lowered("sasrec", 1, tmp_path, grow)
    feeds = feeds_of(features, 400, np.random.default_rng(7))
    results = tuple_of(native.click_program(program)(*arrays_of(fed(program, feeds))))
    expected = OnnxRuntimeSession(path, 1).run(feeds)["probability"]
    assert np.abs(results[0] - expected).max() <= 0.005
    encoder = next(step for step in program.steps if isinstance(step, SequenceEncoder))
    assert bool(encoder.exact) == (grow > 1)


@pytest.mark.parametrize(("family", "seed"), one_in(2, CASES))
def test_one_user_and_many_items(family, seed, cases):
    features, _, program = cases(family, seed)
    users = [field for field in features.fields if field.column.tower == "user"]
    columns = [position for field in users for position in range(field.start, field.start + field.width)]
    scales = [field.scale for field in users if field.scale >= 0]
    inputs = SharedInputs(columns, (), scales)
    kinds = ((None, ""), (inputs, ""), (inputs, native.RECORDS), (inputs, native.SCORES))
    programs = {isa: [native.click_program(program, isa, *kind) for kind in kinds] for isa in extension.isas()}
    for count in (1, 65):
        feeds = feeds_of(features, count, np.random.default_rng(seed + count))
        feeds["ids"][:, columns] = feeds["ids"][-1, columns]
        if scales:
            feeds["scales"][:, scales] = feeds["scales"][-1, scales]
        for plain, shared, *with_items in programs.values():
            results = [tuple_of(made(*arrays_of(fed(program, feeds)))) for made in (plain, shared)]
            positions = np.random.default_rng(seed).permutation(count)
            for made in with_items:
                arrays = arrays_of(fed(program, feeds))
                items = ranked(made, inputs, arrays, positions)
                for one, other, third in zip(*results, tuple_of(items), strict=True):
                    assert one.tobytes() == other.tobytes() and one[positions].tobytes() == third.tobytes()


def test_blocks_of_hstu_have_no_program(tmp_path):
    with pytest.raises(RequestError, match="no native form"):
        lowered("sasrec", 0, tmp_path, block="hstu")
