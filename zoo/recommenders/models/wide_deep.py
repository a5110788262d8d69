"""Wide & Deep (Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems")."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import copy_file
from pipelines.models.protocols import GraphImportable
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.criteo import BUCKETS, CATEGORICAL, NUMERIC
from zoo.recommenders.family import Preset, TrainableRankingFamily
from zoo.recommenders.train_config import TrainConfig
from zoo.training.lazy_module import LazyModule
from zoo.training.runs import fill, is_first

if TYPE_CHECKING:
    import torch

    from pipelines.rewrites.driver import Rewrite
    from zoo.recommenders.data.features import Features
    from zoo.recommenders.models.checkpoints import Build

GRAPH = "graph.onnx"  # of a model folder: the float graph whose weights were trained on
TENSORFLOW_GRAPH = "graph.pb"  # the graph that it came as
KERAS_WEIGHTS = "model.weights.h5"  # of a folder that version 0.2.0 trained
IMPORTED = "came as a TensorFlow graph"


class WideDeep(LazyModule):
    """Wide & Deep: logit = first-order weights of the categories + a network of embeddings and numbers."""

    widths: ClassVar = {"embeddings": ("embedding_size",), "deep": ("hidden",)}

    def __init__(self, features: Features, config: Any) -> None:
        from zoo.recommenders.models.layers import Embeddings, FirstOrder, counts, mlp

        super().__init__()
        _, self.numbers = counts(features)
        self.embeddings = Embeddings(features.fields, config.embedding_size)
        self.wide = FirstOrder(features.fields)
        self.deep = mlp(self.embeddings.width + self.numbers, config.hidden, 1, config.dropout)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Any:
        """See `TrainableRankingFamily.build`."""
        from zoo.recommenders.models.layers import concat_numbers

        flat = self.embeddings(ids, scales)
        return self.deep(concat_numbers(flat, numbers, self.numbers)) + self.wide(ids, scales)

    def sort_neurons(self, samples: Mapping[str, torch.Tensor]) -> None:
        """Sorts the neurons of every hidden layer by how often they are active, most active first, in place.

        The function of the network does not change. Zeros of the ReLU become contiguous, and the native kernels skip
        them.

        Args:
            samples: Inputs of some rows: "ids", "numbers" and "scales".
        """
        import torch
        from torch import nn

        from zoo.recommenders.models.layers import concat_numbers

        with torch.no_grad():
            x = concat_numbers(self.embeddings(samples["ids"], samples["scales"]), samples["numbers"], self.numbers)
            layers = [module for module in self.deep if isinstance(module, nn.Linear)]
            for layer, following in itertools.pairwise(layers):
                x = torch.relu(layer(x))
                active = (x > x.max() / 512).float().mean(0)  # values that 8 bits do not round to zero
                order = torch.argsort(-active, stable=True)
                layer.weight.copy_(layer.weight[order])
                layer.bias.copy_(layer.bias[order])
                following.weight.copy_(following.weight[:, order])
                x = x[:, order]

    def renamed(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Renames the weights of a graph as `export` names those of the network.

        Args:
            weights: {initializer: tensor}; initializers of version 0.2.0 have the paths of the Keras variables.

        Returns:
            {name from `export`: tensor}.
        """
        if "deep_logit/kernel" not in weights:
            return dict(weights)
        from torch import nn

        renamed = {}
        for number, field in enumerate(self.embeddings.fields, 1):
            renamed[f"embeddings.{field.name}.table"] = weights[f"deep/C{number}/embeddings"]
            renamed[f"wide.{field.name}.table"] = weights[f"wide/C{number}/weights"]
        places = [index for index, module in enumerate(self.deep) if isinstance(module, nn.Linear)]
        names = [f"hidden_{layer}" for layer in range(len(places) - 1)]
        for place, name in zip(places, [*names, "deep_logit"], strict=True):
            renamed[f"deep.{place}.weight"] = weights[f"{name}/kernel"].T.contiguous()
            renamed[f"deep.{place}.bias"] = weights[f"{name}/bias"]
        return renamed


@dataclass(frozen=True)
class WideDeepConfig(TrainConfig):
    """Training settings of Wide & Deep on any log; tables have 32 columns, as in the paper."""

    embedding_size: int = 32
    learning_rate: float = 1e-3
    dropout: float = 0.3
    l2_embeddings: tuple[float, ...] = (30.0, 1000.0, 20000.0)


