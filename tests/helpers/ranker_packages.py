"""Rankers of torch-rechub, DeepCTR-Torch and FuxiCTR with random weights, exported to ONNX as their users do."""

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

USERS, ITEMS, COUNTRIES, LENGTH = 50, 40, 7, 5
SIZE = 4
POOLS = {"mean": "Average", "sum": "Sum"}  # of FuxiCTR
HIDDEN = (16, 8)


def randomize(model: torch.nn.Module) -> None:
    """Weights, and statistics of batch normalization, as after a training; rows of padding stay zeros."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or tensor.ndim == 0:
            continue
        kept = tensor[:1].clone()
        noise = torch.randn(tensor.shape, generator=generator)
        noise = noise.abs() if name.endswith("bias") else noise  # most layers are alive behind their Relu
        with torch.no_grad():
            tensor.copy_(1 + 0.3 * noise.abs() if name.endswith("running_var") else 0.3 * noise)
            if name.split(".")[-2:-1] == ["history"] and not kept.any():
                tensor[:1] = kept
    model.eval()


def torch_rechub(name: str, path: Path, dynamo: bool = False, pool: str = "mean") -> None:
    """ "deepfm", "wide-deep", "dcn", "dcn-v2", "two-tower" (DSSM), and as its examples have it "two-tower-prelu", with a
    pooled list; "deepfm-places": all of its places count, as they do where no row is that of padding.
    """
    pytest.importorskip("torch_rechub")
    from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
    from torch_rechub.models.matching import DSSM
    from torch_rechub.models.ranking import DCN, DCNv2, DeepFM, WideDeep
    from torch_rechub.utils.onnx_export import ONNXExporter

    sparse = [SparseFeature(field, rows, SIZE) for field, rows in (("user", USERS), ("country", COUNTRIES))]
    item = SparseFeature("item", ITEMS, SIZE)
    padding = None if name.endswith("-places") else 0
    history = SequenceFeature("history", ITEMS, SIZE, pooling=pool, padding_idx=padding)
    dense = [DenseFeature("age"), DenseFeature("price")]
    activation = next((kind for kind in ("prelu", "dice") if name.endswith(f"-{kind}")), "relu")
    mlp = {"dims": list(HIDDEN), "dropout": 0.2, "activation": activation}
    every = [*sparse, item, history]
    model = {
        "deepfm": lambda: DeepFM([*every, *dense], every, mlp),
        "wide-deep": lambda: WideDeep([*sparse, item], [*every, *dense], mlp),
        "dcn-v2": lambda: DCNv2([*every, *dense], 2, mlp, use_low_rank_mixture=False),
        "dcn-v2-mixture": lambda: DCNv2([*every, *dense], 2, mlp, low_rank=4, num_experts=2),
        "dcn": lambda: DCN([*every, *dense], 2, mlp),
        "two-tower": lambda: DSSM([*sparse, history], [item], mlp, mlp),
    }[name.removesuffix("-places").removesuffix(f"-{activation}")]()
    randomize(model)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ONNXExporter(model).export(str(path), seq_length=LENGTH, onnx_export_kwargs={"dynamo": dynamo})


def deepctr(name: str, path: Path, dynamo: bool = False, pool: str = "mean") -> None:
    """ "deepfm", "wide-deep", "dcn", "dcn-v2", "autoint" or "xdeepfm", whose input is one matrix of floats."""
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.importorskip("deepctr_torch")
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
    from deepctr_torch.models import DCN, WDL, AutoInt, DeepFM, xDeepFM

    rows = (("user", USERS), ("country", COUNTRIES), ("item", ITEMS))
    columns = [SparseFeat(field, count, SIZE) for field, count in rows]
    columns += [VarLenSparseFeat(SparseFeat("history", ITEMS, SIZE), LENGTH, pool)]
    columns += [DenseFeat("age", 1), DenseFeat("price", 1)]
    options: dict[str, Any] = {"dnn_hidden_units": HIDDEN, "dnn_dropout": 0.2}
    model = {
        "deepfm": lambda: DeepFM(columns, columns, **options),
        "wide-deep": lambda: WDL(columns, columns, dnn_use_bn=True, **options),
        "dcn": lambda: DCN(columns, columns, **options),
        "dcn-v2": lambda: DCN(columns, columns, cross_num=2, cross_parameterization="matrix", **options),
        "autoint": lambda: AutoInt(columns, columns, **options),
        "xdeepfm": lambda: xDeepFM(columns, columns, cin_layer_size=(8, 8), **options),
    }[name]()
    randomize(model)
    example = torch.zeros(2, len(rows) + LENGTH + 2)
    _export(model, (example,), path, ["input"], dynamo)


def fuxictr(name: str, path: Path, dynamo: bool = False, pool: str = "mean") -> None:
    """ "deepfm", "dcn-v2" or "wide-deep" of FuxiCTR's layers, whose input is one matrix as its loaders make it."""
    pytest.importorskip("fuxictr")
    from fuxictr.features import FeatureMap
    from fuxictr.pytorch import layers

    features = FeatureMap("log", "")
    for column, rows in (("user", USERS), ("country", COUNTRIES), ("item", ITEMS)):
        features.features[column] = {"type": "categorical", "source": "", "vocab_size": rows, "padding_idx": 0}
    features.features["history"] = {
        **{"type": "sequence", "source": "", "vocab_size": ITEMS, "padding_idx": 0, "max_len": LENGTH},
        "feature_encoder": f"layers.Masked{POOLS[pool]}Pooling()",
    }
    for column in ("age", "price"):
        features.features[column] = {"type": "numeric", "source": ""}
    features.num_fields = len(features.features)
    features.set_column_index()
    width = SIZE * features.num_fields

    class Ranker(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = layers.FeatureEmbedding(features, SIZE)
            self.first = layers.LogisticRegression(features, use_bias=True)
            self.fm = layers.FactorizationMachine(features)
            self.cross = layers.CrossNetV2(width, 2)
            self.top = torch.nn.Linear(width + HIDDEN[-1], 1)
            output = None if name == "dcn-v2" else 1
            self.mlp = layers.MLP_Block(
                width, list(HIDDEN), "ReLU", output, dropout_rates=0.2, batch_norm=name == "dcn-v2"
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = {feature: x[:, features.get_column_index(feature)] for feature in features.features}
            e = self.embedding(parts, flatten_emb=name == "dcn-v2")
            flat = e.flatten(start_dim=1)
            if name == "dcn-v2":
                return torch.sigmoid(self.top(torch.cat([self.cross(flat), self.mlp(flat)], -1)))
            if name == "wide-deep":
                return torch.sigmoid(self.mlp(flat) + self.first(parts))
            return torch.sigmoid(self.mlp(flat) + self.fm(parts, e))

    model = Ranker()
    randomize(model)
    _export(model, (torch.zeros(2, features.input_length),), path, ["x"], dynamo)


def _export(model: torch.nn.Module, example: tuple[Any, ...], path: Path, names: list[str], dynamo: bool) -> None:
    options: dict[str, Any] = {"dynamic_axes": {name: {0: "batch"} for name in [*names, "y"]}, "opset_version": 17}
    if dynamo:
        options = {"dynamic_shapes": [{0: torch.export.Dim("batch")}], "opset_version": 18}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(model, example, str(path), input_names=names, output_names=["y"], dynamo=dynamo, **options)


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a log whose ids are the rankers' own; histories of 0 to LENGTH items, one of them with more."""
    random = np.random.default_rng(seed)
    records = []
    for index in range(count):
        history = random.integers(1, ITEMS, random.integers(0, LENGTH + 1))
        records.append(
            {
                "user": str(random.integers(1, USERS)),
                "country": str(random.integers(1, COUNTRIES)),
                "item": str(random.integers(1, ITEMS)),
                "history": "|".join(map(str, history)) or None,
                "age": f"{random.normal():.4f}",
                "price": f"{random.uniform(0, 1):.4f}",
                "label": str(index % 2),
            }
        )
    return records


def sequence_schema(path: Path) -> Path:
    """Write the schema of a ranker of users, items and histories, all of them row numbers."""
    columns: list[dict[str, Any]] = [
        {"name": name, "kind": "category", "encoding": {"type": "id", "rows": count}}
        for name, count in (("user", USERS), ("item", ITEMS))
    ]
    history = {"separator": "|", "length": LENGTH, "pooling": "none", "shares": "item"}
    encoding = {"type": "id", "rows": ITEMS}
    columns += [
        {"name": "label", "kind": "label"},
        {"name": "history", "kind": "categories", "encoding": encoding, **history},
    ]
    path.write_text(json.dumps({"columns": columns}))
    return path


def sequence_feeds(rows: Sequence[Mapping[str, Any]], newest_first: bool = False) -> dict[str, NDArray[np.int64]]:
    """What a user of such an export feeds."""
    feeds = {name: np.array([int(row[name]) for row in rows]) for name in ("user", "item")}
    feeds["history"] = np.zeros((len(rows), LENGTH), np.int64)
    for index, row in enumerate(rows):
        items = [int(item) for item in (row["history"] or "").split("|") if item]
        feeds["history"][index, : len(items)] = items[::-1] if newest_first else items
    return feeds


MODELS: Mapping[str, Callable[..., None]] = {"torch-rechub": torch_rechub, "deepctr": deepctr, "fuxictr": fuxictr}
