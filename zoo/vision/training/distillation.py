"""Knowledge distillation of image classifiers: soft labels, feature maps, and flow between feature maps (FSP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import zoo
from pipelines.compression.losses import fsp_loss, l2
from pipelines.core.errors import RequestError
from pipelines.models.family import network_of
from pipelines.quantization.training.qat import distillation_loss
from zoo.training.runs import require_task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zoo.vision.train_config import TrainConfig


class Normalize:
    """Normalizes pixels on a device: uint8 [n, 3, size, size] in RGB -> float32 of the same shape.

    Args:
        features: Preprocessing of the model's card: "mean", "std", "channels".
        device: Device of the pixels.
    """

    def __init__(self, features: Mapping[str, Any], device: torch.device) -> None:
        import torch

        self.swap = features["channels"] == "BGR"
        order = slice(None, None, -1 if self.swap else 1)  # mean and std are in RGB
        self.mean = 255 * torch.tensor(features["mean"][order], device=device).view(1, 3, 1, 1)
        self.scale = 1 / (255 * torch.tensor(features["std"][order], device=device).view(1, 3, 1, 1))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalized pixels of a batch, in the channels_last memory format."""
        import torch

        pixels = (x.flip(1) if self.swap else x).float().sub_(self.mean).mul_(self.scale)
        return pixels.contiguous(memory_format=torch.channels_last)


def open_teacher(name: str, classes: Sequence[str]) -> tuple[nn.Module, dict[str, Any]]:
    """Opens the teacher network of a distillation.

    Args:
        name: Name of a pretrained model, or path of a model folder.
        classes: Classes of the student.

    Returns:
        The network, and its preprocessing.

    Raises:
        RequestError: The model has another task or other classes.
    """
    require_task(name, "images")
    folder = zoo.load(name)
    about, network = network_of(folder)
    if (labels := folder.card.details.get("classes")) != list(classes):
        own_classes = f"{len(labels)} classes" if isinstance(labels, list) else f"{labels} classes"
        raise RequestError(
            f"found the teacher {name} of {own_classes}, expected one of the {len(classes)} classes of the data; "
            "fine-tune it on them first"
        )
    return network, about["features"]


class Teacher:
    """Teacher network of a knowledge distillation: soft labels, feature maps and FSP, see `TrainConfig`.

    The last feature map of every spatial size that both networks have is compared.

    Args:
        network: Teacher, normalized float32 [n, 3, size, size] -> logits [n, classes].
        features: Preprocessing of the teacher.
        student: Network in training.
        config: Training configuration.
        device: Device of both networks.

    Attributes:
        adapters: 1x1 convolutions from the student's channels to the teacher's, trained with the student.

    Raises:
        RequestError: Feature maps are compared, but the networks have other input sizes or no size in common.
    """

    def __init__(
        self,
        network: nn.Module,
        features: Mapping[str, Any],
        student: nn.Module,
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        import torch
        from torch import nn

        self.network = network.eval().requires_grad_(False)
        self.normalize, self.config, self.size = Normalize(features, device), config, int(features["size"])
        self.adapters = nn.ModuleList()
        self.maps: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = ({}, {})
        self.sides: list[int] = []
        if not (config.features or config.fsp):
            return
        if self.size != config.image_size:
            raise RequestError(
                f"found a teacher of {self.size} pixels, the student has {config.image_size}: their feature maps do "
                "not fit; set features and fsp to 0"
            )
        example = torch.zeros(2, 3, self.size, self.size, device=device)
        own, layers = (_last_of_each_size(model, example) for model in (student, self.network))
        self.sides = sorted((own.keys() & layers.keys()) - {self.size}, reverse=True)  # not the input images
        if len(self.sides) < 1 + bool(config.fsp):
            raise RequestError("found no feature maps of one size in teacher and student; set features and fsp to 0")
        for side in self.sides:
            for (module, _), maps in zip((own[side], layers[side]), self.maps, strict=True):
                module.register_forward_hook(_keep(maps))
            sizes = own[side][1], layers[side][1]
            same = sizes[0] == sizes[1]
            self.adapters.append(nn.Identity() if same else nn.Conv2d(*sizes, 1, bias=False).to(device))

    def add_losses(self, loss: torch.Tensor, logits: torch.Tensor, x: torch.Tensor, bf16: bool) -> torch.Tensor:
        """Adds the distillation losses of a batch to the loss of the student.

        Args:
            loss: Loss of the student, scalar.
            logits: Logits of the student, [n, classes].
            x: Pixels, uint8 [n, 3, size, size].
            bf16: Run the teacher in bfloat16.

        Returns:
            The total loss, scalar.
        """
        import torch
        from torch.nn import functional

        config, pixels = self.config, self.normalize(x)
        if pixels.shape[-1] != self.size:
            pixels = functional.interpolate(pixels, (self.size, self.size), mode="bilinear")
        own = dict(self.maps[0])
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            teacher_logits = self.network(pixels).float()
        loss = torch.lerp(loss, distillation_loss(logits, teacher_logits, config.temperature), config.distillation)
        if x.shape[-1] != self.size or not self.sides:  # progressive sizes
            return loss
        pairs = [
            (adapt(own[side][: len(x)].float()), self.maps[1][side].float())
            for side, adapt in zip(self.sides, self.adapters, strict=True)
        ]
        if config.features:
            loss = loss + config.features * torch.stack([l2(*pair) for pair in pairs]).mean()
        if config.fsp:
            loss = loss + config.fsp * fsp_loss(*zip(*pairs, strict=True))
        return loss


def _last_of_each_size(network: nn.Module, example: torch.Tensor) -> dict[int, tuple[nn.Module, int]]:
    """Returns {side: (leaf module of the last feature map of that size, channels)}."""
    import torch

    last: dict[int, tuple[nn.Module, int]] = {}

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.dim() == 4:
            last[output.shape[-1]] = module, output.shape[1]

    hooks = [module.register_forward_hook(watch) for module in network.modules() if not list(module.children())]
    training = network.training
    with torch.no_grad():
        network.eval()(example)
    network.train(training)
    for hook in hooks:
        hook.remove()
    return last


def _keep(maps: dict[int, torch.Tensor]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        maps[output.shape[-1]] = output

    return hook
