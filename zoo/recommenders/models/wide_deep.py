"""Wide & Deep (Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems") of the columns of any log."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from pipelines.core.errors import RequestError, one_line
from zoo.recommenders import criteo
from zoo.recommenders.criteo import BUCKETS, CATEGORICAL, NUMERIC
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import spooled
from zoo.recommenders.export import freeze as export
from zoo.recommenders.models.graph_network import opened
from zoo.recommenders.models.layers import Embeddings, Scalars, counts, joined, mlp
from zoo.recommenders.training import train as training
from zoo.recommenders.training.trainer import TrainConfig
from zoo.training.runs import fill, is_first

GRAPH = "graph.onnx"  # of a model folder: the float graph whose weights were trained on
TENSORFLOW_GRAPH = "graph.pb"  # the graph that it came as
KERAS_WEIGHTS = "model.weights.h5"  # of a folder that version 0.2.0 trained
IMPORTED = "came as a TensorFlow graph"


class WideDeep(nn.Module):
    """logit = a weight of each category + a network of embeddings and numbers."""

    widths: ClassVar = {"embeddings": ("embedding_size",), "deep": ("hidden",)}

    def __init__(self, features: Features, config: Any) -> None:
        super().__init__()
        _, self.numbers = counts(features)
        self.embeddings = Embeddings(features.fields, config.embedding_size)
        self.wide = Scalars(features.fields)
        self.deep = mlp(self.embeddings.width + self.numbers, config.hidden, 1, config.dropout)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """Logits, float32 [n, 1]."""
        flat = self.embeddings(ids, scales)
        return self.deep(joined(flat, numbers, self.numbers)) + self.wide(ids, scales)

    @torch.no_grad()
    def sort_neurons(self, samples: Mapping[str, torch.Tensor]) -> None:
        """Orders the neurons of each hidden layer by how often they are active, most often first. In place.

        The function stays the same. Zeros of the ReLU then come in runs, which the native kernels skip.

        Args:
            samples: The inputs "ids", "numbers" and "scales" of some rows.
        """
        x = joined(self.embeddings(samples["ids"], samples["scales"]), samples["numbers"], self.numbers)
        layers = [each for each in self.deep if isinstance(each, nn.Linear)]
        for layer, following in itertools.pairwise(layers):
            x = torch.relu(layer(x))
            active = (x > x.max() / 512).float().mean(0)  # what does not round to zero in 8 bits
            order = torch.argsort(-active, stable=True)
            layer.weight.copy_(layer.weight[order])
            layer.bias.copy_(layer.bias[order])
            following.weight.copy_(following.weight[:, order])
            x = x[:, order]

    def renamed(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of a graph under the names that `export` gives them.

        Args:
            weights: Initializers by name; those of version 0.2.0 have the paths of Keras' variables.
        """
        if "deep_logit/kernel" not in weights:
            return dict(weights)
        found = {}
        for at, field in enumerate(self.embeddings.fields, 1):
            found[f"embeddings.{field.name}.table"] = weights[f"deep/C{at}/embeddings"]
            found[f"wide.{field.name}.table"] = weights[f"wide/C{at}/weights"]
        places = [at for at, each in enumerate(self.deep) if isinstance(each, nn.Linear)]
        names = [f"hidden_{at}" for at in range(len(places) - 1)]
        for place, name in zip(places, [*names, "deep_logit"], strict=True):
            found[f"deep.{place}.weight"] = weights[f"{name}/kernel"].T.contiguous()
            found[f"deep.{place}.bias"] = weights[f"{name}/bias"]
        return found


@dataclass(frozen=True)
class Settings(TrainConfig):
    """The recipe; tables of 32 columns, as in the paper."""

    embedding_size: int = 32
    dropout: float = 0.3


@dataclass(frozen=True)
class CriteoSettings(Settings):
    """The recipe for Criteo's rows: priors as strong for few rows as for many.

    numeric, categorical: numbers and categories of a row. buckets: hash buckets of each category.
    """

    fewest: ClassVar[int] = 1

    numeric: int = NUMERIC
    categorical: int = CATEGORICAL
    buckets: int = BUCKETS
    hidden: tuple[int, ...] = (1024, 512, 256)
    learning_rate: float = 1e-3
    ema: float = 0.98
    l2_embeddings: tuple[float, ...] = (5000.0,)
    l2_scalars: float = 8.0
    l2_layers: float = 0.0
    unknown: float = 0.0
    patience: int = 3
    min_delta: float = 0.001
    held_out: float = 1500.0


