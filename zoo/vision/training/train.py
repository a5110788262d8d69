"""Training and fine-tuning of image classifiers, in one process or in several under torchrun."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.utils.data import DataLoader

from pipelines.compression.channels import resize
from pipelines.core.console import print_line
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import write_json
from pipelines.core.progress import progress
from pipelines.models.npz import write_npz
from zoo.training import tuning
from zoo.training.communication import Communication, exchanging
from zoo.training.runs import (
    QAT_FROZEN,
    Processes,
    load_checkpoint,
    plot_curves,
    processes,
    provenance,
    require_output,
    save_checkpoint,
    save_weights,
)
from zoo.vision.data.augmentation import Views
from zoo.vision.data.datasets import SMALL, Images, LabelledImages, one_source, open_images, prepare
from zoo.vision.metrics import class_metrics, rank
from zoo.vision.training import qat
from zoo.vision.training.config import Settings
from zoo.vision.training.depthwise import spare_depthwise
from zoo.vision.training.distillation import Normalize, Teacher, teacher_of
from zoo.vision.training.initialization import MODEL, about_of, fill_from
from zoo.vision.training.plots import plot_confusion

STATE = "checkpoint/state.pt"
CALIBRATION_IMAGES = 256
LARGE = 224
SOFT = 0.5  # share of the loss that a teacher's soft labels are, where nothing else is asked of it
# Pixels minus 128, an integer: the zero point of a uint8 input then takes the subtraction over, and zero padding stays
# exact.
PREPROCESSING = {"interpolation": "bilinear", "mean": [128 / 255] * 3, "std": [0.25] * 3, "channels": "RGB"}


# ------------------------------------------------------------------------------------------------------------ one step


def jensen_shannon(logits: torch.Tensor) -> torch.Tensor:
    """Mean divergence of the views' predictions from their mixture (Hendrycks et al. 2020, eq. 2-3): [views, n,
    classes] -> scalar.
    """
    log_views = logits.log_softmax(-1)
    log_mixture = log_views.exp().mean(0).clamp(1e-7, 1).log()
    return (log_views.exp() * (log_views - log_mixture)).sum(-1).mean()


class Trainer:
    """A network in training, its optimizer and the running average of its weights: all that a checkpoint holds."""

    teacher: Teacher | None = None  # see `Settings.teacher`

    def __init__(self, model: nn.Module, config: Settings, features: dict[str, Any], group: Processes) -> None:
        self.config, self.group = config, group
        self.model = model.to(group.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if group.device.type == "cpu":
            spare_depthwise(self.model)
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        decayed = [each for each in self.model.parameters() if each.ndim > 1]
        plain = [each for each in self.model.parameters() if each.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(
            groups, config.learning_rate, config.momentum, nesterov=config.momentum > 0, foreach=True
        )
        self.normalize = Normalize(features, group.device)
        self.bf16, self.steps = config.precision == "bf16", 0
        self.parallel: nn.Module = self.model

    def choose(self, size: int, batch: int) -> dict[str, Any]:
        """How this machine trains fastest, by timing steps on noise: {"precision"}, with tune_communication also what
        `communication.tuned` gives. All processes agree.
        """

        def loss_of(x: torch.Tensor, y: torch.Tensor) -> tuning.Loss:
            return lambda model, bf16: self.loss(model, x, y, 1, bf16)[0]

        part = self._noise(size, -(-batch // self.config.accumulate))
        losses = loss_of(*self._noise(size, batch)), loss_of(*part)
        about = str(tuple(part[0].shape))
        return tuning.choose(self.model, self.group, self.config, *losses, self._communication(), about=about)

    def use(self, chosen: dict[str, Any]) -> None:
        """Train as `choose` found."""
        self.bf16 = chosen["precision"] == "bf16"
        self.parallel = tuning.distribute(self.model, self.group, chosen, self._communication())

    def _communication(self) -> Communication:
        return Communication("bf16" if self.config.compress else "", gradient_as_bucket_view=True)

    def _noise(self, size: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(256, (batch, 3, size, size), dtype=torch.uint8, device=self.group.device)
        return x, torch.zeros(batch, dtype=torch.int64, device=self.group.device)

    def logits(self, model: nn.Module, x: torch.Tensor, bf16: bool) -> torch.Tensor:
        """uint8 [n, 3, size, size] -> float32 [n, classes]."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            return model(self.normalize(x)).float()  # type: ignore[no-any-return]

    def loss(
        self, model: nn.Module, x: torch.Tensor, y: torch.Tensor, views: int, bf16: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of a batch and the logits of its plain images. x: uint8 [views * n, 3, size, size], view after view; y:
        int64 [n].
        """
        logits = self.logits(model, x, bf16).view(views, len(y), -1)
        loss = F.cross_entropy(logits[0], y, label_smoothing=self.config.label_smoothing)
        if self.teacher is not None:
            loss = self.teacher.teach(loss, logits[0], x[: len(y)], bf16)
        if views > 1:
            loss = loss + self.config.jsd * jensen_shannon(logits)
        return loss, logits[0]

    def step(self, x: torch.Tensor, y: torch.Tensor, views: int, epoch_steps: int) -> tuple[float, int]:
        """Train on a batch; returns its loss and how many of its images were recognized."""
        for each in self.optimizer.param_groups:
            each["lr"] = self.config.rate(self.steps, epoch_steps)
        if self.config.qat and self.steps >= (1 - QAT_FROZEN) * self.config.epochs * epoch_steps:
            qat.freeze_ranges(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        whole, right, stacked = 0.0, 0, x.view(views, len(y), *x.shape[1:])
        parts = torch.arange(len(y)).chunk(self.config.accumulate)
        for part in parts:
            with exchanging(self.parallel, part is parts[-1]):
                loss, logits = self.loss(self.parallel, stacked[:, part].flatten(0, 1), y[part], views, self.bf16)
                loss = loss * (len(part) / len(y))
                torch.autograd.backward(loss)
            whole, right = whole + loss.item(), right + int((logits.argmax(1) == y[part]).sum())
        for some in self.optimizer.param_groups[2:]:  # of adapters, which say nothing of the student's own norm
            nn.utils.clip_grad_norm_(some["params"], self.config.clip, foreach=True)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip, foreach=True)
        self.optimizer.step()
        self.steps += 1
        keep = min(self.config.ema, (1 + self.steps) / (10 + self.steps))  # forget the first weights quickly
        means, values = self.average.state_dict(), self.model.state_dict()
        floats = [name for name, each in values.items() if each.is_floating_point()]
        torch._foreach_lerp_([means[name] for name in floats], [values[name] for name in floats], 1 - keep)
        for name in values.keys() - floats:  # counts
            means[name].copy_(values[name])
        return whole, right

    def predict(self, images: Images, features: dict[str, Any], workers: int) -> npt.NDArray[np.float32]:
        """Logits [n, classes] of the averaged weights; every process computes a part, all get the whole."""
        group = self.group
        if group.count > 1:
            for each in self.average.state_dict().values():
                distributed.broadcast(each, 0)
        mine = range(group.rank, len(images), group.count)
        outputs: torch.Tensor | None = None
        batches = [list(mine[i : i + 256]) for i in range(0, len(mine), 256)]
        with torch.inference_mode():
            for indices, x in zip(
                batches, _loader(_Prepared(images, features), batches, workers, np.stack), strict=True
            ):
                logits = self.logits(self.average, torch.from_numpy(x).permute(0, 3, 1, 2).to(group.device), self.bf16)
                outputs = torch.zeros(len(images), logits.shape[1], device=group.device) if outputs is None else outputs
                outputs[indices] = logits
        assert outputs is not None  # every process has images
        if group.count > 1:
            distributed.all_reduce(outputs)
        return outputs.cpu().numpy()

    def listen(self, teacher: Teacher) -> None:
        """Learn from `teacher`, with what fits the student's features to its."""
        self.teacher = teacher
        if own := list(teacher.adapters.parameters()):
            self.optimizer.add_param_group({"params": own, "weight_decay": 0.0})

    @property
    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "average": self.average, "optimizer": self.optimizer}
        return parts if self.teacher is None else parts | {"adapters": self.teacher.adapters}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {**{name: each.state_dict() for name, each in self._parts.items()}, "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to `state`."""
        for name, each in self._parts.items():
            each.load_state_dict(state[name])
        self.steps = state["steps"]


@dataclass(frozen=True)
class _Prepared:
    images: Images
    features: dict[str, Any]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> npt.NDArray[np.uint8]:
        return prepare(self.images.image(index), self.features)


def _loader(data: Any, batches: Sequence[Any], workers: int, collate: Callable[[Any], Any]) -> DataLoader[Any]:
    if data.images.pixels is not None or not workers:
        return DataLoader(data, batch_sampler=batches, collate_fn=collate)
    # from a clean process: to fork this one, with the threads of other libraries in it, can crash
    return DataLoader(
        data, batch_sampler=batches, num_workers=workers, collate_fn=collate, multiprocessing_context="forkserver"
    )


def _collate(samples: list[tuple[npt.NDArray[np.uint8], int]]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Views [views * n, size, size, 3], view after view, and labels [n]."""
    views, labels = zip(*samples, strict=True)
    stacked = np.stack(views, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:]), np.array(labels, np.int64)


def _epoch(trainer: Trainer, images: Images, epoch: int) -> dict[str, Any]:
    """Train on all images once but for an incomplete last batch; returns the epoch's line of the history so far."""
    config, group, start = trainer.config, trainer.group, time.monotonic()
    size, steps = config.size(epoch), _steps(config, images)
    random = np.random.default_rng([config.seed, epoch])
    order = random.permutation(len(images))[: steps * config.batch_size]
    mixed = random.random(steps) < config.augmix
    whole = min(config.batch_size, len(order))
    batches = [
        [(int(i), bool(mixed[step])) for i in order[step * whole : (step + 1) * whole][group.rank :: group.count]]
        for step in range(steps)
    ]
    torch.manual_seed(int(random.integers(2**32)) + group.rank)  # for dropout
    trainer.model.train()
    views = Views(images, size, config.randaugment_n, config.randaugment_m, config.seed, epoch)
    loss, right, seen = 0.0, 0, 0
    title = f"epoch {epoch + 1} of {config.epochs}, {size} px"
    with progress(title, steps) if group.rank == 0 else contextlib.nullcontext(lambda amount: None) as advance:
        for pixels, labels in _loader(views, batches, config.workers, _collate):
            x = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(group.device)
            y = torch.from_numpy(labels).to(group.device)
            batch_loss, batch_right = trainer.step(x, y, len(x) // len(y), steps)
            if not math.isfinite(batch_loss):
                raise ZooError(
                    f"training diverged in epoch {epoch + 1} (loss {batch_loss}); train again with a lower "
                    "learning_rate"
                )
            loss, right, seen = loss + batch_loss, right + batch_right, seen + len(y)
            advance(1)
    return {
        "epoch": epoch + 1,
        "size": size,
        "train_loss": loss / steps,
        "train_top1": right / seen,
        "seconds": round(time.monotonic() - start, 1),
    }


def _steps(config: Settings, images: Images) -> int:
    return max(1, len(images) // config.batch_size)


# ----------------------------------------------------------------------------------------------------------- the whole


def fit(
    build: Callable[[str, int, float], nn.Module],
    data: Any,
    output: str | Path,
    *,
    config: Settings,
    resume: bool = False,
    start_from: str | Path | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Train a classifier on labelled images (whatever `open_images` takes); returns {"top1", "top5", "loss"} on the
    held-out ones.

    build: the untrained network for an architecture, a number of classes and a width, which takes
    normalized float32 [n, 3, size, size] and gives logits [n, classes]. `output` gets model.pt (the averaged weights),
    train.json (arch, classes, features: the preprocessing, config, metrics, ...), calibration.npz ({"image": uint8 [n,
    3, size, size]}, training images as the model sees them), history.json, curves.png, confusion.png, with config.qat
    qat.json (the trained ranges) and, after every epoch, checkpoint/state.pt, from which `resume` goes on to the same
    result. One seed gives the same weights on one machine with one number of processes and threads. `start_from` is a
    model folder whose network, weights and preprocessing are taken over; where its classes are others, the head is a
    new one. Under torchrun every process calls this alike; batch_size is that of all together, and process 0 alone
    writes. Raises RequestError for unusable data, an output folder in use, or a checkpoint of another run.
    """
    output = Path(output)
    with processes() as group:
        require_output(output, STATE, resume)
        if config.batch_size < group.count:
            raise RequestError(
                f"found batch_size {config.batch_size}, wanted at least one image for each of {group.count} processes"
            )
        images = open_images(data, held_out=config.validation, seed=config.seed, on_error=on_error)
        about: dict[str, Any] = about_of(Path(start_from)) if start_from is not None else {"features": PREPROCESSING}
        config = replace(config, **{name: about[name] for name in config.KEPT if name in about})
        torch.manual_seed(config.seed)
        model = resize(build(config.arch, len(images.classes), config.width), about.get("shapes", {}))
        start = fill_from(model, about, list(images.classes)) if start_from is not None else None
        features = dict(about["features"])
        large = images.train.pixels is None
        size = config.image_size or features.get("size", LARGE if large else SMALL)
        config = replace(config, image_size=size)
        if size != features.get("size"):  # of a photo the border is cut off, of a small image nothing
            features |= {"size": size, "resize": round(size * 8 / 7) if large else size}
        start_model = model
        if config.teacher and not config.distilled:
            config = replace(config, distillation=SOFT)
        if config.qat:
            config = qat.settled(config, start, about.get("classes") == list(images.classes), group.count)
            model = qat.prepare(model, features)
        trainer = Trainer(model, config, features, group)
        if config.distilled:
            network, seen = (
                (start_model, features) if not config.teacher else teacher_of(config.teacher, images.classes)
            )
            trainer.listen(Teacher(network.to(group.device), seen, trainer.model, config, group.device))
        run = {
            "config": asdict(config) | {"progressive": list(config.progressive)},
            "data": images.digest,
            "start": start,
        }
        state = load_checkpoint(output / STATE, run) if resume else None
        if state:
            trainer.restore(state)
        history: list[dict[str, Any]] = state["history"] if state else []
        chosen = state["chosen"] if state else trainer.choose(config.size(0), config.batch_size // group.count)
        trainer.use(chosen)
        for epoch in range(len(history), config.epochs):
            found = _epoch(trainer, images.train, epoch)
            here = features if epoch + 1 == config.epochs else _at(features, found["size"])
            logits = trainer.predict(images.held_out, here, config.workers)
            history.append(found | _metrics(logits, images.held_out.labels))
            if group.rank == 0:
                print_line(_line(history, config))
                save_checkpoint(output / STATE, {"run": run, "history": history, "chosen": chosen, **trainer.state()})
            group.checkpointed(output)
        logits = trainer.predict(images.held_out, features, config.workers)
        metrics = _metrics(logits, images.held_out.labels)
        if group.rank == 0:
            record = {
                **({"shapes": about["shapes"]} if "shapes" in about else {}),
                "rows": {
                    "train": len(images.train),
                    "held_out": len(images.held_out),
                    "left_out": len(images.left_out),
                },
                **chosen,
            }
            _write(
                output,
                trainer,
                images,
                features,
                config,
                history,
                metrics,
                logits.argmax(1),
                record | {"processes": group.count},
                data,
            )
        group.same(None)  # the others wait for the files
    return metrics


def _at(features: dict[str, Any], size: int) -> dict[str, Any]:
    """The same preprocessing for another size."""
    return features | {"size": size, "resize": round(features["resize"] * size / features["size"])}


def _metrics(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> dict[str, float]:
    """Shares of labels that are the first, and among the first five, and the mean cross entropy in nats."""
    shifted = logits - logits.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - np.take_along_axis(shifted, labels[:, None], 1)[:, 0]
    return {**class_metrics(rank(logits, labels)), "loss": float(losses.mean())}


def _line(history: Sequence[dict[str, Any]], config: Settings) -> str:
    """One line of an epoch; small images take more time than their area says, which the time left allows for."""
    last = history[-1]
    left = (
        sum((config.size(epoch) / last["size"]) ** 1.5 for epoch in range(len(history), config.epochs))
        * last["seconds"]
    )
    return (
        f"epoch {last['epoch']}/{config.epochs}  {last['size']} px  loss {last['train_loss']:.3f}  train "
        f"{last['train_top1']:.1%}  "
        f"held out {last['top1']:.2%}  {last['seconds']:.0f} s, about {left / 60:.0f} min left"
    )


# ------------------------------------------------------------------------------------------------------------- results


def _write(
    output: Path,
    trainer: Trainer,
    images: LabelledImages,
    features: dict[str, Any],
    config: Settings,
    history: list[dict[str, Any]],
    metrics: dict[str, float],
    predicted: npt.NDArray[np.int64],
    record: dict[str, Any],
    data: Any,
) -> None:
    state = qat.weights(trainer.average) if config.qat else trainer.average.state_dict()
    if config.qat:
        qat.save_ranges(trainer.average, features, output)
    save_weights(output / MODEL, state)
    count = min(CALIBRATION_IMAGES, len(images.train))
    chosen = np.sort(np.random.default_rng(config.seed).choice(len(images.train), count, replace=False))
    samples = np.stack([prepare(images.train.image(int(i)), features).transpose(2, 0, 1) for i in chosen])
    write_npz(output / "calibration.npz", {"image": samples})
    write_json(output / "history.json", history)
    loss = {"train_loss": ("loss, training", "C0--"), "loss": ("loss, held out", "C0-")}
    top1 = {"train_top1": ("top-1, training", "C1--"), "top1": ("top-1, held out", "C1-")}
    plot_curves(
        output / "curves.png", history, loss, top1, ("cross entropy (training: of smoothed labels)", "top-1 accuracy")
    )
    plot_confusion(output / "confusion.png", images.classes, images.held_out.labels, predicted)
    named = {"width": config.width} if config.width != 1 else {}
    about = {
        "arch": config.arch,
        "classes": list(images.classes),
        **named,
        "features": features,
        "config": asdict(config) | {"progressive": list(config.progressive)},
        "metrics": metrics,
        **record,
        "epochs": len(history),
        "seconds": round(sum(each["seconds"] for each in history)),
        **provenance(config.seed, [Path(one_source(data))]),
    }
    write_json(output / "train.json", about)
