"""Lookups of quantized rows in click programs: the same bits in every instruction set, shared inputs, wrong sizes."""

from dataclasses import replace

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.recommenders import native, reference
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import CODES, QuantizedGather, Weighted
from pipelines.kernels.recommenders.tables.quantized_rows import quantize

needs_kernels = pytest.mark.skipif(extension.native() is None, reason=extension.missing())
ROWS = np.array([900, 900, 900, 900, 900, 900, 40, 40], np.int32)


def gather(rng, position, width, bits, rows, column, count=1, pool="", factor=1.0, mean=-1):
    table = quantize(rng.uniform(-CODES, CODES, (rows, width)).astype(np.float32), bits)
    units = table.scale_unit, table.bias_unit
    return QuantizedGather(0, position, table.data, rows, width, bits, *units, column, count, pool, factor, mean)


def program(width, bits):
    rng = np.random.default_rng(width + bits)
    steps = [
        gather(rng, 0, width, bits, 900, 0),
        gather(rng, width, width, bits, 900, 1, 5, "sum", 0.37),
        gather(rng, 2 * width, width + 3, bits, 40, 6, 2, "mean", 0.9, 1),
        gather(rng, 3 * width + 3, width, bits, 900, 1, 5, "max", 0.7),
    ]
    codes = 4 * width + 3
    weights = [rng.standard_normal(codes).astype(np.float32) for _ in range(3)]
    steps += [Weighted(0, 0, weight, out) for out, weight in enumerate(weights, 1)]
    return ClickProgram(ROWS, 0, 2, (("i2", codes), *[("f4", 1)] * 3), tuple(steps), (1, 2, 3))


def inputs(n):
    rng = np.random.default_rng(n)
    scales = rng.uniform(0, 1, (n, 2)).astype(np.float32)
    scales[::3, 1] = np.inf
    return rng.integers(0, ROWS, (n, len(ROWS)), np.int32), scales


@needs_kernels
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("width", [1, 8, 16, 32, 40, 64, 100, 130])
def test_the_bits_of_the_reference_in_every_instruction_set(width, bits):
    made = program(width, bits)
    for n in (0, 1, 63, 64, 65, 200):
        ids, scales = inputs(n)
        expected = reference.run(made, ids, None, scales)
        for isa in extension.isas():
            outputs = native.click_program(made, isa)(ids, None, scales)
            assert [array.tobytes() for array in outputs] == [array.tobytes() for array in expected], (isa, n)


@needs_kernels
def test_rows_that_all_samples_share_are_read_once():
    made = program(32, 4)
    ids, scales = inputs(150)
    ids[:, :6] = ids[0, :6]
    expected = reference.run(made, ids, None, scales)
    shared = native.SharedInputs(ids=range(6), scales=[0])
    outputs = native.click_program(made, "", shared)(ids, None, scales)
    assert [array.tobytes() for array in outputs] == [array.tobytes() for array in expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 899},
        {"width": 31},
        {"bits": 8},
        {"bits": 3},
        {"column": 8},
        {"column": -1},
        {"position": 1},
        {"count": 2},
        {"count": 0, "pool": "max"},
        {"pool": "mean"},
        {"factor": np.inf},
        {"scale_unit": np.nan},
        {"table": np.zeros(10, np.uint8)},
    ],
)
def test_steps_that_do_not_fit_are_refused(changes):
    made = program(32, 4)
    with pytest.raises(RequestError):
        replace(made, steps=(replace(made.steps[0], **changes), *made.steps[1:]))


@needs_kernels
@pytest.mark.parametrize("changes", [{"rows": 899}, {"width": 200}, {"column": 8}, {"count": 2}, {"pool": "mean"}])
def test_the_native_program_checks_once_more(changes):
    made = extension.required().ClickProgram(ROWS, 0, 2, [("i2", 99)], "")
    with pytest.raises(ValueError, match="quantized_gather"):
        replace(program(32, 4).steps[0], **changes).add_to(made)
