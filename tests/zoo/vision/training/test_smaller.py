"""Compression of image classifiers by a strategy: pruning, distillation, QAT; resumed runs."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from helpers.rounding import one_thread  # noqa: F401
from helpers.trainings import broken_off, write_images

import zoo
import zoo.vision.models.mobilenet
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, write_json
from pipelines.quantization.recipe import QuantRecipe
from zoo.api import compression
from zoo.api.training_settings import finetuned
from zoo.cli import app as cli
from zoo.training.runs import Processes

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("torch_pruning", reason="needs the train extra")
training = pytest.importorskip("zoo.vision.training.train", reason="needs the train extra")

from pipelines.compression import channels  # noqa: E402
from zoo.vision.models.mobilenet import MOBILENET_V1, build  # noqa: E402
from zoo.vision.training.distillation import Teacher  # noqa: E402
from zoo.vision.training.pruning import PrunableImages  # noqa: E402

SETTINGS = {"batch_size": "12", "precision": "fp32", "workers": "0", "image_size": "32", "randaugment_n": "0"}
STRATEGY = {
    "epochs": 3,
    "drop": 1,
    "strategies": [
        {"kind": "distil", "from": 0, "to": 3, "weight": 0.5, "temperature": 2, "features": 0.1, "fsp": 0.1},
        {"kind": "prune", "from": 0, "to": 2, "goal": "ratio=.4", "schedule": "during"},
        {"kind": "qat", "from": 2, "to": 3},
    ],
}


@pytest.fixture(scope="module", autouse=True)
def quickly_measured():
    """Int8 without a search for ranges, and short timings: these take most of the time."""
    recipe = QuantRecipe(observer="minmax", correct=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo.vision.models.mobilenet, "MOBILENET_V1", dataclasses.replace(MOBILENET_V1, recipe=recipe))
        patch.setattr(compression, "TIMED", 0.1)
        yield


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("pictures"), size=32)


@pytest.fixture(scope="module")
def start(tmp_path_factory, pictures):
    folder = tmp_path_factory.mktemp("start") / "small"
    zoo.train(
        "mobilenet-v1", pictures, folder, settings=SETTINGS | {"epochs": "1", "width": "0.25", "progressive": "1"}
    )
    return folder


def strategy_file(folder, **changes):
    path = folder / "compress.json"
    path.write_text(json.dumps(STRATEGY | changes))
    return path


@pytest.fixture(scope="module")
def smaller(tmp_path_factory, pictures, start):
    folder = tmp_path_factory.mktemp("smaller")
    zoo.finetune(start, pictures, folder / "out", strategy=strategy_file(folder), settings=dict(SETTINGS))
    return folder / "out"


def test_a_strategy_cuts_by_the_sensitivity_it_keeps_and_leaves_a_model(smaller, start, pictures):
    log = read_json(smaller / "compression.json")
    assert [step["step"] for step in log["steps"]] == ["1-prune-distil", "2-prune-distil", "3-distil-qat"]
    assert all({"metrics", "speed", "bytes", "drop", "within"} <= step.keys() for step in log["steps"])
    widths = read_json(smaller / "checkpoint/2-prune-distil.cut/cuts.json")["widths"]
    assert sum(widths.values()) <= 0.6 * log["channels"]
    assert read_json(smaller / "sensitivity.json")["groups"].keys() == widths.keys()
    assert log["steps"][-1]["bytes"] < 0.8 * log["base"]["bytes"]
    pipeline = zoo.pipeline(smaller)
    assert pipeline(next((pictures / "test/red").iterdir()))[0]["label"] in ("red", "green", "blue")
    sizes = read_json(smaller / "train.json")["shapes"]
    assert sizes and read_json(smaller / "card.json")["shapes"] == sizes


def test_a_cut_model_can_be_fine_tuned_and_taught_by(smaller, pictures, tmp_path):
    zoo.finetune(smaller, pictures, tmp_path / "on", settings=SETTINGS | {"epochs": "1", "teacher": str(smaller)})
    assert read_json(tmp_path / "on/train.json")["shapes"] == read_json(smaller / "train.json")["shapes"]
    zoo.build(tmp_path / "on")


@pytest.mark.slow  # as that of translations
@pytest.mark.parametrize("steps", [3, 9, 14])
def test_interrupted_in_any_step_and_gone_on_it_leaves_the_same_bytes(smaller, start, pictures, tmp_path, steps):
    options = {"strategy": strategy_file(tmp_path), "settings": dict(SETTINGS)}
    broken_off(training.Trainer, steps, lambda: zoo.finetune(start, pictures, tmp_path / "out", **options))
    assert not (tmp_path / "out/card.json").exists()
    options["settings"] = dict(SETTINGS)
    zoo.finetune(start, pictures, tmp_path / "out", **options, resume=True)
    best = read_json(smaller / "compression.json")["best"]
    for name in ("sensitivity.json", f"checkpoint/{best}/model.pt", f"checkpoint/{best}/int8.onnx"):
        assert (tmp_path / "out" / name).read_bytes() == (smaller / name).read_bytes(), name


@pytest.mark.slow  # as that of translations
def test_a_speed_is_measured_on_this_machine(start, pictures, tmp_path):
    prune = {"kind": "prune", "goal": "1.001x", "layers": ["blocks.[34].*"]}
    path = strategy_file(tmp_path, epochs=1, strategies=[prune])
    log = zoo.finetune(start, pictures, tmp_path / "out", strategy=path, settings=dict(SETTINGS))
    cuts = read_json(tmp_path / "out/checkpoint/1-prune.cut/cuts.json")
    assert cuts["speed"] >= 1.001 and cuts["goal"] == "1.001x"
    assert cuts["saved"] and all(name.startswith(("blocks.3", "blocks.4")) for name in cuts["saved"])
    assert log["best"] == "1-prune"
    path = strategy_file(tmp_path, epochs=1, strategies=[prune | {"goal": "50x", "layers": ["blocks.4.1.*"]}])
    with pytest.raises(RequestError, match="with all groups pruned, expected 50x"):
        zoo.finetune(start, pictures, tmp_path / "50", strategy=path, settings=dict(SETTINGS))


def test_the_least_important_channels_go(start, pictures):
    model = PrunableImages(zoo.load(start), pictures, config=MOBILENET_V1.finetune_config())
    name, width = next(iter(model.groups.items()))
    removed = model._removed({name: width - 4})[name]
    scores = channels.importances(
        model.network, model.members, [model._subset(model.images.train, 64)], model._loss, "taylor"
    )[name]
    assert len(removed) == 4
    kept = np.setdiff1d(np.arange(width), removed)
    whole = model._order[name]
    assert set(whole[:4]) == set(removed) and scores[removed].mean() < scores[kept].mean()


def test_features_and_flow_are_learned_through_adapters(start, pictures):
    """With features alone the loss falls towards the teacher's maps, whose channels are others."""
    torch.manual_seed(0)
    config = training.replace(MOBILENET_V1.finetune_config(), teacher="x", features=1.0, fsp=0.1, image_size=32)
    features = training.PREPROCESSING | {"size": 32, "resize": 32}
    student, teacher = build("mobilenet-v1", 3, 0.25), build("mobilenet-v1", 3, 0.5)
    for _ in range(20):
        teacher.train()(torch.randn(64, 3, 32, 32))  # so that its norms know of some data
    trainer = training.Trainer(student, config, features, Processes())
    trainer.distill_from(Teacher(teacher, features, student, config, torch.device("cpu")))
    x, y = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8) % 3
    losses = [trainer.step(x, y, 1, 50)[0] for _ in range(40)]
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])
    assert {"adapters"} <= trainer.state().keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prune": "0.5x"}, "expected an int8 speedup above 1x"),
        ({"prune": "ratio=.99"}, "of the channels to cut"),
        ({"prune": "1.5x", "settings": {"teacher": "wide-deep-criteo"}}, "teacher wide-deep-criteo of the task"),
        ({"prune": "1.5x", "settings": {"teacher": "mobilenet-v1-cifar10"}}, "of 10 classes"),
        ({"prune": "1.5x", "settings": {"nonsense": "1"}}, "no training setting nonsense"),
        ({"settings": {"columns": "a,b"}}, "--column requires a text encoder, found the family"),
        ({"drop": 0.1}, "--drop requires"),
    ],
)
def test_a_bad_request_is_one_line(start, pictures, tmp_path, options, message):
    options = {**options, "settings": SETTINGS | {"epochs": "1"} | options.get("settings", {})}
    with pytest.raises(RequestError, match=message) as error:
        zoo.finetune(start, pictures, tmp_path / "out", **options)
    assert "\n" not in str(error.value)


