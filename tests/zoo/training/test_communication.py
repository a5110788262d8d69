"""Gradients between processes: the search for the quickest way, what it remembers, and accumulation without exchange."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import copy, json, os, sys, time
from dataclasses import asdict
import torch
from torch import nn
from zoo.training import communication
from zoo.training.communication import Communication
from zoo.training.runs import processes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
with processes() as group:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(group.rank))
    def step(module):
        module(x).square().mean().backward()
    means = {}
    for way in (Communication(), Communication("bf16"), Communication("fp16", 1.0, 1, True), Communication(static_graph=True)):
        wrapped = way.wrap(copy.deepcopy(model), group)
        step(wrapped)
        means[str(asdict(way))] = [float(each.grad.double().norm()) for each in wrapped.module.parameters()]
    slow = {"before": 0.02, "after": 0.005}
    class Slowed(Communication):
        # the exchange of all but bf16 takes longer, wherever this runs
        def wrap(self, module, group):
            wrapped = super().wrap(module, group)
            wait = slow["after" if self.hook == "bf16" else "before"]
            wrapped.register_forward_pre_hook(lambda *_: time.sleep(wait))
            return wrapped
    communication.CANDIDATES = {"hook": ("bf16", "fp16"), "bucket_cap_mb": (4.0,)}
    found = communication.tuned(model, group, step, Slowed(), about=sys.argv[1])
    communication.CANDIDATES = {"hook": ("fp16",)}
    kept = communication.tuned(model, group, step, Slowed("bf16"), about="kept")
    def never(module):
        raise AssertionError("what is known is not timed again")
    again = communication.tuned(model, group, never, Slowed("bf16"), about="kept")
    if group.rank == 0:
        print(json.dumps({"means": means, "found": found, "kept": kept, "again": again}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("communication")
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(folder / "script.py"), "x"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ZOO_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_all_ways_give_the_same_gradients(said):
    exact, *others = said["means"].values()
    for means in others:
        assert means == pytest.approx(exact, rel=2e-2)
    assert others[-1] == exact  # a static graph


@pytest.mark.slow
def test_what_is_quicker_by_more_than_noise_is_taken(said):
    choice = said["found"]
    assert choice["communication"]["hook"] == "bf16"
    assert choice["speedup"] > 1.5
    assert [(trial["option"], trial["value"]) for trial in choice["tried"][:2]] == [("hook", "bf16"), ("hook", "fp16")]
    assert all(0 <= share < 1 for share in choice["share"])


@pytest.mark.slow
def test_what_is_not_quicker_stays_as_it_was_and_is_remembered(said):
    kept = said["kept"]
    assert kept["communication"]["hook"] == "bf16"
    assert kept["speedup"] == 1
    assert said["again"] == kept
