"""Quantization-aware fine-tuning of image classifiers: the built int8 model computes the trained network."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.rewriting import run
from helpers.rounding import assert_same_bytes, bytes_of, layer_by_layer, one_thread  # noqa: F401
from helpers.trainings import broken_off, write_images

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.data.preprocess import Preprocess
from pipelines.graph import io, query
from pipelines.models.stages import _trained
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.qdq.scales import activation_qparams
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from zoo.cli import app as cli

torch = pytest.importorskip("torch", reason="needs the train extra")
training = pytest.importorskip("zoo.vision.training.train", reason="needs the train extra")

from pipelines.quantization.training.qat import Range  # noqa: E402
from zoo.training.runs import QAT_RATE, Processes  # noqa: E402
from zoo.vision.export.freeze import fill  # noqa: E402
from zoo.vision.export.fx_export import export  # noqa: E402
from zoo.vision.export.rewrites import passes  # noqa: E402
from zoo.vision.models.mobilenet import MOBILENET_V1  # noqa: E402
from zoo.vision.models.mobilenet import build as build_mobilenet  # noqa: E402
from zoo.vision.models.resnet import build as build_resnet  # noqa: E402
from zoo.vision.training import qat  # noqa: E402

SETTINGS = [
    "--batch-size",
    "12",
    *(word for setting in ("workers=0", "image_size=32", "randaugment_n=0") for word in ("--set", setting)),
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("pictures"), size=32)


@pytest.fixture(scope="module")
def start(tmp_path_factory, pictures):
    """The folder of a small float model."""
    folder = tmp_path_factory.mktemp("start") / "small"
    options = ["--epochs", "15", "--learning-rate", "2"]
    options += [
        word for setting in ("clip=10", "width=0.25", "ema=0.5", "progressive=1") for word in ("--set", setting)
    ]
    cli.call(["train", "mobilenet-v1", "--data", str(pictures), "-o", str(folder), *SETTINGS, *options])
    return folder


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, pictures, start):
    """The folder of that model, fine-tuned for int8 and built."""
    folder = tmp_path_factory.mktemp("tuned") / "small"
    options = ["--qat", "--epochs", "2", "--set", "distillation=0.5"]
    cli.call(["finetune", str(start), "--data", str(pictures), "-o", str(folder), *SETTINGS, *options])
    zoo.build(folder)
    return folder


def student_of(folder: Path):
    """The fake-quantized network whose weights and ranges were kept."""
    about = read_json(folder / "train.json")
    student = qat.prepare(build_mobilenet(about["arch"], len(about["classes"]), about["width"]), about["features"])
    student.load_state_dict(torch.load(folder / "checkpoint" / "state.pt", weights_only=True)["average"])
    return student.eval(), about["features"]


def normalized(pixels, features):
    order = slice(None, None, -1 if features["channels"] == "BGR" else 1)
    mean, std = (torch.tensor(features[key][order]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (torch.from_numpy(pixels[:, order].copy()).float() / 255 - mean) / std


def photos(size: int, count: int = 8):
    """uint8 [count, 3, size, size]: coarse patterns and some noise."""
    random = np.random.default_rng(1)
    coarse = random.integers(0, 256, (count, 3, size // 8, size // 8)).repeat(8, 2).repeat(8, 3)
    return np.clip(coarse + random.normal(0, 10, coarse.shape), 0, 255).astype(np.uint8)


def assert_one_step(student, int8, pixels, x):
    """Every layer gives the student's bytes, but for a step here and there; returns the student's logits."""
    trained, logits = bytes_of(student, x)
    computed, outputs = layer_by_layer(int8, trained, image=pixels)
    assert_same_bytes(computed, trained)
    np.testing.assert_allclose(outputs["logits"], logits, rtol=1e-3, atol=1e-3 * np.abs(logits).max())
    return logits


def test_the_int8_model_of_the_road_computes_what_was_trained(tuned):
    student, features = student_of(tuned)
    pixels = np.load(tuned / "calibration.npz")["image"]
    int8 = io.load(tuned / "int8.onnx")
    logits = assert_one_step(student, int8, pixels, normalized(pixels, features))
    outputs = run(int8, optimized=True, image=pixels)["logits"]
    fp32 = run(io.load(tuned / "fp32.onnx"), image=pixels)["logits"]
    # what lies between two steps may fall to either side, and all layers after it spread that
    assert np.abs(outputs - logits).max() < 0.05 * np.abs(logits).max()
    assert np.square(outputs - logits).mean() < 0.5 * np.square(fp32 - logits).mean()  # .02 to .24, by the CPU


def test_the_table_holds_the_very_ranges_trained(tuned):
    student, _ = student_of(tuned)
    table = CalibrationTable.load(tuned / "calibration.json")
    table.require(io.load(tuned / "rewritten.onnx"))
    assert {tensor.method for tensor in table.tensors.values()} == {"qat"}
    assert not (table.bias or table.rounding or table.equalization or table.clip)
    ranges = {module.tensor: module for module in student.modules() if isinstance(module, Range)}
    for name, span in table.tensors.items():
        assert [span.low, span.high] == ranges[name].ends.tolist(), name
    assert table.samples == 9 * 12  # ranges stood still in the last 3 of 12 steps
    for node in io.load(tuned / "int8.onnx").graph:
        if node.op_type == "QuantizeLinear":
            scale, zero = activation_qparams(table.tensors[str(node.inputs[1].name).removesuffix(".scale")])
            assert (node.inputs[1].const_value.numpy(), node.inputs[2].const_value.numpy()) == (scale, zero)


def test_the_folder_is_one_like_any_other(tuned, start):
    made = {path.name for path in tuned.iterdir()}
    assert {"model.pt", "train.json", "card.json", "calibration.npz", "history.json", "qat.json"} <= made
    weights, before = (torch.load(folder / "model.pt", weights_only=True)["state_dict"] for folder in (tuned, start))
    assert weights.keys() == before.keys() == build_mobilenet("mobilenet-v1", 3, 0.25).state_dict().keys()
    config = read_json(tuned / "train.json")["config"]
    assert config["qat"] and config["learning_rate"] == pytest.approx(
        MOBILENET_V1.finetune_config().learning_rate * QAT_RATE
    )
    recipe = zoo.load(tuned).recipe
    assert (recipe.observer, recipe.search, recipe.correct) == ("minmax", False, False)
    assert read_json(tuned / "history.json")[-1]["top1"] > 0.8


def test_building_anew_needs_neither_samples_nor_the_training(tuned, tmp_path):
    copy = Path(shutil.copytree(tuned, tmp_path / "copy"))
    before = (copy / "int8.onnx").read_bytes(), (copy / "calibration.json").read_bytes()
    for name in ("calibration.npz", "checkpoint/state.pt", "calibration.json", "int8.onnx", "build.json"):
        (copy / name).unlink()
    zoo.build(copy)
    zoo.build(copy, force=True)
    assert before == ((copy / "int8.onnx").read_bytes(), (copy / "calibration.json").read_bytes())
    with pytest.raises(RequestError, match="has trained ranges"):
        zoo.calibrate(copy)
    table = CalibrationTable.load(copy / "qat.json")
    replace(table, tensors={"other": table.tensors["logits"]}).save(copy / "qat.json")
    with pytest.raises(RequestError, match="a range of other, which the model lacks"):
        zoo.build(copy)


def test_a_tensor_without_a_trained_range_is_observed_and_named(tuned, caplog):
    folder = zoo.load(tuned)
    trained = folder.trained
    fewer = replace(trained, tensors={name: tensor for name, tensor in trained.tensors.items() if name != "act1"})
    table = _trained(folder, fewer, io.load(tuned / "rewritten.onnx"))
    assert "no trained range for act1, observed on calibration.npz" in caplog.text
    assert {name for name, tensor in table.tensors.items() if tensor.method != "qat"} == {"act1"}


def test_post_training_quantization_is_had_by_asking_for_it(tuned, tmp_path):
    copy = Path(shutil.copytree(tuned, tmp_path / "copy"))
    zoo.quantize(copy, observer="auto", correct=True)
    assert "qat" not in {tensor.method for tensor in CalibrationTable.load(copy / "calibration.json").tensors.values()}
    zoo.quantize(copy, observer="minmax", correct=False)
    assert (copy / "int8.onnx").read_bytes() == (tuned / "int8.onnx").read_bytes()


def test_resuming_changes_nothing(pictures, start, tmp_path):
    config = replace(MOBILENET_V1.finetune_config(), qat=True, epochs=2, batch_size=24, workers=0)
    training.fit(build_mobilenet, pictures, tmp_path / "whole", config=config, start_from=start)

    def fit(**more):
        training.fit(build_mobilenet, pictures, tmp_path / "parts", config=config, start_from=start, **more)

    broken_off(training.Trainer, 4, fit)  # of 3 steps an epoch
    fit(resume=True)
    assert (tmp_path / "whole" / "qat.json").read_bytes() == (tmp_path / "parts" / "qat.json").read_bytes()
    a, b = (torch.load(tmp_path / name / "model.pt", weights_only=True)["state_dict"] for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_cannot_be_done_is_said_in_one_line(pictures, start, tmp_path, monkeypatch):
    def said(*options, verb="finetune", model=str(start)):
        with pytest.raises(RequestError) as caught:
            getattr(zoo, verb)(model, pictures, tmp_path / "x", settings=dict(options))
        assert not (tmp_path / "x").exists()
        return str(caught.value)

    assert "zoo finetune MODEL --qat" in said(("qat", "true"), verb="train", model="mobilenet-v1")
    assert "bf16" in said(("qat", "true"), ("precision", "bf16"))
    assert "without a teacher or qat" in said(("distillation", "0.5"))
    others = write_images(tmp_path / "others", {"cyan": (60, 200, 200), "pink": (220, 120, 160)}, size=32)
    with pytest.raises(RequestError, match="other classes"):
        zoo.finetune(start, others, tmp_path / "x", settings={"qat": "true", "distillation": "0.5"})
    with pytest.raises(RequestError, match="found 2 processes, expected one"):
        qat.effective_config(MOBILENET_V1.finetune_config(), "digest", True, 2)


def test_new_classes_train_at_the_full_rate(start, tmp_path):
    others = write_images(tmp_path / "others", {"cyan": (60, 200, 200), "pink": (220, 120, 160)}, size=32)
    zoo.finetune(
        start, others, tmp_path / "new", settings={"qat": "true", "epochs": "1", "batch_size": "16", "workers": "0"}
    )
    assert (
        read_json(tmp_path / "new" / "train.json")["config"]["learning_rate"]
        == MOBILENET_V1.finetune_config().learning_rate
    )
    zoo.build(tmp_path / "new")
    assert query.symbolic_shape(io.load(tmp_path / "new" / "int8.onnx").graph.outputs[0])[1] == 2


@pytest.mark.parametrize(
    "arch, channels",
    [
        *(
            ("mobilenet-v1-slim", "RGB"),
            ("mobilenet-v2", "RGB"),
            pytest.param("resnet26d", "RGB", marks=pytest.mark.slow),
        ),
        *(pytest.param(arch, "BGR", marks=pytest.mark.slow) for arch in ("resnet50", "resnet50-v1")),
    ],
)
def test_every_network_rounds_what_its_int8_form_does(arch, channels):
    """Preprocessing of all kinds: means that are no whole pixels, a scale for each channel, channels reversed."""
    torch.manual_seed(0)
    network = build_resnet(arch, 5) if arch.startswith("resnet") else build_mobilenet(arch, 5, 0.25)
    for name, parameter in network.named_parameters():  # none that makes a layer do nothing
        if parameter.ndim == 1 and name.endswith("weight"):
            torch.nn.init.uniform_(parameter, 0.3, 0.9)
    features = {"size": 64, "resize": 64, "interpolation": "bilinear", "channels": channels}
    features |= {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.325]}
    pixels = photos(64)
    x = normalized(pixels, features)
    student = qat.prepare(network, features).train()
    with torch.no_grad():
        for _ in range(5):
            student(x)
    fresh = build_resnet(arch, 5) if arch.startswith("resnet") else build_mobilenet(arch, 5, 0.25)
    fill(fresh, qat.weights(student), "the student")
    model = export(fresh, Preprocess.from_json(features))
    rewrite(model, passes())
    ranges = {
        module.tensor: module.range() for module in student.modules() if isinstance(module, Range) and module.tensor
    }
    int8, report = quantize(
        model, QuantRecipe(correct=False), CalibrationTable(io.digest(model), "minmax", 1, "", ranges)
    )
    assert {operator.type for operator in report.operators if operator.precision == "float"} <= {"Flatten"}
    assert_one_step(student.eval(), int8, pixels, x)


def test_channels_in_reverse_are_normalized_by_their_own_means():
    features = {**training.PREPROCESSING, "mean": [0.1, 0.2, 0.3], "std": [0.2, 0.3, 0.4], "channels": "BGR"}
    trainer = training.Trainer(torch.nn.Linear(1, 1), MOBILENET_V1.finetune_config(), features, Processes())
    pixels = photos(8, 2)
    logits = trainer.logits(torch.nn.Identity(), torch.from_numpy(pixels), False)
    torch.testing.assert_close(logits, normalized(pixels, features))


@pytest.mark.slow
def test_what_post_training_quantization_loses_is_won_back(start, tmp_path):
    """All channels but one of what the 1x1 convolutions read are made smaller, and read as much more: a scale for all
    leaves next to nothing of them.
    """
    data, tuned = write_images(tmp_path / "data", size=32, count=96), tmp_path / "tuned"

    def judged(folder):
        metrics = zoo.evaluate(folder, [str(data / "test")], engine="onnxruntime")["metrics"]
        return {name: scores["top1"] for name, scores in metrics.items()}

    def smaller(factor):
        folder = Path(shutil.copytree(start, tmp_path / f"{factor}"))
        kept = torch.load(folder / "model.pt", weights_only=True)
        state = kept["state_dict"]
        for name in [key for key in state if key.endswith("conv_pw.weight")]:
            state[name][:, 1:] *= factor
            for part in ("weight", "bias"):
                state[name.replace("conv_pw.weight", f"bn1.{part}")][1:] /= factor
        torch.save(kept, folder / "model.pt")
        zoo.build(folder)
        return folder, judged(folder)

    # three colors are told apart even so, up to some factor
    tried = map(smaller, (200, 300, 400, 500, 600))
    lossy, before = next(trial for trial in tried if trial[1]["fp32"] - trial[1]["int8"] > 0.02)
    settings = {"qat": "true", "epochs": "6", "batch_size": "12", "workers": "0", "image_size": "32"}
    zoo.finetune(lossy, data, tuned, settings=settings | {"randaugment_n": "0", "learning_rate": "0.2"})
    assert judged(tuned)["int8"] - before["int8"] > 0.8 * (before["fp32"] - before["int8"])