@dataclass(frozen=True)
class CriteoConfig(WideDeepConfig):
    """Training settings of Wide & Deep on rows in the Criteo format.

    Attributes:
        numeric: Numbers of a row.
        categorical: Categories of a row.
        buckets: Hash buckets of every category.
    """

    fewest: ClassVar[int] = 1

    numeric: int = NUMERIC
    categorical: int = CATEGORICAL
    buckets: int = BUCKETS
    hidden: tuple[int, ...] = (1024, 512, 256)
    ema: float = 0.98
    l2_embeddings: tuple[float, ...] = (5000.0,)
    l2_scalars: float = 8.0
    l2_layers: float = 0.0
    unknown: float = 0.0
    patience: int = 3
    min_delta: float = 0.001
    held_out: float = 1500.0


def train(data: Any, output: str | Path, *, config: WideDeepConfig, **options: Any) -> dict[str, Any]:
    """Trains on any click log, or on rows in the Criteo format.

    Args:
        data: Labelled log, see `Features.read`.
        output: Folder to train into.
        config: Training settings; with `CriteoConfig`, the default schema is that of the Criteo format.
        **options: Further arguments of `zoo.recommenders.training.train.train`.

    Returns:
        {"auc", "logloss", "accuracy"} on the held-out rows.

    Raises:
        RequestError: The data or settings cannot be used.
    """
    from zoo.recommenders import criteo
    from zoo.recommenders.data.sources import spool_stdin
    from zoo.recommenders.training import train as training

    if isinstance(config, CriteoConfig) and options.get("start_from") is options.get("schema") is None:
        data = spool_stdin(data)
        sizes = {"numeric": config.numeric, "categorical": config.categorical, "buckets": config.buckets}
        options["schema"] = criteo.schema(data, on_error=options.get("on_error", "raise"), **sizes)
    start = options.get("start_from")
    if start is None or not _is_imported(Path(start)):
        return training.train(WideDeep, data, output, config=config, **options)
    if config.qat:
        raise RequestError(f"{start} {IMPORTED}, and is not trained with int8's rounding; leave qat out")
    metrics = training.train(_imported(Path(start)), data, output, config=config, **options)
    if is_first():
        copy_file(Path(start) / "fp32.onnx", Path(output) / GRAPH)
    return metrics


def freeze(folder: str | Path) -> dict[str, Any]:
    """Writes fp32.onnx of a model folder.

    Args:
        folder: Folder with the checkpoint, the Keras weights of version 0.2.0, or an imported TensorFlow graph.

    Returns:
        As `zoo.recommenders.export.freeze.freeze`; for an imported graph, as
        `zoo.recommenders.importers.tensorflow.importing.freeze_graph`.

    Raises:
        RequestError: A file is missing or damaged.
    """
    from zoo.recommenders.export import freeze as export
    from zoo.recommenders.models.checkpoints import MODEL

    if (Path(folder) / GRAPH).is_file():
        return export.freeze(folder, _imported(Path(folder)), CriteoConfig)
    if (Path(folder) / TENSORFLOW_GRAPH).is_file():
        from zoo.recommenders.importers.tensorflow.importing import freeze_graph

        return freeze_graph(Path(folder))
    if not (Path(folder) / MODEL).is_file() and (Path(folder) / KERAS_WEIGHTS).is_file():
        return _freeze_keras(Path(folder))
    return export.freeze(folder, WideDeep, CriteoConfig)


