"""The comparison of quantized tables: its ids, its packing, and a small run beside torch."""

import numpy as np
import pytest

from pipelines.core.errors import ZooError
from pipelines.kernels import extension
from scripts.peers import harness
from scripts.peers.recommenders import tables

CASE = tables.Case(features=2, rows=400, width=16, bits=4, huge_pages=True)


def test_ids_of_both_kinds_are_rows_and_the_hottest_row_is_hot() -> None:
    for kind in tables.KINDS:
        batches = tables.draw_ids(kind, CASE, 64, 3)
        assert [batch.shape for batch in batches] == [(64, 2, 3)] * tables.BATCHES
        ids = np.stack(batches)
        assert ids.min() >= 0 and ids.max() < 400
        assert (np.bincount(ids.ravel()).max() > ids.size / 10) == (kind == "zipf")


@pytest.mark.parametrize(("bits", "expected"), [(8, [1, 2, 3, 0]), (4, [0x21, 0x03]), (2, [0b00111001])])
def test_the_first_code_has_the_lowest_bits(bits: int, expected: list[int]) -> None:
    assert tables.packed(np.array([[1, 2, 3, 0]], np.uint8), bits).tolist() == [expected]


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_small_comparison(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs the train extra")
    monkeypatch.setattr(harness, "TURN_SECONDS", 0.001)
    case = tables.Case(2, 400, 16, bits, True)
    report = tables.compare(case, 64, [1, 3], ["zipf"], ["zoo", "torch"], 1)
    assert [lookup["pooling"] for lookup in report["lookups"]] == [1, 3]
    assert ("torch" in report["left_out"]) == (bits == 2)
    assert all(("ratio" in lookup) == (bits > 2) for lookup in report["lookups"])
    page = tables.rendered({"tables": [report], "environment": {"batch_size": 64}}, "a machine")
    assert f"|2|{bits}|zipf|3|" in page.replace(" ", "")


def test_wrong_sums_leave_an_engine_out() -> None:
    with pytest.raises(ZooError, match="fbgemm returns sums that differ by 1"):
        tables._require_close("fbgemm", np.ones((4, 32)), np.zeros((4, 32)), CASE, 1)
