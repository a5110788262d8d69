"""An image classifier made smaller and int8 by the methods of its peers, for `compression --peers`; small images only.

torch-pruning    channels go by GroupTaylorImportance over all layers (`BasePruner(global_pruning=True)`, a gradient of
                 512 images before every step, widths rounded to 16) until the network has as few multiplications as
                 this project's; fine-tuned as the library's own benchmark of CIFAR-10 is (SGD, .01, momentum .9, weight
                 decay 5e-4; here to zero by a cosine); exported by torch, and int8 by onnxruntime's quantize_static
                 (MinMax, per channel), which runs it
nncf             single weights go by their magnitude (`nncf.prune`, UNSTRUCTURED_MAGNITUDE_GLOBAL) until as many are
                 left as this project's network has, in two steps as in the library's example, fine-tuned (Adam, 1e-5,
                 as there too); `nncf.quantize`, and the last quarter of the epochs with its rounding; converted to
                 OpenVINO, which runs it

Both are trained on the same images as this project's, crops and mirror images of them, for the same number of epochs.
"Before" is the network as it was, int8 by the same library without training. What runs takes normalized pixels.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import zoo
from pipelines.core.console import print_line
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, replacing, sha256, write_json
from pipelines.core.progress import progress
from pipelines.models.family import network_of
from scripts.peers.engines import onnx_runtime, open_vino
from scripts.peers.quantization.settings import size_of

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH, PADDING, TILE = 128, 4, 16
SEEN, KEPT = 512, 128  # images of a gradient, for calibration
STEPS = 100  # cuts of torch-pruning, at most: of a hundredth of the channels each
ABOUT, STATE = "about.json", "state.pt"


@dataclass(frozen=True)
class Task:
    """Task of a peer: make one model as small as another.

    Attributes:
        before: Model to make smaller, by name or folder.
        after: Model of the size to reach, by name or folder.
        images: Raw data that `zoo train` takes.
        epochs: Training epochs, two at least.
        most: Images of an epoch, others in each; 0 for all.
    """

    before: str
    after: str
    images: str
    epochs: int
    most: int = 0

    @cached_property
    def start(self) -> tuple[dict[str, Any], nn.Module]:
        """The preprocessing and the network to make smaller."""
        return network(self.before)

    def fresh(self) -> nn.Module:
        """Returns a copy of the network."""
        return copy.deepcopy(self.start[1])

    @cached_property
    def example(self) -> Tensor:
        """An input of the network, float32 [1, 3, size, size]."""
        import torch

        size = self.start[0]["size"]
        return torch.zeros(1, 3, size, size)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalizes uint8 [n, 3, size, size] to the network's input."""
        import torch

        from zoo.vision.training.distillation import Normalize

        return Normalize(self.start[0], torch.device("cpu"))(pixels)

    @cached_property
    def data(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The images: {"train", "held_out": (pixels uint8 [n, 3, size, size], labels int64 [n])}.

        Raises:
            RequestError: The images are large.
        """
        import torch

        from zoo.vision.data.datasets import open_images, prepare

        images = open_images(self.images, held_out=0.1, seed=0, on_error="raise")
        if images.train.pixels is None:
            raise RequestError(f"found large images in {self.images}, expected small ones such as CIFAR-10's")
        parts = {}
        for name, split in (("train", images.train), ("held_out", images.held_out)):
            pixels = np.stack([prepare(split.image(i), self.start[0]).transpose(2, 0, 1) for i in range(len(split))])
            parts[name] = torch.from_numpy(pixels), torch.from_numpy(split.labels)
        return parts

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns `count` normalized training images and their labels, always the same ones."""
        import torch

        pixels, labels = self.data["train"]
        chosen = torch.from_numpy(np.sort(np.random.default_rng(0).choice(len(labels), min(count, len(labels)), False)))
        return self.normalize(pixels[chosen]), labels[chosen]

    def to_json(self) -> dict[str, Any]:
        """Returns the identity of the task, which a training that is resumed must have."""
        models = {"before": self.before, "after": self.after}
        digests = {name: sha256(zoo.load(model).ensure("fp32.onnx")) for name, model in models.items()}
        return {**digests, "images": Path(self.images).name, "epochs": self.epochs, "images_an_epoch": self.seen}

    @property
    def seen(self) -> int:
        """Images of an epoch: full batches."""
        count = len(self.data["train"][1])
        return min(self.most or count, count) // BATCH * BATCH


@dataclass(frozen=True)
class Made:
    """Files of a peer.

    Attributes:
        engine: Engine that runs the files.
        before: The int8 model before pruning.
        after: The int8 model after pruning and training.
        about: Facts of the training for the report.
    """

    engine: str
    before: Path
    after: Path
    about: dict[str, Any]

    @property
    def sizes(self) -> list[int]:
        """Bytes of both models."""
        return [size_of(path) for path in (self.before, self.after)]


def network(model: str) -> tuple[dict[str, Any], nn.Module]:
    """Returns the preprocessing and the trained network of an image classifier.

    Raises:
        RequestError: The model is of another task.
    """
    folder = zoo.load(model)
    if folder.entry.task != "images":
        raise RequestError(f"found {model} of {folder.entry.name}, expected an image classifier")
    about, module = network_of(folder)
    return about["features"], module


def make(peer: str, task: Task, place: Path) -> Made:
    """Makes the files of a peer; a training that was interrupted in the same folder is resumed.

    Args:
        peer: Name of the peer.
        task: The task.
        place: Folder of the files.

    Returns:
        The files.

    Raises:
        RequestError: The folder is of another task.
    """
    place.mkdir(parents=True, exist_ok=True)
    record = place / ABOUT
    if record.is_file():
        about = read_json(record)
        if about["task"] != task.to_json():
            raise RequestError(f"found {place} of another task, expected one of this; name another folder with --work")
        if "seconds" in about:
            return _made(peer, place, about)
    write_json(record, {"task": task.to_json()})
    begin = time.monotonic()
    about = PEERS[peer].make(task, place)
    write_json(record, about := {"task": task.to_json(), **about, "seconds": round(time.monotonic() - begin, 1)})
    return _made(peer, place, about)


def _made(peer: str, place: Path, about: dict[str, Any]) -> Made:
    kind = PEERS[peer]
    return Made(kind.engine, *(place / f"{name}{kind.suffix}" for name in ("before", "after")), about)


# ------------------------------------------------------------------------------------------------------------- training


def batches(task: Task, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields `task.seen` normalized training images and their labels in batches.

    Images are cut out of a border of `PADDING`, every other one mirrored.
    """
    import torch
    from torch.nn import functional

    pixels, labels = task.data["train"]
    random = torch.Generator().manual_seed(epoch)
    order, size = torch.randperm(len(labels), generator=random), pixels.shape[-1]
    for begin in range(0, task.seen, BATCH):
        chosen = order[begin : begin + BATCH]
        wide = functional.pad(pixels[chosen], [PADDING] * 4)
        top, left = torch.randint(2 * PADDING + 1, (2, BATCH, 1), generator=random)
        rows, columns = (corner + torch.arange(size) for corner in (top, left))
        cut = wide[torch.arange(BATCH)[:, None, None], :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
        mirrored = torch.rand(BATCH, generator=random) < 0.5
        cut = torch.where(mirrored[:, None, None, None], cut.flip(3), cut)
        yield task.normalize(cut), labels[chosen]


def train(
    student: nn.Module,
    task: Task,
    span: tuple[int, int],
    state: Path,
    optimizer: Any,
    *,
    rate: Callable[[float], float] = lambda done: 1.0,
    before: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Trains a network by cross entropy, from the state that is kept after every epoch, if there is one.

    Args:
        student: The network; changed in place.
        task: The task.
        span: First epoch, and the one after the last.
        state: File of the state.
        optimizer: The optimizer of the network.
        rate: Factor of the learning rate by the share of the training done.
        before: Called with the number of each epoch that begins.
    """
    import torch
    from torch.nn import functional

    done = span[0]
    if state.is_file():
        kept = torch.load(state, weights_only=True)
        student.load_state_dict(kept["student"])
        optimizer.load_state_dict(kept["optimizer"])
        done = kept["epoch"]
    first, steps = [group["lr"] for group in optimizer.param_groups], task.seen // BATCH
    for epoch in range(done, span[1]):
        before(epoch)
        student.train()
        total = 0.0
        with progress(f"{state.parent.name}: epoch {epoch + 1} of {task.epochs}", steps) as advance:
            for step, (x, y) in enumerate(batches(task, epoch)):
                share = (epoch - span[0] + step / steps) / (span[1] - span[0])
                for group, start in zip(optimizer.param_groups, first, strict=True):
                    group["lr"] = start * rate(share)
                loss = functional.cross_entropy(student(x), y)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                total += loss.item()
                advance(1)
        kept = {"student": student.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        for group, start in zip(kept["optimizer"]["param_groups"], first, strict=True):
            group["lr"] = start
        with replacing(state) as temporary:
            torch.save(kept, temporary)
        print_line(f"{state.parent.name}: epoch {epoch + 1}/{task.epochs}  loss {total / steps:.4f}")


def cosine(done: float) -> float:
    """Returns the factor of a cosine schedule, from 1 to 0."""
    return (1 + math.cos(math.pi * done)) / 2


# ------------------------------------------------------------------------------------------------------- torch-pruning


def by_torch_pruning(task: Task, place: Path) -> dict[str, Any]:
    """Writes before.onnx and after.onnx, int8."""
    import torch
    import torch_pruning as tp
    from torch import nn
    from torch.nn import functional

    def cost(module: nn.Module) -> tuple[float, float]:
        counts: tuple[float, float] = tp.utils.count_ops_and_params(module, task.example)
        return counts

    student, goal = task.fresh(), cost(network(task.after)[1])
    whole = cost(student)
    head = [module for module in student.modules() if isinstance(module, nn.Linear)][-1]
    x, y = task.sample(SEEN)
    options = {"global_pruning": True, "round_to": TILE, "ignored_layers": [head], "iterative_steps": STEPS}
    importance = tp.importance.GroupTaylorImportance()
    pruner = tp.pruner.BasePruner(
        student, task.example, importance, pruning_ratio=1.0, max_pruning_ratio=0.9, **options
    )
    with progress("torch-pruning: cuts") as advance:
        for _ in range(STEPS):
            if cost(student)[0] <= goal[0]:
                break
            student.eval().zero_grad()
            torch.autograd.backward(functional.cross_entropy(student(x), y))
            pruner.step()
            advance(1)
    student.zero_grad()
    for name, model in (("before", task.fresh()), ("after", student)):
        if name == "after":
            sgd = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=5e-4)
            train(model, task, (0, task.epochs), place / STATE, sgd, rate=cosine)
        _quantized(model, task, place / f"{name}.onnx")
    left = cost(student)
    return {"multiplications": [whole[0], left[0]], "weights": [whole[1], left[1]]}


def _quantized(student: nn.Module, task: Task, path: Path) -> None:
    """Exports a network by torch and quantizes it by onnxruntime."""
    import tempfile
    import warnings

    import torch

    student.eval()
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fp32, names = Path(scratch) / "fp32.onnx", {"input_names": ["image"], "output_names": ["logits"]}
        axes = {"image": {0: "n"}, "logits": {0: "n"}}
        torch.onnx.export(student, (task.example,), str(fp32), dynamo=False, dynamic_axes=axes, **names)
        samples = task.sample(KEPT)[0].contiguous().numpy()
        onnx_runtime.quantize_static(fp32, path, ({"image": sample[None]} for sample in samples))


# ---------------------------------------------------------------------------------------------------------------- NNCF


def by_nncf(task: Task, place: Path) -> dict[str, Any]:
    """Writes before.xml and after.xml, int8."""
    os.environ.setdefault("NNCF_EXTENSION_LOAD_TIMEOUT", "0")  # it compiles, which may take minutes
    import nncf
    import torch
    from nncf.torch.function_hook.pruning.magnitude.schedulers import MultiStepMagnitudePruningScheduler

    samples = nncf.Dataset([sample[None] for sample in task.sample(KEPT)[0]])

    def quantized(module: nn.Module) -> nn.Module:
        result: nn.Module = nncf.quantize(module.eval(), samples, subset_size=KEPT)
        return result

    def parameters(module: nn.Module) -> int:
        return sum(weight.numel() for weight in module.parameters())

    _converted(quantized(task.fresh()), task, place / "before.xml")
    whole, left = parameters(task.start[1]), parameters(network(task.after)[1])
    mode, ratio = nncf.PruneMode.UNSTRUCTURED_MAGNITUDE_GLOBAL, max(0.0, 1 - left / whole)
    student = nncf.prune(task.fresh(), mode=mode, ratio=ratio, examples_inputs=task.example)
    rounding = max(1, task.epochs // 4)
    cut = task.epochs - rounding
    steps = {0: ratio} if cut < 2 else {0: ratio * 5 / 7, cut // 2: ratio}  # .5, then .7 in the example
    schedule = MultiStepMagnitudePruningScheduler(student, mode=mode, steps=steps)
    adam = torch.optim.Adam(student.parameters(), 1e-5)
    train(student, task, (0, cut), place / f"pruned.{STATE}", adam, before=schedule.step)
    sparse = nncf.pruning_statistic(student).pruning_ratio
    student = quantized(student)
    adam = torch.optim.Adam(student.parameters(), 1e-5)
    train(student, task, (cut, task.epochs), place / STATE, adam)
    _converted(student, task, place / "after.xml")
    return {"weights": [whole, round(whole * (1 - float(sparse)))], "epochs_of_rounding": rounding}


def _converted(student: nn.Module, task: Task, path: Path) -> None:
    import openvino as ov

    shape = [-1, *task.example.shape[1:]]
    made = ov.convert_model(student.eval(), example_input=task.example, input=shape)
    for port, name in ((made.inputs[0], "image"), (made.outputs[0], "logits")):
        port.get_tensor().set_names({name})
    open_vino.save(made, path)


@dataclass(frozen=True)
class Peer:
    """A peer.

    Attributes:
        make: Writes both models into a folder; returns facts for the report.
        engine: Engine that runs the models.
        suffix: Suffix of the files.
    """

    make: Callable[[Task, Path], Mapping[str, Any]]
    engine: str
    suffix: str


PEERS = {"torch-pruning": Peer(by_torch_pruning, "onnxruntime", ".onnx"), "nncf": Peer(by_nncf, "openvino", ".xml")}