LOG = Settings()
LOG_FINETUNE = training.for_finetuning(LOG)
CRITEO = CriteoSettings()
CRITEO_FINETUNE = replace(training.for_finetuning(CRITEO), held_out=0.15)


def train(data: Any, output: str | Path, *, config: Settings = LOG, **options: Any) -> dict[str, Any]:
    """Train on any click log, or on Criteo's rows; see `zoo.recommenders.training.train.train`."""
    if isinstance(config, CriteoSettings) and options.get("start_from") is options.get("schema") is None:
        data = spooled(data)
        sizes = {"numeric": config.numeric, "categorical": config.categorical, "buckets": config.buckets}
        options["schema"] = criteo.schema(data, on_error=options.get("on_error", "raise"), **sizes)
    start = options.get("start_from")
    if start is None or not _is_imported(Path(start)):
        return training.train(WideDeep, data, output, config=config, **options)
    if config.qat:
        raise RequestError(f"{start} {IMPORTED}, and is not trained with int8's rounding; leave qat out")
    metrics = training.train(_imported(Path(start)), data, output, config=config, **options)
    if is_first():
        shutil.copyfile(Path(start) / "fp32.onnx", Path(output) / GRAPH)
    return metrics


def freeze(folder: str | Path) -> dict[str, Any]:
    """Write fp32.onnx; see `zoo.recommenders.export.freeze.freeze`. Where the model came as a TensorFlow graph, see
    `zoo.recommenders.importers.tensorflow.importing.freeze_graph`.
    """
    if (Path(folder) / GRAPH).is_file():
        return export.freeze(folder, _imported(Path(folder)), CriteoSettings)
    if (Path(folder) / TENSORFLOW_GRAPH).is_file():
        from zoo.recommenders.importers.tensorflow.importing import freeze_graph

        return freeze_graph(Path(folder))
    if not (Path(folder) / training.MODEL).is_file() and (Path(folder) / KERAS_WEIGHTS).is_file():
        return _freeze_keras(Path(folder))
    return export.freeze(folder, WideDeep, CriteoSettings)


def _freeze_keras(folder: Path) -> dict[str, Any]:
    """The same of a folder that version 0.2.0 trained in Keras: weights under the paths of the variables."""
    import h5py

    about = training.about_of(folder)
    features = Features.from_json(about["features"])
    model = WideDeep(features, export.configured(CriteoSettings, about["config"]))
    found = {}
    depth = sum(isinstance(each, nn.Linear) for each in model.deep)
    try:
        with h5py.File(folder / KERAS_WEIGHTS) as archive:
            layers = archive["layers"]
            for at in range(len(features.fields)):
                table = f"tables/__table{f'_{at}' if at else ''}/vars/0"
                found[f"deep/C{at + 1}/embeddings"] = layers["tables"][table][()]
                found[f"wide/C{at + 1}/weights"] = layers["tables_1"][table][()]
            for at in range(depth):
                name = f"hidden_{at}" if at < depth - 1 else "deep_logit"
                kernel, bias = (layers[f"dense{f'_{at}' if at else ''}/vars/{place}"][()] for place in (0, 1))
                found |= {f"{name}/kernel": kernel, f"{name}/bias": bias}
    except (OSError, KeyError) as error:
        raise RequestError(f"cannot read the model in {folder} ({one_line(error)}); train it again") from error
    arrays = model.renamed({name: torch.from_numpy(each) for name, each in found.items()})
    fill(model, training.state_of(model, arrays), folder / KERAS_WEIGHTS)
    return export.written(model.eval(), features, folder, KERAS_WEIGHTS)


def network(folder: Path) -> tuple[dict[str, Any], Any]:
    """The trained network of a model folder; see `zoo.recommenders.training.train.started`."""
    if _is_imported(folder):
        raise RequestError(f"{folder} {IMPORTED}, whose layers cannot be cut; leave prune out")
    return export.started(folder, WideDeep, CriteoSettings)


def _is_imported(folder: Path) -> bool:
    """Whether a model has the layers of a TensorFlow graph."""
    return any((folder / name).is_file() for name in (GRAPH, TENSORFLOW_GRAPH))


def _imported(folder: Path) -> training.Build:
    path = folder / GRAPH
    return lambda features, config: opened(path if path.is_file() else folder / "fp32.onnx", features)