def test_a_model_whose_card_counts_its_classes_is_refused_in_one_line(start, pictures, tmp_path):
    counted = shutil.copytree(start, tmp_path / "counted")
    write_json(counted / "card.json", read_json(counted / "card.json") | {"classes": 1000})
    with pytest.raises(RequestError, match=r"expected those of small \(1000 classes\); fine-tune the model") as error:
        zoo.finetune(counted, pictures, tmp_path / "out", prune="ratio=.3", settings=SETTINGS | {"epochs": "1"})
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_nothing_is_resumed_that_was_not_begun(start, pictures, tmp_path):
    options = {"prune": "ratio=.3", "settings": SETTINGS | {"epochs": "1"}, "resume": True}
    (tmp_path / "plain/checkpoint").mkdir(parents=True)
    (tmp_path / "plain/checkpoint/state.pt").write_text("of another training")
    for place in ("plain", "typo"):
        with pytest.raises(RequestError, match=r"found no checkpoint/run.json in .* to resume from"):
            zoo.finetune(start, pictures, tmp_path / place, **options)
    assert (tmp_path / "plain/checkpoint/state.pt").is_file() and not (tmp_path / "typo").exists()


def test_what_was_begun_stays_where_it_cannot_be_gone_on_with(start, pictures, tmp_path, monkeypatch):
    def ended(*arguments):
        raise KeyboardInterrupt

    options = {"prune": "ratio=.3", "settings": SETTINGS | {"epochs": "1"}}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(compression._Run, "_quality", ended)
        zoo.finetune(start, pictures, tmp_path / "out", **options)
    options["settings"] = SETTINGS | {"epochs": "1"}
    with pytest.raises(RequestError):
        zoo.finetune(start, tmp_path / "nowhere", tmp_path / "out", **options, resume=True)
    assert (tmp_path / "out/checkpoint/run.json").is_file()


