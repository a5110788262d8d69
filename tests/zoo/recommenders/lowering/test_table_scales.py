"""Scales of an earlier model are kept as long as the values of a newer one fit, and widened otherwise."""

import numpy as np

from zoo.recommenders.lowering.table_scales import ROOM, TableScales


def test_scales_that_fit_are_kept() -> None:
    first = TableScales()
    low, high = np.array([[-1.0, -2.0]]), np.array([[1.0, 0.5]])
    assert first.largest("0 user", 2.0) == 2.0
    assert [bound.tolist() for bound in first.ranges("deep", low, high)] == [low.tolist(), high.tolist()]
    assert first.order("deep", np.array([1, 0])).tolist() == [1, 0]
    second = TableScales(first.used)
    assert second.largest("0 user", 1.5) == 2.0 and second.largest("1 item", 1.5) == 1.5
    kept = second.ranges("deep", low / 2, high / 2)
    assert [bound.tolist() for bound in kept] == [low.tolist(), high.tolist()]
    assert second.order("deep", np.array([0, 1])).tolist() == [1, 0]
    assert second.order("other", np.array([0, 1])).tolist() == [0, 1]


def test_scales_that_do_not_fit_get_room() -> None:
    first = TableScales()
    first.largest("0 user", 2.0)
    first.ranges("deep", np.array([[-1.0]]), np.array([[1.0]]))
    second = TableScales(first.used)
    assert second.largest("0 user", 3.0) == 3.0 * ROOM
    low, high = second.ranges("deep", np.array([[-1.0]]), np.array([[3.0]]))
    assert low < -1 and high > 3 and high - low == 4 * ROOM
    third = TableScales(second.used)
    assert third.largest("0 user", 3.5) == 3.0 * ROOM
    assert third.ranges("deep", np.array([[-1.2]]), np.array([[3.2]]))[1] == high
    other_shape = third.ranges("deep", np.zeros((2, 1)), np.ones((2, 1)))
    assert other_shape[0].shape == (2, 1)
