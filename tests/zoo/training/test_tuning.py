"""Choice of precision and gradient exchange."""

from dataclasses import dataclass, replace

import pytest

from pipelines.core import machine

torch = pytest.importorskip("torch", reason="needs the train extra")
from zoo.training import tuning  # noqa: E402
from zoo.training.communication import Communication  # noqa: E402
from zoo.training.runs import Processes  # noqa: E402


@dataclass(frozen=True)
class Recipe:
    precision: str = "auto"
    tune_communication: bool = True
    accumulate: int = 2


def loss(model, bf16):
    return model(torch.ones(3, 4)).square().sum()


def choose(model, group, config, part=loss):
    return tuning.choose(model, group, config, loss, part, Communication(), about="3")


def test_the_quicker_precision_is_chosen(monkeypatch):
    monkeypatch.setattr(machine, "has_bf16", lambda: True)
    for quick in (True, False):
        monkeypatch.setattr(tuning, "time_step", lambda model, loss, bf16, quick=quick: 1.0 + (bf16 != quick))
        assert choose(torch.nn.Linear(4, 2), Processes(), Recipe()) == {"precision": "bf16" if quick else "fp32"}


def test_timing_leaves_no_trace():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert tuning.time_step(model, loss, bf16=False) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_processes_compare_exchanges_on_a_part_of_a_batch(monkeypatch):
    model, asked, losses = torch.nn.Linear(4, 2), [], []

    def tuned(model, group, step, start, *, about, whole):
        step(model)
        asked.append((about, whole))
        return {"communication": {"hook": "bf16"}}

    def part(model, bf16):
        losses.append(bf16)
        return loss(model, bf16)

    monkeypatch.setattr(tuning, "tuned", tuned)
    two, config = Processes(0, 2), Recipe("bf16")
    choice = choose(model, two, config, part)
    assert choice == {"precision": "bf16", "communication": {"hook": "bf16"}}
    assert asked == [("3 bf16 2", False)] and losses == [True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert choose(model, two, replace(config, tune_communication=False)) == {"precision": "bf16"}


def test_a_single_process_trains_the_network_itself():
    model = torch.nn.Linear(4, 2)
    assert tuning.distribute(model, Processes(), {"precision": "fp32"}, Communication()) is model
