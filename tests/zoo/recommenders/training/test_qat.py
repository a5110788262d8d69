"""Quantization-aware fine-tuning of recommenders: the built int8 model computes the trained network."""

import functools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.rounding import assert_same_bytes, bytes_of, layer_by_layer, one_thread  # noqa: F401
from helpers.trainings import broken_off

import zoo
from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.models import stages
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.qdq.scales import activation_qparams

torch = pytest.importorskip("torch", reason="needs the train extra")

from pipelines.quantization.training import qat as shared  # noqa: E402
from zoo.recommenders.models.checkpoints import load_checkpoint  # noqa: E402
from zoo.recommenders.models.dcn_v2 import DCNv2  # noqa: E402
from zoo.recommenders.models.dcn_v2 import DCNv2Config as OfDCN  # noqa: E402
from zoo.recommenders.models.deepfm import DeepFM  # noqa: E402
from zoo.recommenders.models.deepfm import DeepFMConfig as OfDeepFM  # noqa: E402
from zoo.recommenders.models.dlrm import DLRM  # noqa: E402
from zoo.recommenders.models.dlrm import DLRMConfig as OfDLRM  # noqa: E402
from zoo.recommenders.models.two_tower import TwoTower  # noqa: E402
from zoo.recommenders.models.two_tower import TwoTowerConfig as OfTowers  # noqa: E402
from zoo.recommenders.models.wide_deep import WideDeep  # noqa: E402
from zoo.recommenders.models.wide_deep import WideDeepConfig as OfWideDeep  # noqa: E402
from zoo.recommenders.training import qat  # noqa: E402
from zoo.recommenders.training.trainer import Trainer  # noqa: E402
from zoo.training.runs import QAT_RATE, checkpoint_hook  # noqa: E402

ROOT = Path(__file__).resolve().parents[4]
FAMILIES = {
    "wide-deep": (WideDeep, OfWideDeep),
    "deepfm": (DeepFM, OfDeepFM),
    "dcn-v2": (DCNv2, OfDCN),
    "dlrm": (DLRM, OfDLRM),
    "two-tower": (TwoTower, OfTowers),
}
every_family = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("deepfm", "dcn-v2"))) for name in FAMILIES],
)
SMALL = {"hidden": "16,8", "embedding_size": "8", "epochs": "2", "refit": "false", "batch_size": "128"}
TUNED = {"qat": "true", "epochs": "2", "batch_size": "128"}


def write_log(path, rows, seed=0):
    command = [sys.executable, ROOT / "scripts/synthesize_log.py", path, "-n", rows, "--users", 80, "--items", 50]
    subprocess.run([str(argument) for argument in (*command, "--seed", seed)], check=True)
    return str(path)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_log(tmp_path_factory.mktemp("log") / "log.csv", 1500)


@pytest.fixture(scope="module")
def starts(log, tmp_path_factory):
    """family -> the folder of a small float model with its calibration."""

    @functools.cache
    def made(family):
        folder = tmp_path_factory.mktemp("starts") / family
        zoo.train(family, log, folder, settings={**SMALL, "l2_embeddings": "10", "learning_rate": "0.004"})
        zoo.build(folder)
        return folder

    return made


@pytest.fixture(scope="module")
def tuned(log, starts, tmp_path_factory):
    """family -> the folder of that model, fine-tuned for int8 and built."""

    @functools.cache
    def made(family):
        folder = tmp_path_factory.mktemp("tuned") / family
        with checkpoint_hook(lambda output: shutil.copy(output / "checkpoint/state.pt", folder.with_suffix(".pt"))):
            zoo.finetune(starts(family), log, folder, settings=TUNED)
        zoo.build(folder)
        return folder

    return made


def student_of(folder, start, family):
    """The network that was trained, with the weights and ranges that the folder keeps."""
    model, features = load_checkpoint(folder, *FAMILIES[family])
    student = qat.fake_quantization(start, features).prepare(model)
    shared.start_ranges(student, CalibrationTable.load(folder / "qat.json").tensors)
    return student.eval(), features


