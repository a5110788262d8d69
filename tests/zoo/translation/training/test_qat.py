"""Quantization-aware fine-tuning of translation: the built int8 model computes the trained network."""

import shutil

import numpy as np
import pytest
from helpers.rounding import assert_same_bytes, bytes_of, layer_by_layer, one_thread  # noqa: F401
from helpers.trainings import broken_off

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.graph import io
from pipelines.quantization.calibration.table import CalibrationTable

torch = pytest.importorskip("torch", reason="needs the train extra")

from pipelines.quantization.training import qat as shared  # noqa: E402
from zoo.training.runs import QAT_RATE  # noqa: E402
from zoo.translation.models.checkpoints import load_model  # noqa: E402
from zoo.translation.models.transformer import Transformer  # noqa: E402
from zoo.translation.train_config import TrainingConfig  # noqa: E402
from zoo.translation.training import qat  # noqa: E402
from zoo.translation.training.trainer import Trainer  # noqa: E402

TUNED = {"qat": "true", "epochs": "2", "warmup": "5", "dropout": "0", "batch_size": "512", "learning_rate": "0.002"}


@pytest.fixture(scope="module")
def pairs(language, tmp_path_factory):
    return str(language.write(tmp_path_factory.mktemp("pairs") / "pairs.tsv", 300, seed=3))


@pytest.fixture(scope="module")
def tuned(translator, pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned") / "model"
    zoo.finetune(translator, pairs, folder, settings=TUNED)
    zoo.build(folder)
    return folder


def test_the_int8_model_of_the_road_computes_what_was_trained(tuned, translator):
    student, _ = load_model(tuned, Transformer)
    qat.prepare(student, zoo.load(translator))
    table = CalibrationTable.load(tuned / "calibration.json")
    shared.start_ranges(student.eval(), table.tensors)
    samples = np.load(tuned / "calibration.npz")
    source, target = (samples[name][:16] for name in ("source", "target"))
    trained, logits = bytes_of(student, torch.from_numpy(source), torch.from_numpy(target))
    assert {table.tensors[name].method for name in trained} == {"qat"}
    ends = (np.arange(16), (target != 0).sum(1) - 1)
    trained["last"] = trained["last"][ends]
    computed, outputs = layer_by_layer(io.load(tuned / "int8.onnx"), trained, source=source, target=target)
    assert_same_bytes(computed, trained)
    np.testing.assert_allclose(outputs["logits"], logits[ends], atol=2e-3 * np.abs(logits).max())


def test_the_folder_is_one_like_any_other(tuned, translator):
    config = read_json(tuned / "train.json")["config"]
    assert config["qat"] and config["precision"] == "fp32"
    assert config["learning_rate"] == pytest.approx(0.002 * QAT_RATE)
    one, other = (torch.load(folder / "model.pt", weights_only=True)["state_dict"] for folder in (tuned, translator))
    assert one.keys() == other.keys()
    recipe = zoo.load(tuned).recipe
    assert (recipe.observer, recipe.search, recipe.correct) == ("minmax", False, False)
    before = CalibrationTable.load(translator / "calibration.json").tensors
    after = CalibrationTable.load(tuned / "calibration.json").tensors
    moved = [name for name, tensor in after.items() if tensor.method == "qat" and tensor.high != before[name].high]
    assert moved and after.keys() == before.keys()


def test_resuming_changes_nothing(tuned, translator, pairs, tmp_path):
    def train(**more):
        zoo.finetune(translator, pairs, tmp_path / "parts", settings=TUNED, **more)

    broken_off(Trainer, read_json(tuned / "train.json")["epochs"] * 3, train)
    train(resume=True)
    assert (tuned / "qat.json").read_bytes() == (tmp_path / "parts" / "qat.json").read_bytes()
    one, other = (
        torch.load(folder / "model.pt", weights_only=True)["state_dict"] for folder in (tuned, tmp_path / "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_cannot_be_done_is_said_in_one_line(translator, pairs, tmp_path):
    with pytest.raises(RequestError, match="zoo finetune MODEL --qat"):
        zoo.train("transformer-mt", pairs, tmp_path / "x", settings={"qat": "true"})
    with pytest.raises(RequestError, match="bf16"):
        zoo.finetune(translator, pairs, tmp_path / "x", settings={"qat": "true", "precision": "bf16"})
    with pytest.raises(RequestError, match="found 2 processes, expected one"):
        qat.settled(TrainingConfig(), "digest", 2)
    assert not (tmp_path / "x" / "model.pt").exists()


@pytest.mark.slow
def test_what_post_training_quantization_loses_is_won_back(translator, language, tmp_path):
    """A channel of every normalization is made 100 times as large, and read as much less: the same network in float, of whose other
    channels a scale for all leaves next to nothing.
    """
    more = str(language.write(tmp_path / "more.tsv", 1500, seed=3))
    new = str(language.write(tmp_path / "new.tsv", 200, seed=4))
    start, tuned = tmp_path / "start", tmp_path / "tuned"
    shutil.copytree(translator, start)
    kept = torch.load(start / "model.pt", weights_only=True)
    state = kept["state_dict"]
    for name in [key for key in state if key.endswith("norm.weight")]:
        path, _, around = name.removesuffix(".norm.weight").rpartition(".around_")
        readers = {"attention": ("query", "key", "value"), "cross": ("query",), "feed": ("inner",)}.get(around, ())
        for reader in readers:
            state[f"{path}.{around}.{reader}.weight"][:, 0] /= 100
        if readers:
            state[name][0] *= 100
            state[name.replace("weight", "bias")][0] *= 100
    torch.save(kept, start / "model.pt")
    zoo.build(start)
    settings = {**TUNED, "epochs": "6", "learning_rate": "0.01"}
    zoo.finetune(start, more, tuned, settings=settings)
    before, after = (zoo.evaluate(folder, [new], engine="onnxruntime")["metrics"] for folder in (start, tuned))
    lost = before["fp32"]["bleu"] - before["int8"]["bleu"]
    assert lost > 1
    assert after["int8"]["bleu"] - before["int8"]["bleu"] > 0.8 * lost
