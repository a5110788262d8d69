"""What the tests of torch trainings share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

COLORS = {"red": (200, 60, 60), "green": (60, 200, 60), "blue": (60, 60, 200)}
SCRIPT = """
import json, multiprocessing, os, signal, socket, sys
sys.path[:0] = json.loads(sys.argv[1])
import {module}

def work(rank=None):
    if rank is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    {module}.in_processes(sys.argv[2], sys.argv[3], resume="--resume" in sys.argv)

if "RANK" in os.environ:  # torchrun starts this script twice
    work()
else:  # as torchrun does, but what is imported is imported once
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = [multiprocessing.get_context("fork").Process(target=work, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in ranks])
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def write_images(
    folder: Path, classes: dict[str, tuple[int, int, int]] = COLORS, size: int = 16, count: int = 24
) -> Path:
    """Noisy pictures of one color a class, `count` to train on and a third as many to test."""
    random = np.random.default_rng(0)
    for split, number in (("train", count), ("test", count // 3)):
        for label, color in classes.items():
            (folder / split / label).mkdir(parents=True)
            for i in range(number):
                pixels = np.clip(np.array(color) + random.normal(0, 40, (size, size, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{i}.png")
    return folder


def broken_off(owner, steps: int, train) -> None:
    """Call `train`, which a person ends in the step after `steps` of the class `owner`."""
    step = owner.step

    def break_off(*arguments):
        nonlocal steps
        steps -= 1
        if steps < 0:
            raise KeyboardInterrupt
        return step(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, "step", break_off)
        train()


def weights(folder: Path):
    """The network's tensors of a model folder."""
    import torch

    return torch.load(folder / "model.pt", weights_only=True)["state_dict"]


def assert_same_weights(a: Path, b: Path) -> None:
    import torch

    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def random_network(build, features, config):
    """A recommender of small random weights, in evaluation."""
    import torch

    torch.manual_seed(0)
    network = build(features, config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for module in network.modules():
            if hasattr(module, "clear"):
                module.clear()
    return network


def results(network, rows):
    """All that a recommender gives for rows of a log's store."""
    import torch

    with torch.no_grad():
        outputs = network(rows["ids"], rows["numbers"], rows["scales"])
    return [output.numpy() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]


class TwoProcesses:
    """Two processes that call `in_processes(data, folder, resume=...)` of a test module; launcher: options of Python."""

    def __init__(self, module: str, data: Path, folder: Path, launcher: tuple[str, ...] = ()) -> None:
        script, here = folder / "script.py", Path(__file__).resolve().parents[1]
        script.write_text(SCRIPT.format(module=module))
        self.command = [sys.executable, *launcher, str(script), json.dumps([str(here.parent), str(here)]), str(data)]

    def start(self, *words: object) -> subprocess.Popen:
        """Train into the folder named first; further words go to the processes."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*self.command, *map(str, words)], stderr=subprocess.PIPE, text=True, env=environment)

    def train(self, folder: Path) -> str:
        """Train to the end of three epochs; returns what was said, by one of them."""
        done = self.start(folder)
        said = done.communicate(timeout=120)[1]
        assert done.returncode == 0, said
        assert said.count("epoch 3/3") == 1
        return said

    def stop_and_resume(self, folder: Path) -> None:
        """Train, are stopped after the second epoch, and go on."""
        first = self.start(folder)
        for line in first.stderr:
            if "epoch 2/3" in line:
                break
        first.terminate()
        first.communicate(timeout=60)
        self.start(folder, "--resume").communicate(timeout=120)