def assert_one_step(folder, start, family, log):
    """Returns the rows compared, and their probabilities."""
    student, features = student_of(folder, start, family)
    rows = next(features.read(log, batch_rows=500))
    codes, logits = bytes_of(student, *(torch.from_numpy(array) for array in (rows.ids, rows.numbers, rows.scales)))
    computed, outputs = layer_by_layer(io.load(folder / "int8.onnx"), codes, **features.encode(rows))
    assert len(computed) >= 3
    assert_same_bytes(computed, codes)
    wanted = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(outputs["probability"], wanted, atol=1e-3)
    return rows, wanted


@every_family
def test_the_int8_model_of_the_road_computes_what_was_trained(tuned, starts, log, family):
    rows, wanted = assert_one_step(tuned(family), starts(family), family, log)
    native = zoo.pipeline(tuned(family), precision="int8", engine="native")
    np.testing.assert_allclose(native.predict(native.encode(rows))["probability"], wanted, atol=5e-3)


@pytest.mark.parametrize("large", [10**6, 20])  # rows beyond which a step changes those of its batch alone
def test_tables_of_bytes_are_rounded_as_what_is_looked_up(tmp_path, monkeypatch, large):
    """A log of categories alone: nothing is rounded where the int8 model runs, as tables hold bytes."""
    monkeypatch.setattr("zoo.recommenders.models.layers.LARGE_ROWS", large)
    random = np.random.default_rng(0)
    a, b = random.integers(0, 30, 1000), random.integers(0, 20, 1000)
    clicks = random.random(1000) < 1 / (1 + np.exp(-np.sin(a) - np.cos(b)))
    lines = [f"{click:d},a{x},b{y}" for click, x, y in zip(clicks, a, b, strict=True)]
    log, start, tuned = (str(tmp_path / "log.csv"), tmp_path / "start", tmp_path / "tuned")
    Path(log).write_text("\n".join(["click,a,b", *lines]) + "\n")
    zoo.train("wide-deep", log, start, settings={**SMALL, "l2_embeddings": "10"})
    zoo.finetune(start, log, tuned, settings=TUNED)
    zoo.build(tuned)
    assert_one_step(tuned, start, "wide-deep", log)


@every_family
def test_the_table_holds_the_very_ranges_trained(tuned, starts, family):
    state = torch.load(tuned(family).with_suffix(".pt"), weights_only=False)
    student, _ = student_of(tuned(family), starts(family), family)
    table = CalibrationTable.load(tuned(family) / "calibration.json")
    before = CalibrationTable.load(starts(family) / "calibration.json").tensors
    moved = 0
    for path, module in student.named_modules():
        if isinstance(module, shared.Range) and module.active:
            ends = state["trainer"]["model"][f"{path}.ends"].tolist()
            assert table.tensors[module.tensor].method == "qat"
            assert [table.tensors[module.tensor].low, table.tensors[module.tensor].high] == ends
            moved += ends != [before[module.tensor].low, before[module.tensor].high]
    assert moved  # from where post-training quantization had left them
    qparams = {
        tuple(part.item() for part in activation_qparams(tensor))
        for tensor in table.tensors.values()
        if tensor.method == "qat"
    }
    for node in io.load(tuned(family) / "int8.onnx").graph:
        if node.op_type == "QuantizeLinear":
            assert tuple(value.const_value.numpy().item() for value in node.inputs[1:]) in qparams


def test_ranges_begin_with_those_of_post_training_quantization(starts):
    model, features = load_checkpoint(starts("dlrm"), *FAMILIES["dlrm"])
    student = qat.fake_quantization(starts("dlrm"), features).prepare(model)
    table = CalibrationTable.load(starts("dlrm") / "calibration.json").tensors
    active = [module for module in student.modules() if isinstance(module, shared.Range) and module.active]
    assert {module.tensor for module in active} >= {"bottom.4", "top.1"}
    assert all(module.ends.tolist() == [table[module.tensor].low, table[module.tensor].high] for module in active)


