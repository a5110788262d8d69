"""Channel pruning of image classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.compression import channels
from pipelines.compression.search import TILE, Widths
from pipelines.core.errors import RequestError
from pipelines.core.files import write_json
from pipelines.models.family import network_of
from pipelines.models.npz import write_npz
from pipelines.models.record import SAMPLES
from zoo.training.pruning import PrunableModel
from zoo.training.runs import record_of, save_weights
from zoo.vision.data.datasets import Images, LabelledImages, open_images, prepare
from zoo.vision.inference import INPUT, OUTPUT
from zoo.vision.metrics import class_metrics, rank
from zoo.vision.train_config import TrainConfig
from zoo.vision.training.distillation import Normalize
from zoo.vision.training.initialization import MODEL

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pipelines.models.pipeline import GraphPipeline

HELD_OUT, SEEN, KEPT = 1000, 512, 256  # images for the loss, the importance and the calibration
MEMORY = 1 << 28  # maximum bytes of the pixels of one of these sets
BATCH = 64


class PrunableImages(PrunableModel):
    """An image classifier to prune, see `pipelines.compression.search.Prunable`.

    Args:
        folder: Model folder.
        data: Labelled images (see `open_images`).
        config: Training configuration; its `validation` and `seed` split the images.
        importance: Criterion of channels, see `pipelines.compression.channels.importances`.
        on_error: "raise" to stop at the first unreadable image, "skip" to leave it out.
        like: Model opened with the same data, which are not read again.

    Raises:
        RequestError: The images have other classes than the model.
    """

    metric = "top1"
    drop = 0.005
    batch_size = 1

    def open(self, data: Any, config: TrainConfig, on_error: str, like: PrunableImages | None) -> None:
        """See `PrunableModel`."""
        import torch

        self.about, self.network = network_of(self.folder)
        self.features: dict[str, Any] = self.about["features"]
        self.images: LabelledImages = (
            open_images(data, held_out=config.validation, seed=config.seed, on_error=on_error)
            if like is None
            else like.images
        )
        self.classes = list(self.images.classes)
        if (labels := self.folder.card.details.get("classes")) != self.classes:
            names = f"{', '.join(map(str, labels[:4]))}, ..." if isinstance(labels, list) else f"{labels} classes"
            raise RequestError(
                f"found images of {', '.join(self.classes[:4])}, ..., expected those of {self.folder.card.name} "
                f"({names}); fine-tune the model on your images first"
            )
        self.digest = self.images.digest
        self.network.to(memory_format=torch.channels_last)
        self.normalize = Normalize(self.features, torch.device("cpu"))
        self.example = torch.zeros(1, 3, self.features["size"], self.features["size"])
        self.seed = config.seed
        self.held = self._subset(self.images.held_out, HELD_OUT)
        self.members = channels.groups(self.network, self.example)
        self.groups: Widths = {name: len(members[0][1]) for name, members in self.members.items()}
        self.tiles: Widths = dict.fromkeys(self.groups, TILE)
        self._order: dict[str, Any] = {}

    def _subset(self, images: Images, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels uint8 [n, 3, size, size] and labels int64 [n] of a fixed random subset."""
        import torch

        count = min(count, len(images), max(1, MEMORY // (3 * self.features["size"] ** 2)))
        chosen = np.sort(np.random.default_rng(self.seed).choice(len(images), count, replace=False))
        pixels = np.stack([prepare(images.image(int(i)), self.features).transpose(2, 0, 1) for i in chosen])
        return torch.from_numpy(pixels), torch.from_numpy(images.labels[chosen])

    def _loss(self, network: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        from torch.nn import functional

        return functional.cross_entropy(network(self.normalize(batch[0])), batch[1])

    def _removed(self, widths: Widths) -> dict[str, Any]:
        """Returns {group: indices of its least important channels}, which are removed."""
        import torch

        if not self._order:
            pixels, labels = self._subset(self.images.train, SEEN)
            batches = zip(torch.split(pixels, BATCH), torch.split(labels, BATCH), strict=True)
            importances = channels.importances(self.network, self.members, batches, self._loss, self.importance)
            self._order = {name: np.argsort(scores, kind="stable") for name, scores in importances.items()}
        return {
            name: np.sort(self._order[name][: self.groups[name] - width])
            for name, width in widths.items()
            if width < self.groups[name]
        }

    def _cut(self, widths: Widths) -> nn.Module:
        removed = self._removed(widths)
        return channels.cut(self.network, self.example, removed) if removed else self.network

    def loss(self, widths: Widths) -> float:
        """Computes the cross entropy of held-out images, in nats.

        Args:
            widths: Channels of every pruning group.
        """
        import torch

        network = self._cut(widths).eval()
        pixels, labels = self.held
        with torch.inference_mode():
            parts = zip(torch.split(pixels, 256), torch.split(labels, 256), strict=True)
            total = sum(float(self._loss(network, batch)) * len(batch[1]) for batch in parts)
        return round(total / len(labels), 6)

    def save(self, widths: Widths, folder: Path) -> None:
        """Writes model.pt, train.json and calibration.npz of the pruned network.

        Args:
            widths: Channels of every pruning group.
            folder: Model folder.
        """
        network = self._cut(widths)
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(folder / MODEL, network.state_dict())
        write_npz(folder / SAMPLES, {"image": self._subset(self.images.train, KEPT)[0].numpy()})
        before = record_of(self.folder.path)
        shapes = {**self.about.get("shapes", {}), **channels.shapes(network, self.network)}
        named: dict[str, Any] = {key: self.about[key] for key in ("arch", "width") if key in self.about}
        record: dict[str, Any] = {key: before[key] for key in ("rows", "metrics", "config") if key in before}
        about = {**named, "shapes": shapes, "classes": self.classes, "features": self.features, **record}
        write_json(folder / "train.json", about)

    def quality(self, pipeline: GraphPipeline) -> dict[str, float]:
        """Returns {"top1", "top5"} of a model on all held-out images.

        Args:
            pipeline: Opened model.
        """
        held, parts = self.images.held_out, []
        for begin in range(0, len(held), 256):
            several = range(begin, min(begin + 256, len(held)))
            pixels = np.stack([prepare(held.image(i), self.features).transpose(2, 0, 1) for i in several])
            parts.append(pipeline.predict({INPUT: np.ascontiguousarray(pixels)})[OUTPUT])
        return class_metrics(rank(np.concatenate(parts), held.labels))