def _freeze_keras(folder: Path) -> dict[str, Any]:
    """Writes fp32.onnx of a folder that version 0.2.0 trained in Keras, with the paths of the variables as names."""
    import h5py
    import torch
    from torch import nn

    from zoo.recommenders.data.features import Features
    from zoo.recommenders.export.freeze import write_graph
    from zoo.recommenders.models import checkpoints

    about = checkpoints.training_record(folder)
    features = Features.from_json(about["features"])
    model = WideDeep(features, checkpoints.restore_config(CriteoConfig, about["config"]))
    variables = {}
    depth = sum(isinstance(module, nn.Linear) for module in model.deep)
    try:
        with h5py.File(folder / KERAS_WEIGHTS) as archive:
            layers = archive["layers"]
            for index in range(len(features.fields)):
                table = f"tables/__table{f'_{index}' if index else ''}/vars/0"
                variables[f"deep/C{index + 1}/embeddings"] = layers["tables"][table][()]
                variables[f"wide/C{index + 1}/weights"] = layers["tables_1"][table][()]
            for index in range(depth):
                name = f"hidden_{index}" if index < depth - 1 else "deep_logit"
                kernel, bias = (layers[f"dense{f'_{index}' if index else ''}/vars/{place}"][()] for place in (0, 1))
                variables |= {f"{name}/kernel": kernel, f"{name}/bias": bias}
    except (OSError, KeyError) as error:
        raise RequestError(f"cannot read the model in {folder} ({one_line(error)}); train it again") from error
    arrays = model.renamed({name: torch.from_numpy(array) for name, array in variables.items()})
    fill(model, checkpoints.state_of(model, arrays), folder / KERAS_WEIGHTS)
    return write_graph(model.eval(), features, folder, KERAS_WEIGHTS)


def network(folder: Path) -> tuple[dict[str, Any], Any]:
    """Loads the trained network of a model folder.

    Args:
        folder: Model folder.

    Returns:
        As `zoo.recommenders.models.checkpoints.load_network`.

    Raises:
        RequestError: The model was imported as a TensorFlow graph.
    """
    if _is_imported(folder):
        raise RequestError(f"{folder} {IMPORTED}, whose layers cannot be cut; leave prune out")
    from zoo.recommenders.models.checkpoints import load_network

    return load_network(folder, WideDeep, CriteoConfig)


def _is_imported(folder: Path) -> bool:
    """Whether a model was imported as a TensorFlow graph."""
    return any((folder / name).is_file() for name in (GRAPH, TENSORFLOW_GRAPH))


def _imported(folder: Path) -> Build:
    from zoo.recommenders.models.graph_network import opened

    path = folder / GRAPH
    return lambda features, config: opened(path if path.is_file() else folder / "fp32.onnx", features)


@dataclass(frozen=True, kw_only=True)
class WideDeepFamily(TrainableRankingFamily, GraphImportable):
    """Family of Wide & Deep on any log; rows in Criteo's format, without a header, are built in.

    Its folders may hold an imported TensorFlow graph or Keras weights of version 0.2.0.
    """

    former_checkpoint: str = "model.weights.h5"

    def passes(self, preprocessing: Mapping[str, Any]) -> Sequence[Rewrite]:
        """See `Family`; rows without a header whose numbers are scaled to [0, 1] have other rewrites."""
        from zoo.recommenders.criteo import SCALED, of_card
        from zoo.recommenders.data.features import Features
        from zoo.recommenders.export.rewrites import passes, passes_without_header

        scaled = of_card(preprocessing) and all(
            number.encoding["type"] in SCALED for number in Features.from_json(preprocessing).numbers
        )
        return (passes_without_header if scaled else passes)(preprocessing)

    def train(self, data: Any, output: Path, **options: Any) -> dict[str, Any]:
        """See `Trainable`."""
        with self.needs("train"):
            return train(data, output, **options)

    def freeze(self, folder: Path) -> dict[str, Any]:
        """See `Freezable`."""
        with self.needs("freeze"):
            return freeze(folder)

    def network(self, folder: Path) -> tuple[dict[str, Any], Any]:
        """See `HasNetwork`."""
        with self.needs("network"):
            return network(folder)

    def from_graph(self, path: Any, data: Any, output: Path, **options: Any) -> dict[str, Any]:
        """See `GraphImportable` and `zoo.recommenders.importers.tensorflow.importing.from_graph`."""
        with self.needs("from_graph"):
            from zoo.recommenders.importers.tensorflow.importing import from_graph
        return from_graph(path, data, output, **options)


WIDE_DEEP = WideDeepFamily(
    name="wide-deep",
    title="Wide & Deep (Cheng et al. 2016): click-through rate from the columns of any log",
    build=WideDeep,
    config=WideDeepConfig(),
    headerless=Preset(CriteoConfig(), QuantRecipe(observer="minmax", correct=False)),
)