@pytest.mark.parametrize("prune", [None, "ratio=.3"])
def test_a_network_cannot_be_set_to_another(start, pictures, tmp_path, prune):
    for name, value in (("width", "0.5"), ("arch", "mobilenet-v2")):
        with pytest.raises(RequestError, match=f"setting {name} {value}, but fine-tuning keeps that of small"):
            zoo.finetune(start, pictures, tmp_path / "out", settings={name: value}, prune=prune)
    assert finetuned(zoo.load(start), {"width": "0.25"}).width == 0.25


@pytest.mark.parametrize(("given", "qat"), [({}, False), ({"qat": "false"}, False), ({"qat": "yes"}, True)])
def test_int8_is_trained_for_only_where_that_is_asked(start, given, qat):
    planned = compression.plan(zoo.load(start), "ratio=.3", None, None, {"epochs": "2", **given})
    assert any(step.qat for step in planned.steps()) == qat


def test_unknown_layers_and_flags_beside_a_strategy_end_with_2(start, pictures, tmp_path, capsys):
    strategies = [{"kind": "prune", "goal": "ratio=.3", "layers": ["nowhere.*"]}]
    path = strategy_file(tmp_path, strategies=strategies)
    words = ["finetune", str(start), "--data", str(pictures), "-o", str(tmp_path / "out"), "--strategy", str(path)]
    words += [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    for more, message in (
        ([], "found no layers nowhere.*"),
        (["--qat"], "found --qat and --strategy, which sets the same"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.call([*words, *more])
        assert end.value.code == 2 and message in capsys.readouterr().err
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
