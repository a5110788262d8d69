"""What trainings of all tasks share: their curves and threads."""

import os

import pytest
from PIL import Image

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("matplotlib", reason="needs the train extra")

import torch

from pipelines.core import machine
from zoo.training.runs import plot_curves, processes


@pytest.mark.parametrize(("epochs", "best"), [(1, None), (3, 2)])
def test_curves_are_drawn(tmp_path, epochs, best):
    history = [{"epoch": epoch, "loss": 1 / epoch, "auc": 1 - 1 / epoch} for epoch in range(1, epochs + 1)]
    loss, auc = {"loss": ("loss, held out", "C0-")}, {"auc": ("AUC, held out", "C1-")}
    for name in ("curves.png", "again.png"):
        plot_curves(tmp_path / name, history, loss, auc, ("loss", "AUC"), best)
    with Image.open(tmp_path / "curves.png") as image:
        assert image.size == (840, 480) and len(image.convert("RGB").getcolors(1 << 20)) > 10
    assert (tmp_path / "curves.png").read_bytes() == (tmp_path / "again.png").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "again.png"}


@pytest.mark.parametrize(("quota", "threads"), [("150000 100000", 1), ("max 100000", 4), ("900000 100000", 4)])
def test_torch_obeys_a_cpu_quota(quota, threads, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(quota)
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        with processes():
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
