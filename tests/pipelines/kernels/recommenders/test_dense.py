"""Linear layers of click programs, in every instruction set that this CPU runs, return the bits of `reference`."""

import numpy as np
import pytest
from helpers.click_layers import check_dense, dense, feeds, network, same
from helpers.tiers import one_in

from pipelines.kernels import extension
from pipelines.kernels.recommenders import native, reference
from pipelines.kernels.recommenders.operators import LinearLayer

pytestmark = pytest.mark.skipif(extension.native() is None, reason=extension.missing())
BATCHES = (0, 1, 2, 5, 6, 7, 63, 64, 65, 255, 256, 257)


def test_the_fastest_version_is_chosen(rng):
    assert extension.isas()[-1] == "portable"
    assert native.click_program(network(rng)).isa == extension.isas()[0]


@pytest.mark.parametrize("inputs", one_in(2, [1, 2, 3, 4, 5, 63, 64, 65, 130, 1024]))
@pytest.mark.parametrize("outputs", [1, 7, 8, 9, 15, 16, 17, 64, 65, 100])
def test_layers_of_all_shapes(rng, isa, inputs, outputs):
    for zero, low in ((None, 0), (0, 0), (3, 0), (128, 128), (255, 7)):
        layer = dense(rng, inputs, outputs, zero, low)
        for count in (0, 1, 7):
            check_dense(layer, isa, rng.integers(0, 256, (count, inputs), np.uint8))


@pytest.mark.parametrize(("inputs", "outputs"), [(7, 9), (70, 130), (64, 5), (33, 3)])
def test_layers_of_all_batches(rng, isa, inputs, outputs):
    for zero in (None, 5):
        layer = dense(rng, inputs, outputs, zero)
        for count in (*range(16), *BATCHES, 1031):
            check_dense(layer, isa, rng.integers(0, 256, (count, inputs), np.uint8))


@pytest.mark.parametrize("active", [0, 0.002, 0.02, 0.3])
def test_inputs_that_are_mostly_zero(rng, isa, active):
    layer, real = dense(rng, 1021, 70), dense(rng, 1021, 70, None)
    for count in (1, 2, 5, 6, 13, 250):
        x = np.where(rng.random((count, 1021)) < active, rng.integers(1, 256, (count, 1021)), 0).astype(np.uint8)
        x[:, -1] = rng.integers(0, 2, count)
        for variant in (layer, real):
            check_dense(variant, isa, x)


@pytest.mark.parametrize("outputs", [3, 70])
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_at_their_bounds(isa, outputs, sign):
    """All inputs 255, all weights at their end, and a bias that fills what an int32 has left."""
    for inputs, weight, kinds in ((2, 127, 4), (1024, 127, 4), (66000, 127, 1), (65700, 128, 1)):
        if (weight, sign) == (128, 1):
            continue
        reach = 255 * weight * inputs
        bias = np.full(outputs, sign * (2**31 - 1 - reach), np.int32)
        for zero, scale in ((None, 1.0), (0, 2.0**-23), (255, 2.0**-2), (100, -(2.0**-2)))[:kinds]:
            w = np.full((inputs, outputs), sign * weight, np.int8)
            layer = LinearLayer(w, bias, np.full(outputs, scale, np.float32), zero, 0)
            check_dense(layer, isa, np.full((7 if inputs < 9999 else 1, inputs), 255, np.uint8))


@pytest.mark.parametrize(
    ("sizes", "fields", "numbers"),
    [
        ((65, 33, 9, 1), 5, 3),
        ((1, 1), 3, 0),
        ((64, 200, 1), 26, 1),
        ((40, 3, 130, 2, 1), 258, 2),
        ((1000, 9, 1), 26, 13),
    ],
)
def test_networks_are_their_steps(rng, isa, sizes, fields, numbers):
    program = network(rng, sizes, fields, 8, numbers)
    kernel = native.click_program(program, isa)
    for count in BATCHES:
        arrays = feeds(rng, program, count, np.int64 if count % 2 else np.int32)
        same([kernel(arrays[0], arrays[1] if numbers else None, None)], reference.run(program, *arrays))


def test_the_sigmoid_is_that_of_float_in_every_version(rng):
    program = network(rng, (65, 33, 9, 1), sigmoid=True)
    logits = network(rng, (65, 33, 9, 1))
    logits = type(program)(**(vars(program) | {"steps": (*program.steps[:-1], logits.steps[-1])}))
    arrays = feeds(rng, program, 4099)
    exact = 1 / (1 + np.exp(-reference.run(logits, *arrays)[0].astype(np.float64)))
    results = [native.click_program(program, isa)(*arrays) for isa in extension.isas()]
    for result in results:
        np.testing.assert_allclose(result, exact, rtol=1e-6)
        same([result], [results[0]])
