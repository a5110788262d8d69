"""Strategies: their file, what is wrong with one, and the steps that a schedule becomes."""

import json

import pytest

from pipelines.compression import strategy
from pipelines.compression.strategy import Goal, Strategy, goal, preset, read
from pipelines.core.errors import RequestError


def written(folder, content):
    path = folder / "compress.json"
    path.write_text(json.dumps(content))
    return path


def test_a_schedule_becomes_steps_that_begin_where_a_strategy_begins_ends_or_cuts():
    schedule = Strategy(
        12,
        (
            {"kind": "distil", "from": 0, "to": 12, "teacher": "big", "temperature": 4},
            {"kind": "prune", "from": 2, "to": 8, "goal": "1.5x", "schedule": "iterative", "times": 3},
            {"kind": "qat", "from": 9, "to": 12},
        ),
    )
    steps = schedule.steps()
    assert [step.epochs for step in steps] == [2, 2, 2, 2, 1, 3]
    assert [step.name.partition("-")[2] for step in steps] == [
        "distil", "prune-distil", "prune-distil", "prune-distil", "distil", "distil-qat",
    ]  # fmt: skip
    assert [round(step.cut.goal.speed, 3) for step in steps if step.cut] == [1.145, 1.31, 1.5]
    assert all(dict(step.distil) == {"teacher": "big", "temperature": 4} for step in steps)


def test_pruning_during_training_cuts_before_every_epoch():
    steps = Strategy(3, ({"kind": "prune", "goal": "ratio=.3", "schedule": "during"},)).steps()
    assert [(step.epochs, round(step.cut.goal.ratio, 3)) for step in steps] == [(1, 0.1), (1, 0.2), (1, 0.3)]


def test_the_preset_distils_cuts_and_trains_for_int8_in_that_order(tmp_path):
    steps = read(written(tmp_path, {"preset": "distil-prune-qat", "epochs": 12, "goal": "1.5x"})).steps()
    assert [(step.name, step.epochs) for step in steps] == [("1-distil", 3), ("2-prune-distil", 6), ("3-distil-qat", 3)]
    assert [step.qat for step in steps] == [False, False, True]


def test_a_strategy_is_written_as_it_is_read(tmp_path):
    made = preset(8, "1.5x", teacher="big", drop=0.01)
    assert read(written(tmp_path, made.to_json())).to_json() == made.to_json()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1.5x", Goal(speed=1.5)),
        ("2x", Goal(speed=2)),
        ("ratio=.3", Goal(ratio=0.3)),
        ("rows=5", Goal(rows=5)),
        ("rows=5, 1.5x", Goal(speed=1.5, rows=5)),
    ],
)
def test_goals(text, found):
    assert goal(text) == found
    assert goal(str(found)) == found


@pytest.mark.parametrize(
    "text", ["1x", ".5x", "ratio=0", "ratio=1", "ratio=1.5", "half", "", "1.5", "-2x", "rows=0", "rows=.5", "rows=3,"]
)
def test_a_goal_that_is_none_is_said_in_one_line(text):
    with pytest.raises(RequestError, match="expected") as error:
        goal(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["1.5x,ratio=.3", "rows=3,rows=3", "1.5x,2x"])
def test_of_two_goals_that_are_one_it_is_said(text):
    with pytest.raises(RequestError, match="expected one speed or one share of channels, and rows once"):
        goal(text)


def test_rows_go_in_the_first_cut():
    steps = Strategy(4, ({"kind": "prune", "goal": "ratio=.4,rows=5", "schedule": "iterative", "times": 2},)).steps()
    assert [str(step.cut.goal) for step in steps] == ["ratio=0.2,rows=5", "ratio=0.4"]
    (only,) = Strategy(4, ({"kind": "prune", "goal": "rows=5"},)).steps()
    assert only.cut.goal == Goal(rows=5) and not only.cut.goal.channels


PRUNE = {"kind": "prune", "goal": "1.5x"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is not of type 'object'"),
        ({"strategies": [PRUNE]}, "'epochs' is a required property"),
        ({"epochs": 0, "strategies": [PRUNE]}, "epochs: 0 is less than the minimum"),
        ({"epochs": 4, "strategies": []}, "strategies"),
        ({"epochs": 4, "strategies": [{"kind": "melt"}]}, r"strategies\[0\].kind: 'melt' is not one of"),
        ({"epochs": 4, "strategies": [{"kind": "prune"}]}, "'goal' is a required property"),
        ({"epochs": 4, "strategies": [PRUNE | {"teacher": "x"}]}, "Additional properties"),
        ({"epochs": 4, "strategies": [PRUNE | {"importance": "luck"}]}, "'luck' is not one of"),
        ({"epochs": 4, "strategies": [PRUNE | {"from": 3, "to": 9}]}, "expected a span within 0 to 4"),
        ({"epochs": 4, "strategies": [PRUNE | {"from": 3, "to": 3}]}, "expected a span"),
        ({"epochs": 4, "strategies": [PRUNE | {"goal": "1x"}]}, "above 1x"),
        ({"epochs": 4, "strategies": [PRUNE | {"goal": "rows=5", "times": 2}]}, "found times beside the goal rows=5"),
        ({"epochs": 4, "strategies": [PRUNE | {"schedule": "iterative", "times": 9}]}, "at most once an epoch"),
        ({"epochs": 4, "strategies": [PRUNE | {"from": 2}, {"kind": "qat", "to": 2}]}, "after qat began"),
        ({"epochs": 4, "strategies": [PRUNE, PRUNE]}, "prune twice"),
        ({"epochs": 4, "strategies": [{"kind": "distil"}, {"kind": "distil", "from": 2}]}, "two teachers"),
        ({"preset": "melt", "epochs": 4, "goal": "1.5x"}, "'melt' is not one of"),
        ({"preset": "distil-prune-qat", "epochs": 1, "goal": "1.5x"}, "epoch"),
    ],
)
def test_a_fault_of_the_file_is_one_line_that_names_its_place(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(RequestError, match=message) as error:
        read(path)
    assert "\n" not in str(error.value)


def test_every_kind_of_strategy_has_a_schema():
    assert set(strategy._KINDS) == {"distil", "prune", "qat"}
