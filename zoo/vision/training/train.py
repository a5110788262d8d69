"""Training and fine-tuning of image classifiers, in one process or in several under torchrun."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pipelines.compression.channels import resize
from pipelines.core.console import print_line
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import write_json
from pipelines.core.progress import progress
from pipelines.models.npz import write_npz
from zoo.training.runs import (
    Processes,
    load_checkpoint,
    plot_curves,
    processes,
    provenance,
    require_output,
    save_checkpoint,
    save_weights,
)
from zoo.vision.data.augmentation import AugmentedImages
from zoo.vision.data.datasets import SMALL, Images, LabelledImages, one_source, open_images, prepare
from zoo.vision.metrics import class_metrics, rank
from zoo.vision.train_config import TrainConfig
from zoo.vision.training import qat
from zoo.vision.training.distillation import Teacher, open_teacher
from zoo.vision.training.initialization import MODEL, describe, load_weights
from zoo.vision.training.plots import plot_confusion
from zoo.vision.training.trainer import Trainer, loader

STATE = "checkpoint/state.pt"
CALIBRATION_IMAGES = 256
LARGE = 224
SOFT = 0.5  # default weight of the soft-label loss
# The mean is 128, an integer: the zero point of a uint8 input then absorbs the subtraction, and zero padding is exact.
PREPROCESSING = {"interpolation": "bilinear", "mean": [128 / 255] * 3, "std": [0.25] * 3, "channels": "RGB"}


def _collate(samples: list[tuple[npt.NDArray[np.uint8], int]]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Stacks views, uint8 [views * n, size, size, 3], one view after another, and labels [n]."""
    views, labels = zip(*samples, strict=True)
    stacked = np.stack(views, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:]), np.array(labels, np.int64)


def _epoch(trainer: Trainer, images: Images, epoch: int) -> dict[str, Any]:
    """Trains one epoch, without an incomplete last batch; returns its record of the history."""
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
    views = AugmentedImages(images, size, config.randaugment_n, config.randaugment_m, config.seed, epoch)
    loss, right, seen = 0.0, 0, 0
    title = f"epoch {epoch + 1} of {config.epochs}, {size} px"
    with progress(title, steps) if group.rank == 0 else contextlib.nullcontext(lambda amount: None) as advance:
        for pixels, labels in loader(views, batches, config.workers, _collate):
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


