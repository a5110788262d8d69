"""The transformer layer of BST in imported rankers: forms in which it is written, and near misses."""

import warnings

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

torch = pytest.importorskip("torch", reason="needs the train extra")
SIZE, LENGTH = 8, packages.LENGTH
ROWS = [row for row in packages.rows(300) if (row["history"] or "").count("|") < LENGTH]


class OwnAttention(torch.nn.Module):
    """Self-attention whose query, keys and values are layers of their own."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.joined = (torch.nn.Linear(SIZE, SIZE) for _ in range(4))

    def forward(self, x, absent):
        def apart(y):
            return y.view(-1, LENGTH + 1, self.heads, SIZE // self.heads).transpose(1, 2)

        scores = torch.matmul(apart(self.query(x)), apart(self.key(x)).transpose(2, 3)) / (SIZE // self.heads) ** 0.5
        scores = scores.masked_fill(absent[:, None, None], -1e9)
        total = torch.matmul(scores.softmax(-1), apart(self.value(x)))
        return self.joined(total.transpose(1, 2).reshape(-1, LENGTH + 1, SIZE))


class OwnLayer(torch.nn.Module):
    """A layer of self-attention with the normalization behind every sum."""

    def __init__(self, heads):
        super().__init__()
        self.attention = OwnAttention(heads)
        self.network = torch.nn.Sequential(torch.nn.Linear(SIZE, 16), torch.nn.ReLU(), torch.nn.Linear(16, SIZE))
        self.first, self.second = torch.nn.LayerNorm(SIZE), torch.nn.LayerNorm(SIZE)

    def forward(self, x, src_key_padding_mask):
        x = self.first(self.attention(x, src_key_padding_mask) + x)
        return self.second(self.network(x) + x)


class BST(torch.nn.Module):
    """A ranker of user, item and history."""

    def __init__(self, heads=2, own=False, layers=1, norm_first=False, target_first=False, masked=True, sizes=False):
        super().__init__()
        self.user, self.item = torch.nn.Embedding(packages.USERS, SIZE), torch.nn.Embedding(packages.ITEMS, SIZE)
        self.place = torch.nn.Embedding(LENGTH + 1, SIZE)
        self.target_first, self.masked, self.sizes = target_first, masked, sizes
        options = {"activation": torch.nn.LeakyReLU(0.2), "batch_first": True, "norm_first": norm_first}
        whole = torch.nn.TransformerEncoderLayer(SIZE, heads, 16, **options)
        self.layers = OwnLayer(heads) if own else torch.nn.TransformerEncoder(whole, layers, enable_nested_tensor=False)
        self.top = torch.nn.Sequential(torch.nn.Linear(3 * SIZE, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, user, item, history):
        target, items, empty = self.item(item), self.item(history), history == 0
        never = torch.zeros_like(item[:, None], dtype=torch.bool)
        parts, absent = [items, target[:, None]], [empty, never]
        if self.target_first:
            parts, absent = parts[::-1], absent[::-1]
        if self.sizes:  # as torch-rechub: places and mask by the sizes of the inputs
            absent[absent[0] is never] = torch.ones(items.shape[0], items.shape[1], dtype=torch.bool) & empty
        x = torch.cat(parts, 1)
        x = x + self.place(torch.arange(x.shape[1] if self.sizes else LENGTH + 1))[None]
        mask = torch.cat(absent, 1) if self.masked else None
        state = self.layers(x, src_key_padding_mask=mask)[:, 0 if self.target_first else -1]
        return torch.sigmoid(self.top(torch.cat([state, target, self.user(user)], 1)))


def ranker_of(tmp_path, opset=17, **settings):
    torch.manual_seed(1)
    model = BST(**settings)
    packages.randomize(model)
    names, axes = ["user", "item", "history"], {}
    example = (torch.ones(2, dtype=torch.long),) * 2 + (torch.ones(2, LENGTH, dtype=torch.long),)
    for name in [*names, "y"]:
        axes[name] = {0: "batch"}
    if settings.get("sizes"):
        axes["history"][1] = "places"
    path = tmp_path / "bst.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"input_names": names, "output_names": ["y"], "dynamic_axes": axes, "opset_version": opset}
        torch.onnx.export(model.eval(), example, str(path), dynamo=False, **options)

    return path, read(path, ROWS, packages.sequence_schema(tmp_path / "schema.json"))


FORMS = [{}, {"heads": 4}, {"own": True}, {"own": True, "target_first": True}, {"masked": False}]
FORMS += [{"opset": 14}, {"sizes": True}, {"sizes": True, "opset": 14, "target_first": True}]


@pytest.mark.parametrize("form", one_in(2, FORMS), ids=str)
def test_forms(form, tmp_path):
    path, ranker = ranker_of(tmp_path, **form)
    assert ranker.family == "bst" and ranker.difference <= 1e-5, ranker.why
    truth = OnnxRuntimeSession(path, 1).run(packages.sequence_feeds(ROWS, newest_first=True))["y"]
    model = ranker.model.clone()
    rewrite(model, passes(ranker.features.to_json()))
    rows = ranker.features.encode(next(iter(ranker.features.read(ROWS))))
    made = OnnxRuntimeSession(io.save(model, tmp_path / "made.onnx"), 1)
    np.testing.assert_allclose(made.run({"ids": rows["ids"]})["probability"], truth, atol=1e-5)
    lowered, report = lower(model, calibrate(model, [{"ids": rows["ids"]}], "minmax"), QuantRecipe())
    assert lowered is not None, report["reason"]
    (result,) = reference.run(click_program(lowered.graph[0]), rows["ids"])
    np.testing.assert_allclose(result, truth, atol=0.005)
    assert len(np.unique(truth.round(3))) > 20


@pytest.mark.parametrize("form", [{"layers": 2}, {"norm_first": True}], ids=str)
def test_near_misses_stay_generic(form, tmp_path):
    _, ranker = ranker_of(tmp_path, **form)
    assert ranker.family == GENERIC and ranker.difference <= 1e-5