def test_the_folder_is_one_like_any_other(tuned, starts):
    about = json.loads((tuned("two-tower") / "train.json").read_text())
    assert about["config"]["qat"] and about["config"]["learning_rate"] == pytest.approx(2e-4 * QAT_RATE)
    one, other = (torch.load(folder_of("two-tower") / "model.pt", weights_only=True) for folder_of in (tuned, starts))
    assert one["state_dict"].keys() == other["state_dict"].keys()
    recipe = zoo.load(tuned("two-tower")).recipe
    assert (recipe.observer, recipe.search, recipe.correct, recipe.bound) == ("minmax", False, False, 0)
    report = zoo.quantize(tuned("two-tower"))
    assert "user.network.3" in {op["name"] for op in report["operators"] if op["precision"] == "int8"}


@pytest.mark.parametrize("refit", ["true", "false"])
def test_resuming_changes_nothing(log, starts, tmp_path, refit):
    settings = {**TUNED, "refit": refit}
    zoo.finetune(starts("two-tower"), log, tmp_path / "whole", settings=settings)

    def train(**more):
        zoo.finetune(starts("two-tower"), log, tmp_path / "parts", settings=settings, **more)

    broken_off(Trainer, 15, train)  # of 11 or 12 steps an epoch
    train(resume=True)
    a, b = (tmp_path / name for name in ("whole", "parts"))
    assert (a / "qat.json").read_bytes() == (b / "qat.json").read_bytes()
    one, other = (torch.load(folder / "model.pt", weights_only=True)["state_dict"] for folder in (a, b))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_cannot_be_done_is_said_in_one_line(log, starts, tmp_path):
    with pytest.raises(RequestError, match="zoo finetune MODEL --qat"):
        zoo.train("dlrm", log, tmp_path / "x", settings={"qat": "true"})
    with pytest.raises(RequestError, match="found 2 processes, expected one"):
        qat.for_qat(OfDLRM(), "digest", 2)
    with pytest.raises(
        RequestError, match=r"cross-encoder has no quantization-aware training .*: wide-deep.*dlrm.*resnet50"
    ):
        zoo.train("cross-encoder", log, tmp_path / "x", settings={"qat": "true"})
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_what_post_training_quantization_loses_is_won_back(tmp_path):
    """One unit of every hidden layer is made 1024 times as large, and read as much less: the same network in float, of
    whose other units a scale for all leaves next to nothing.
    """
    log, new = write_log(tmp_path / "log.csv", 8000), write_log(tmp_path / "new.csv", 8000, seed=1)
    base, start, tuned = (tmp_path / name for name in ("base", "start", "tuned"))
    more = {"l2_embeddings": "1", "epochs": "6", "learning_rate": "0.004", "ema": "0.9"}
    zoo.train("two-tower", log, base, settings={**SMALL, **more})
    shutil.copytree(base, start)
    kept = torch.load(start / "model.pt", weights_only=True)
    for tower in ("user", "item"):
        for layer, after in ((0, 3), (3, 6)):
            kept["state_dict"][f"{tower}.network.{layer}.weight"][0] *= 1024
            kept["state_dict"][f"{tower}.network.{layer}.bias"][0] *= 1024
            kept["state_dict"][f"{tower}.network.{after}.weight"][:, 0] /= 1024
    torch.save(kept, start / "model.pt")
    folder = zoo.load(start)
    stages.set_recipe(folder, replace(folder.own_recipe, bound=0.0))  # else what int8 hurts would stay float
    settings = {**TUNED, "refit": "false", "learning_rate": "0.05", "epochs": "4"}
    zoo.finetune(start, log, tuned, settings=settings)
    before, after = (zoo.evaluate(folder, [new], engine="onnxruntime")["metrics"] for folder in (start, tuned))
    lost = before["fp32"]["auc"] - before["int8"]["auc"]
    assert lost > 0.01
    assert after["int8"]["auc"] - before["int8"]["auc"] > 0.8 * lost
