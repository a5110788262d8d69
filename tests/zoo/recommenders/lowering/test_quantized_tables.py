"""Tables beyond the caches become rows of 8, 4 or 2 bits, as long as the outputs hardly change."""

import numpy as np
import pytest
from helpers.click_networks import Network
from helpers.rewriting import run

from pipelines.core import machine
from pipelines.kernels import extension
from pipelines.kernels.recommenders import native, reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.kernels.recommenders.steps import Gather, QuantizedGather
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.lowering import quantized_tables
from zoo.recommenders.lowering.lower import lower

FIELDS = ((4000, 1, ""), (3000, 6, "sum"), (2000, 5, "mean"), (1500, 4, "max"), (20, 1, ""))


def lowered(monkeypatch, family, l3):
    monkeypatch.setattr(quantized_tables, "SPACE", 2**12)
    monkeypatch.setattr(machine, "caches", lambda: {"L2": 2**10, "L3": l3})
    net = Network(family, fields=FIELDS)
    feeds = net.feeds(300)
    result, report = lower(net.model, calibrate(net.model, [feeds], "minmax"), QuantRecipe(bound=0.01))
    return net, feeds, click_program(result.graph[0]), report


def of(program, kind):
    return [step for step in program.steps if isinstance(step, kind)]


@pytest.mark.parametrize("family", ["dlrm", "deepfm", "dcn-v2"])
def test_large_tables_are_quantized_and_outputs_stay(monkeypatch, family):
    net, feeds, program, report = lowered(monkeypatch, family, 2**12)
    tables = [table for table in report["tables"] if table["bits"] < 16]
    assert len(report["tables"]) == len(of(program, QuantizedGather)) + len(of(program, Gather))
    assert len(tables) == len(of(program, QuantizedGather)) >= 2
    assert all(step.rows == 20 for step in of(program, Gather))
    assert "max" in {step.pool for step in of(program, QuantizedGather)}
    assert all(table["megabytes"] < table["int16_megabytes"] and table["change"] <= 0.01 for table in tables)
    assert "int16 tables of" in report["reason"] and "outputs change by at most" in report["reason"]
    inputs = feeds["ids"], feeds.get("numbers"), feeds.get("scales")
    expected = next(iter(run(net.model, **feeds).values()))
    outputs = reference.run(program, *inputs)
    assert np.abs(outputs[0] - expected).max() <= 0.02
    for isa in extension.isas():
        assert np.abs(native.click_program(program, isa)(*inputs) - outputs[0]).max() <= 1e-6


def test_lone_lookups_are_quantized_to_save_memory_alone(monkeypatch):
    program = lowered(monkeypatch, "dlrm", 2**25)[2]
    monkeypatch.setattr(quantized_tables, "SPACE", 2**28)
    ids = np.zeros((8, program.rows.size), np.int32)
    samples = quantized_tables.Samples(
        ids, np.zeros((8, program.numbers), np.float32), np.zeros((8, program.means), np.float32)
    )
    program = quantized_tables.QuantizedTables({"L3": 2**10}, 1.0).applied(program, samples)
    assert {step.count for step in of(program, QuantizedGather)} == {4, 5, 6}


def test_tables_within_the_caches_stay(monkeypatch):
    _, _, program, report = lowered(monkeypatch, "dlrm", 2**25)
    assert not of(program, QuantizedGather)
    sizes = [
        (step.column, step.rows, step.width, 16, round(step.table.nbytes / 1e6, 3)) for step in of(program, Gather)
    ]
    reported = [
        tuple(table[key] for key in ("column", "rows", "width", "bits", "megabytes")) for table in report["tables"]
    ]
    assert reported == sorted(sizes)


def test_tables_that_change_the_outputs_get_more_bits_or_stay(monkeypatch):
    program = lowered(monkeypatch, "dlrm", 2**25)[2]
    rng = np.random.default_rng(0)
    ids = rng.integers(0, np.maximum(program.rows, 1), (64, program.rows.size), np.int32)
    numbers, scales = (rng.random((64, count), np.float32) for count in (program.numbers, program.means))
    samples = quantized_tables.Samples(ids, numbers, scales)
    bits = {}
    for bound in (1.0, 1e-2, 1e-6):
        tables = quantized_tables.QuantizedTables({"L3": 2**10}, bound)
        again = [tables.applied(program, samples) for _ in range(2)]
        for one, other in zip(*(of(applied, QuantizedGather) for applied in again), strict=True):
            assert one.table is other.table  # programs that share a table
        bits[bound] = [table.bits for table in tables.made]
        assert all(table.change <= bound for table in tables.made)
    assert set(bits[1.0]) == {2} and max(bits[1e-2]) > 2 and not bits[1e-6]
