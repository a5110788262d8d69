"""Target attention in imported rankers: the forms in which packages write it, and near misses."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
from helpers import ranker_packages as packages
from helpers.tiers import one_in

from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.graph import io
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from zoo.recommenders.export.rewrites import passes
from zoo.recommenders.importers.rankers import GENERIC, read
from zoo.recommenders.lowering.lower import lower
from zoo.recommenders.lowering.sequences import pair_layers

torch = pytest.importorskip("torch", reason="needs the train extra")
SIZE, LENGTH = 8, packages.LENGTH
ROWS = [row for row in packages.rows(300) if (row["history"] or "").count("|") < LENGTH]


class BatchDice(torch.nn.Module):
    """p x + alpha (1 - p) x, p the sigmoid of x normalized over the batch."""

    def __init__(self, units, affine):
        super().__init__()
        self.norm, self.affine = torch.nn.BatchNorm1d(units, eps=1e-8, affine=affine), affine
        self.alpha = torch.nn.Parameter(torch.zeros(units))

    def forward(self, x):
        if x.ndim == 2:
            p = torch.sigmoid(self.norm(x))
            return p * x + self.alpha * (1 - p) * x
        x = x.transpose(1, 2)
        p = torch.sigmoid(self.norm(x))
        return (self.alpha[:, None] * (1 - p) * x + p * x).transpose(1, 2)


class RowDice(torch.nn.Module):
    """p x + alpha (1 - p) x, p the sigmoid of x normalized over its units (torch-rechub)."""

    def __init__(self, mean=False):
        super().__init__()
        self.alpha, self.mean = torch.nn.Parameter(torch.zeros(1)), mean

    def forward(self, x):
        apart = x - x.mean(dim=1).unsqueeze(1)
        if self.mean:
            p = torch.sigmoid(apart / torch.sqrt((apart * apart).mean(dim=1, keepdim=True) + 1e-2))
        else:
            p = torch.sigmoid(apart / torch.sqrt((apart**2 + 1e-3).sum(dim=1).unsqueeze(1)))
        return p * x + (1 - p) * self.alpha * x


class DIN(torch.nn.Module):
    """A ranker of user, item and history."""

    def __init__(
        self, hidden=(16, 8), activation="dice", joined=True, weights="raw", mask="times", order=0, top="relu"
    ):
        super().__init__()
        self.user, self.item = torch.nn.Embedding(packages.USERS, SIZE), torch.nn.Embedding(packages.ITEMS, SIZE)
        self.joined, self.weights, self.mask, self.order = joined, weights, mask, order
        layers = []
        for inputs, units in pairwise((4 * SIZE, *hidden)):
            layers.append(torch.nn.Linear(inputs, units))
            layers.append(
                {
                    "dice": lambda units=units: BatchDice(units, False),
                    "affine dice": lambda units=units: BatchDice(units, True),
                    "prelu": torch.nn.PReLU,
                    "relu": torch.nn.ReLU,
                    "row dice": RowDice,
                    "gelu": torch.nn.GELU,
                }[activation]()
            )
        self.unit = torch.nn.Sequential(*layers, torch.nn.Linear(hidden[-1], 1))
        tops = {
            "relu": torch.nn.ReLU,
            "row dice": RowDice,
            "mean dice": lambda: RowDice(True),
            "dice": lambda: BatchDice(16, True),
        }
        self.top = torch.nn.Sequential(torch.nn.Linear(3 * SIZE, 16), tops[top](), torch.nn.Linear(16, 1))

    def forward(self, user, item, history):
        query, keys = self.item(item), self.item(history)
        q = query[:, None].expand(-1, LENGTH, -1)
        parts = [[q, keys, q - keys, q * keys], [keys, q, keys * q, keys - q]][self.order]
        pairs = torch.cat(parts, -1)
        if self.joined:
            scores = self.unit(pairs.view(-1, 4 * SIZE)).view(-1, LENGTH)
        else:
            scores = self.unit(pairs)[:, :, 0] if self.weights != "raw" else self.unit(pairs).squeeze(2)
        mask = history != 0
        if self.mask == "where":
            scores = torch.where(mask, scores, torch.full_like(scores, -1e9 if self.weights == "softmax" else 0.0))
        elif self.mask == "times":
            scores = scores * mask.float()
            if self.weights == "softmax":
                scores = scores - 1e9 * (1 - mask.float())
        if self.weights == "softmax":
            scores = scores.softmax(-1)
        if self.weights == "sigmoid":
            scores = torch.sigmoid(scores) * mask.float()
        summed = (scores.unsqueeze(-1) * keys).sum(1)
        total = summed if self.joined else torch.matmul(scores[:, None], keys)[:, 0]
        return torch.sigmoid(self.top(torch.cat([self.user(user), query, total], 1)))


def exported(path, opset=17, **settings):
    torch.manual_seed(1)
    model = DIN(**settings)
    packages.randomize(model)
    with torch.no_grad():
        model.item.weight[0] = 0
    names = ["user", "item", "history"]
    example = (torch.ones(2, dtype=torch.long),) * 2 + (torch.ones(2, LENGTH, dtype=torch.long),)
    axes = {name: {0: "batch"} for name in [*names, "y"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            example,
            str(path),
            input_names=names,
            output_names=["y"],
            dynamic_axes=axes,
            opset_version=opset,
            dynamo=False,
        )
    return path


def ranker_of(tmp_path, **settings):
    path = exported(tmp_path / "din.onnx", **settings)
    return path, read(path, ROWS, packages.sequence_schema(tmp_path / "schema.json"))


FORMS = [
    {"joined": True, "activation": "dice", "hidden": (16,)},
    {"joined": True, "activation": "dice", "hidden": (16, 8)},
    {"joined": False, "activation": "affine dice", "mask": "where"},
    {"joined": False, "activation": "prelu", "order": 1},
    {"joined": True, "activation": "relu", "order": 1, "hidden": (20, 5)},
    {"weights": "softmax"},
    {"weights": "softmax", "mask": "where", "joined": False},
    {"weights": "sigmoid", "mask": "", "hidden": (9,)},
    {"mask": ""},
    {"mask": "", "activation": "row dice", "top": "row dice"},
    {"weights": "softmax", "activation": "row dice", "hidden": (11,), "top": "dice"},
    {"activation": "prelu", "top": "mean dice"},
    {"activation": "row dice", "top": "row dice", "opset": 14},
]


@pytest.mark.parametrize("form", one_in(2, FORMS), ids=str)
def test_forms(form, tmp_path, monkeypatch):
    path, ranker = ranker_of(tmp_path, **form)
    assert ranker.family == "din" and ranker.difference <= 1e-5, ranker.why
    truth = OnnxRuntimeSession(path, 1).run(packages.sequence_feeds(ROWS))["y"]
    model = ranker.model.clone()
    rewrite(model, passes(ranker.features.to_json()))
    rows = ranker.features.encode(next(iter(ranker.features.read(ROWS))))
    made = OnnxRuntimeSession(io.save(model, tmp_path / "made.onnx"), 1)
    np.testing.assert_allclose(made.run({"ids": rows["ids"]})["probability"], truth, atol=1e-5)
    table = calibrate(model, [{"ids": rows["ids"]}], "minmax")
    for most in (pair_layers.PAIR_SCORES, 0):  # the scores of all pairs, and the network on pairs
        monkeypatch.setattr(pair_layers, "PAIR_SCORES", most)
        lowered, report = lower(model, table, QuantRecipe())
        if not most and form.get("activation") == "row dice":
            assert lowered is None and "normalizes the units of every pair" in report["reason"]
            continue
        assert lowered is not None, report["reason"]
        (result,) = reference.run(click_program(lowered.graph[0]), rows["ids"])
        np.testing.assert_allclose(result, truth, atol=0.005)
    assert len(np.unique(truth.round(3))) > 20


@pytest.mark.parametrize("form", [{"activation": "gelu"}, {"hidden": (16, 8, 4)}])
def test_near_misses_stay_generic(form, tmp_path):
    _, ranker = ranker_of(tmp_path, **form)
    assert ranker.family == GENERIC and ranker.difference <= 1e-5