def _steps(config: TrainConfig, images: Images) -> int:
    return max(1, len(images) // config.batch_size)


# --------------------------------------------------------------------------------------------------------------- fit


def fit(
    build: Callable[[str, int, float], nn.Module],
    data: Any,
    output: str | Path,
    *,
    config: TrainConfig,
    resume: bool = False,
    start_from: str | Path | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Trains or fine-tunes a classifier on labelled images.

    The output folder gets model.pt (averaged weights), train.json (architecture, classes, preprocessing as "features",
    configuration, metrics), calibration.npz ({"image": uint8 [n, 3, size, size]}, preprocessed training images),
    history.json, curves.png, confusion.png, with `config.qat` qat.json (trained ranges), and after every epoch
    checkpoint/state.pt. The same seed gives the same weights on the same machine with the same number of processes and
    threads. Under torchrun, all processes call this function; only rank 0 writes.

    Args:
        build: Builds the untrained network of (architecture, classes, width multiplier), from normalized float32
            [n, 3, size, size] to logits [n, classes].
        data: Labelled images (see `open_images`).
        output: New folder.
        config: Training configuration; `batch_size` is the total of all processes.
        resume: Continue from the checkpoint in `output`; the result is the same as without interruption.
        start_from: Model folder to fine-tune; its network, weights and preprocessing are kept, with a new head if the
            classes differ.
        on_error: "raise" to stop at the first unreadable image, "skip" to leave it out.

    Returns:
        {"top1", "top5", "loss"} on the held-out images; the loss is the cross entropy in nats.

    Raises:
        RequestError: The data are unusable, the output folder is in use, or the checkpoint belongs to another run.
    """
    output = Path(output)
    with processes() as group:
        require_output(output, STATE, resume)
        if config.batch_size < group.count:
            raise RequestError(
                f"found batch_size {config.batch_size}, expected at least one image for each of {group.count} processes"
            )
        images = open_images(data, held_out=config.validation, seed=config.seed, on_error=on_error)
        about: dict[str, Any] = describe(Path(start_from)) if start_from is not None else {"features": PREPROCESSING}
        config = replace(config, **{name: about[name] for name in config.KEPT if name in about})
        torch.manual_seed(config.seed)
        model = resize(build(config.arch, len(images.classes), config.width), about.get("shapes", {}))
        start = load_weights(model, about, list(images.classes)) if start_from is not None else None
        config, features = _with_size(config, about["features"], images.train.pixels is None)
        if config.teacher and not config.distilled:
            config = replace(config, distillation=SOFT)
        if config.qat:
            config = qat.effective_config(config, start, about.get("classes") == list(images.classes), group.count)
        trainer = _new_trainer(model, config, features, group, images.classes)
        run = {"config": _settings(config), "data": images.digest, "start": start}
        state = load_checkpoint(output / STATE, run) if resume else None
        if state:
            trainer.restore(state)
        history: list[dict[str, Any]] = state["history"] if state else []
        chosen = state["chosen"] if state else trainer.choose(config.size(0), config.batch_size // group.count)
        trainer.use(chosen)
        for epoch in range(len(history), config.epochs):
            entry = _epoch(trainer, images.train, epoch)
            here = features if epoch + 1 == config.epochs else _at(features, entry["size"])
            logits = trainer.predict(images.held_out, here, config.workers)
            history.append(entry | _metrics(logits, images.held_out.labels))
            if group.rank == 0:
                print_line(_line(history, config))
                save_checkpoint(output / STATE, {"run": run, "history": history, "chosen": chosen, **trainer.state()})
            group.checkpointed(output)
        logits = trainer.predict(images.held_out, features, config.workers)
        metrics = _metrics(logits, images.held_out.labels)
        if group.rank == 0:
            counts = {name: len(getattr(images, name)) for name in ("train", "held_out", "left_out")}
            shapes = {"shapes": about["shapes"]} if "shapes" in about else {}
            record = {**shapes, "rows": counts, **chosen, "processes": group.count}
            _write(output, trainer, images, features, config, history, metrics, logits.argmax(1), record, data)
        group.same(None)  # other processes wait for the files
    return metrics


def _with_size(config: TrainConfig, features: dict[str, Any], large: bool) -> tuple[TrainConfig, dict[str, Any]]:
    """Returns the settings and the preprocessing with the image size; only large images are center-cropped."""
    size = config.image_size or features.get("size", LARGE if large else SMALL)
    if size != features.get("size"):
        features = features | {"size": size, "resize": round(size * 8 / 7) if large else size}
    return replace(config, image_size=size), features


def _new_trainer(
    model: nn.Module, config: TrainConfig, features: dict[str, Any], group: Processes, classes: Sequence[str]
) -> Trainer:
    """Returns the trainer of a network, fake-quantized with `qat`, with the teacher of a distillation."""
    trainer = Trainer(qat.prepare(model, features) if config.qat else model, config, features, group)
    if config.distilled:
        network, seen = open_teacher(config.teacher, classes) if config.teacher else (model, features)
        trainer.distill_from(Teacher(network.to(group.device), seen, trainer.model, config, group.device))
    return trainer


def _settings(config: TrainConfig) -> dict[str, Any]:
    """The settings as JSON."""
    return asdict(config) | {"progressive": list(config.progressive)}


def _at(features: dict[str, Any], size: int) -> dict[str, Any]:
    """The preprocessing at another image size."""
    return features | {"size": size, "resize": round(features["resize"] * size / features["size"])}


def _metrics(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> dict[str, float]:
    """Top-1 and top-5 accuracy, and the mean cross entropy in nats."""
    shifted = logits - logits.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - np.take_along_axis(shifted, labels[:, None], 1)[:, 0]
    return {**class_metrics(rank(logits, labels)), "loss": float(losses.mean())}


def _line(history: Sequence[dict[str, Any]], config: TrainConfig) -> str:
    """Progress line of an epoch; the remaining time assumes that time grows with size ** 1.5."""
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
    config: TrainConfig,
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
        "config": _settings(config),
        "metrics": metrics,
        **record,
        "epochs": len(history),
        "seconds": round(sum(entry["seconds"] for entry in history)),
        **provenance(config.seed, [Path(one_source(data))]),
    }
    write_json(output / "train.json", about)
