"""What is cut: cheapest first, up to a share of channels or a measured speed."""

from typing import ClassVar

import pytest

from pipelines.compression.search import by_ratio, by_speed, choose, chosen, cuts, sensitivity
from pipelines.compression.strategy import Cut, Goal
from pipelines.core.errors import RequestError


class Model:
    """Two groups, of which `dear` matters ten times as much; `dear` takes twice the time."""

    groups: ClassVar = {"dear": 64, "cheap": 64}
    tiles: ClassVar = {"dear": 16, "cheap": 16}

    def loss(self, widths):
        return 1.0 + sum((64 - width) / 64 * {"dear": 1.0, "cheap": 0.1}[name] for name, width in widths.items())

    def speed(self, widths):
        now = self.groups | dict(widths)
        return 4.0 / (1.0 + 2 * now["dear"] / 64 + now["cheap"] / 64)


def test_sensitivity_is_the_loss_of_each_group_cut_alone():
    measured = sensitivity(Model())
    assert measured["loss"] == 1.0
    assert measured["groups"]["dear"] == {"width": 64, "losses": {"0.25": 1.25, "0.5": 1.5, "0.75": 1.75}}
    assert measured["groups"]["cheap"]["losses"]["0.5"] == 1.05


def test_what_matters_least_goes_first_in_tiles():
    order = cuts(sensitivity(Model()), Model.groups, Model.tiles, {"dear": 1.0, "cheap": 1.0})
    assert order[:3] == [("cheap", 48), ("cheap", 32), ("cheap", 16)]
    assert all(width % 16 == 0 and width >= 16 for _, width in order)
    assert dict(order) == {"cheap": 16, "dear": 16}


def test_what_saves_no_time_is_cut_last():
    order = cuts(sensitivity(Model()), Model.groups, Model.tiles, {"dear": 1.0, "cheap": 0.0})
    assert order[:3] == [("dear", 48), ("dear", 32), ("dear", 16)]


def test_a_width_that_is_no_multiple_of_the_tile_is_cut_to_one():
    measured = {"loss": 1.0, "groups": {"odd": {"width": 40, "losses": {"0.5": 1.1}}}}
    assert cuts(measured, {"odd": 40}, {"odd": 16}, {"odd": 1.0}) == [("odd", 32), ("odd", 16)]


def test_a_ratio_is_of_all_channels():
    order = cuts(sensitivity(Model()), Model.groups, Model.tiles, {"dear": 1.0, "cheap": 1.0})
    assert by_ratio(order, Model.groups, 128, 0.25) == {"dear": 64, "cheap": 32}
    with pytest.raises(RequestError, match="at most 75%"):
        by_ratio(order, Model.groups, 128, 0.9)


def test_a_speed_is_reached_by_measuring_and_an_impossible_one_is_said():
    model = Model()
    order = cuts(sensitivity(model), model.groups, model.tiles, {"dear": 1.0, "cheap": 1.0})
    widths, reached = by_speed(order, model.groups, 1.2, model.speed)
    assert widths == {"dear": 64, "cheap": 16} and reached == pytest.approx(1.23, abs=0.01)
    with pytest.raises(RequestError, match="with all groups pruned, expected 5x"):
        by_speed(order, model.groups, 5, model.speed)


def test_time_decides_where_a_goal_is_a_speed():
    model = Model()
    measured = sensitivity(model)
    made = choose(model, measured, Cut(Goal(speed=1.5)), Goal(speed=1.5), 128, model.speed)
    assert made["speed"] >= 1.5 and made["widths"]["cheap"] == 16
    assert made["saved"] == {"dear": 0.25, "cheap": 0.125}


def test_only_named_layers_are_cut_and_unknown_ones_are_said():
    assert chosen(Model.groups, ["che*"]) == {"cheap": 64}
    with pytest.raises(RequestError, match="found no layers blocks"):
        chosen(Model.groups, ["che*", "blocks.*"])
