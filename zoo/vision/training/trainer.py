"""The trainer of image classifiers: optimizer steps, evaluation, and the state of a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.utils.data import DataLoader

from zoo.training import tuning
from zoo.training.communication import Communication, exchanging
from zoo.training.runs import QAT_FROZEN, Processes
from zoo.vision.data.datasets import Images, prepare
from zoo.vision.train_config import TrainConfig
from zoo.vision.training import qat
from zoo.vision.training.depthwise import use_fast_depthwise
from zoo.vision.training.distillation import Normalize, Teacher


def jensen_shannon(logits: torch.Tensor) -> torch.Tensor:
    """Computes the Jensen-Shannon divergence of the predictions for several views (Hendrycks et al. 2020, eq. 2-3).

    Args:
        logits: float32 [views, n, classes].

    Returns:
        Mean over the images, scalar.
    """
    log_views = logits.log_softmax(-1)
    log_mixture = log_views.exp().mean(0).clamp(1e-7, 1).log()
    return (log_views.exp() * (log_views - log_mixture)).sum(-1).mean()


class Trainer:
    """A network in training, its optimizer and the moving average of its weights: the state of a checkpoint.

    Args:
        model: Network to train.
        config: Training configuration.
        features: Preprocessing of the model's card.
        group: Processes that train together.
    """

    teacher: Teacher | None = None  # see `TrainConfig.teacher`

    def __init__(self, model: nn.Module, config: TrainConfig, features: dict[str, Any], group: Processes) -> None:
        self.config, self.group = config, group
        self.model = model.to(group.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if group.device.type == "cpu":
            use_fast_depthwise(self.model)
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        decayed = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        plain = [parameter for parameter in self.model.parameters() if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(
            groups, config.learning_rate, config.momentum, nesterov=config.momentum > 0, foreach=True
        )
        self.normalize = Normalize(features, group.device)
        self.bf16, self.steps = config.precision == "bf16", 0
        self.parallel: nn.Module = self.model

    def choose(self, size: int, batch: int) -> dict[str, Any]:
        """Selects the fastest precision, and gradient exchange if `tune_communication`, by timing steps on noise.

        All processes agree on the result.

        Args:
            size: Height and width of the images, in pixels.
            batch: Images of one process per step.

        Returns:
            {"precision": "fp32" or "bf16"} and the result of `zoo.training.tuning.choose`.
        """

        def loss_of(x: torch.Tensor, y: torch.Tensor) -> tuning.Loss:
            return lambda model, bf16: self.loss(model, x, y, 1, bf16)[0]

        part = self._noise(size, -(-batch // self.config.accumulate))
        losses = loss_of(*self._noise(size, batch)), loss_of(*part)
        about = str(tuple(part[0].shape))
        return tuning.choose(self.model, self.group, self.config, *losses, self._communication(), about=about)

    def use(self, chosen: dict[str, Any]) -> None:
        """Applies the result of `choose`.

        Args:
            chosen: Result of `choose`.
        """
        self.bf16 = chosen["precision"] == "bf16"
        self.parallel = tuning.distribute(self.model, self.group, chosen, self._communication())

    def _communication(self) -> Communication:
        return Communication("bf16" if self.config.compress else "", gradient_as_bucket_view=True)

    def _noise(self, size: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(256, (batch, 3, size, size), dtype=torch.uint8, device=self.group.device)
        return x, torch.zeros(batch, dtype=torch.int64, device=self.group.device)

    def logits(self, model: nn.Module, x: torch.Tensor, bf16: bool) -> torch.Tensor:
        """Computes logits.

        Args:
            model: Network in training, or its average.
            x: Pixels, uint8 [n, 3, size, size].
            bf16: Compute in bfloat16.

        Returns:
            float32 [n, classes].
        """
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            return model(self.normalize(x)).float()  # type: ignore[no-any-return]

    def loss(
        self, model: nn.Module, x: torch.Tensor, y: torch.Tensor, views: int, bf16: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the loss of a batch.

        Args:
            model: Network, or its data-parallel wrapper.
            x: Pixels, uint8 [views * n, 3, size, size], one view after another.
            y: Labels, int64 [n].
            views: 1, or 3 with AugMix.
            bf16: Compute in bfloat16.

        Returns:
            The loss, scalar, and the logits of the first view, float32 [n, classes].
        """
        logits = self.logits(model, x, bf16).view(views, len(y), -1)
        loss = F.cross_entropy(logits[0], y, label_smoothing=self.config.label_smoothing)
        if self.teacher is not None:
            loss = self.teacher.add_losses(loss, logits[0], x[: len(y)], bf16)
        if views > 1:
            loss = loss + self.config.jsd * jensen_shannon(logits)
        return loss, logits[0]

    def step(self, x: torch.Tensor, y: torch.Tensor, views: int, epoch_steps: int) -> tuple[float, int]:
        """Runs one optimizer step on a batch, in `accumulate` parts, and updates the average of the weights.

        Args:
            x: Pixels, uint8 [views * n, 3, size, size].
            y: Labels, int64 [n].
            views: 1, or 3 with AugMix.
            epoch_steps: Steps per epoch, for the learning rate.

        Returns:
            The loss, and the number of correctly classified images.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(self.steps, epoch_steps)
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
        for adapters in self.optimizer.param_groups[2:]:  # clipped apart from the student
            nn.utils.clip_grad_norm_(adapters["params"], self.config.clip, foreach=True)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip, foreach=True)
        self.optimizer.step()
        self.steps += 1
        keep = min(self.config.ema, (1 + self.steps) / (10 + self.steps))  # forget the first weights quickly
        means, values = self.average.state_dict(), self.model.state_dict()
        floats = [name for name, tensor in values.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([means[name] for name in floats], [values[name] for name in floats], 1 - keep)
        for name in values.keys() - floats:  # counts
            means[name].copy_(values[name])
        return whole, right

    def predict(self, images: Images, features: dict[str, Any], workers: int) -> npt.NDArray[np.float32]:
        """Computes the logits of the averaged weights; each process computes a part, and all get the result.

        Args:
            images: Images to classify.
            features: Preprocessing.
            workers: Processes that decode images.

        Returns:
            float32 [n, classes].
        """
        group = self.group
        if group.count > 1:
            for tensor in self.average.state_dict().values():
                distributed.broadcast(tensor, 0)
        mine = range(group.rank, len(images), group.count)
        outputs: torch.Tensor | None = None
        batches = [list(mine[i : i + 256]) for i in range(0, len(mine), 256)]
        with torch.inference_mode():
            for indices, x in zip(
                batches, loader(_Prepared(images, features), batches, workers, np.stack), strict=True
            ):
                logits = self.logits(self.average, torch.from_numpy(x).permute(0, 3, 1, 2).to(group.device), self.bf16)
                outputs = torch.zeros(len(images), logits.shape[1], device=group.device) if outputs is None else outputs
                outputs[indices] = logits
        assert outputs is not None  # every process has images
        if group.count > 1:
            distributed.all_reduce(outputs)
        return outputs.cpu().numpy()

    def distill_from(self, teacher: Teacher) -> None:
        """Adds the losses of a teacher to the training.

        Args:
            teacher: Teacher; its adapters are trained, too.
        """
        self.teacher = teacher
        if own := list(teacher.adapters.parameters()):
            self.optimizer.add_param_group({"params": own, "weight_decay": 0.0})

    @property
    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "average": self.average, "optimizer": self.optimizer}
        return parts if self.teacher is None else parts | {"adapters": self.teacher.adapters}

    def state(self) -> dict[str, Any]:
        """Returns the state of the checkpoint."""
        return {**{name: part.state_dict() for name, part in self._parts.items()}, "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state.

        Args:
            state: Result of `state`.
        """
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.steps = state["steps"]


@dataclass(frozen=True)
class _Prepared:
    images: Images
    features: dict[str, Any]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> npt.NDArray[np.uint8]:
        return prepare(self.images.image(index), self.features)


def loader(data: Any, batches: Sequence[Any], workers: int, collate: Callable[[Any], Any]) -> DataLoader[Any]:
    """Returns a data loader; small images, which are in memory, need no worker processes.

    Args:
        data: Data set of images, with the attribute `images`.
        batches: Keys of the items of every batch.
        workers: Number of worker processes.
        collate: Joins the items of a batch.

    Returns:
        The loader.
    """
    if data.images.pixels is not None or not workers:
        return DataLoader(data, batch_sampler=batches, collate_fn=collate)
    # forkserver: forking a process with the threads of other libraries can crash
    return DataLoader(
        data, batch_sampler=batches, num_workers=workers, collate_fn=collate, multiprocessing_context="forkserver"
    )
