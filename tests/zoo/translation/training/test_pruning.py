"""Pruning, distillation and quantization-aware training of translation models; resumed runs."""

import json

import numpy as np
import pytest
from helpers.rounding import one_thread  # noqa: F401
from helpers.trainings import broken_off

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from zoo.api import compression
from zoo.cli import app as cli

torch = pytest.importorskip("torch", reason="needs the train extra")

from zoo.translation.models.checkpoints import load_model  # noqa: E402
from zoo.translation.models.transformer import Transformer  # noqa: E402
from zoo.translation.train_config import TrainingConfig  # noqa: E402
from zoo.translation.training import distillation  # noqa: E402
from zoo.translation.training.pruning import LAST, PrunableTranslator, _tokens  # noqa: E402
from zoo.translation.training.trainer import Trainer  # noqa: E402

TUNED = {"warmup": "5", "dropout": "0", "batch_size": "512", "precision": "fp32"}
GROUPS = {"encoder.feed", "decoder.feed", "encoder.attention", "decoder.attention"}
STRATEGY = {
    "epochs": 3,
    "drop": 100,
    "strategies": [
        {"kind": "distil", "from": 0, "to": 2, "weight": 0.5, "features": 0.1},
        {"kind": "prune", "from": 0, "to": 2, "goal": "ratio=.25"},
        {"kind": "qat", "from": 2, "to": 3},
    ],
}


@pytest.fixture(scope="module", autouse=True)
def quickly_timed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "TIMED", 0.1)
        yield


@pytest.fixture(scope="module")
def pairs(language, tmp_path_factory):
    return str(language.write(tmp_path_factory.mktemp("pairs") / "pairs.tsv", 300, seed=3))


@pytest.fixture(scope="module")
def opened(translator, pairs):
    return PrunableTranslator(zoo.load(translator), pairs, config=TrainingConfig())


def halved(opened):
    """Every group cut to about half."""
    return {
        name: max(width // 2 // opened.tiles[name], 1) * opened.tiles[name] for name, width in opened.groups.items()
    }


def test_a_cut_network_is_the_one_whose_heads_and_units_give_zeros(opened, translator):
    widths = halved(opened)
    assert opened.groups.keys() == GROUPS and all(widths[name] < opened.groups[name] for name in GROUPS)
    source, labels = _tokens(opened.text.held_out, np.arange(10))
    whole, _ = load_model(translator, Transformer)
    with torch.no_grad():
        before, cut = whole(source, labels), opened._cut(widths)(source, labels)
        for group, paths in opened.parts.items():
            for path in paths:
                kept = torch.zeros(opened.groups[group])
                kept[opened._kept(group, path, widths[group])] = 1
                last = whole.get_submodule(f"{path}.{LAST[path.rpartition('.')[2]]}")
                last.register_forward_pre_hook(lambda _, inputs, kept=kept: (inputs[0] * kept,))
        zeroed = whole(source, labels)
    np.testing.assert_allclose(cut, zeroed, rtol=1e-4, atol=1e-4)
    assert (cut - before).abs().max() > 1e-2


def test_what_matters_little_goes_first(opened):
    whole, cut = opened.loss({}), opened.loss(halved(opened))
    for path, order in opened._order.items():
        opened._order[path] = order[::-1]
    assert whole < cut < opened.loss(halved(opened))  # the other half is the one that mattered
    opened._order.clear()


@pytest.mark.parametrize("engine", ["native", "onnxruntime"])
def test_a_cut_model_is_one_like_any_other(opened, tmp_path, engine):
    from zoo.api.training_settings import write_trained_card

    opened.save(halved(opened), tmp_path / "cut")
    write_trained_card(tmp_path / "cut", "transformer-mt", "for a test")
    folder = zoo.build(tmp_path / "cut")
    pipeline = zoo.pipeline(tmp_path / "cut", engine=engine)
    asked = [opened.text.held_out.pair(i)[0] for i in range(20)]
    said = [hypotheses[0].tokens for hypotheses in pipeline.translate(asked)]
    naive = zoo.pipeline(tmp_path / "cut", "fp32", "onnxruntime")
    same = np.mean([a == hypotheses[0].tokens for a, hypotheses in zip(said, naive.translate(asked), strict=True)])
    assert folder is not None and same > 0.5  # int8 of a model that nobody trained on after the cut


def test_from_the_command_line_and_trained_on(translator, pairs, tmp_path):
    out = str(tmp_path / "out")
    options = [word for name, value in TUNED.items() for word in ("--set", f"{name}={value}")]
    command = ["finetune", str(translator), "--data", pairs, "-o", out, "--prune", "ratio=.3", "--epochs", "2"]
    cli.call([*command, "--drop", "100", *options])
    log = read_json(tmp_path / "out/compression.json")
    assert log["within"] and log["steps"][-1]["bytes"] < log["base"]["bytes"]
    form = read_json(tmp_path / "out/train.json")["features"]["form"]
    assert form == read_json(tmp_path / "out/card.json")["preprocessing"]["form"]
    zoo.finetune(tmp_path / "out", pairs, tmp_path / "on", settings=TUNED | {"epochs": "1"})
    assert read_json(tmp_path / "on/train.json")["features"]["form"] == form


@pytest.fixture(scope="module")
def whole(translator, pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    (folder / "compress.json").write_text(json.dumps(STRATEGY))
    zoo.finetune(translator, pairs, folder / "out", strategy=folder / "compress.json", settings=dict(TUNED))
    return folder


@pytest.mark.parametrize("steps", [2, 5, 9])
@pytest.mark.slow
def test_interrupted_in_any_step_and_gone_on_it_leaves_the_same_bytes(
    whole, translator, pairs, tmp_path, monkeypatch, steps
):
    assert [step["step"] for step in read_json(whole / "out/compression.json")["steps"]] == ["1-prune-distil", "2-qat"]
    options = {"strategy": whole / "compress.json", "settings": dict(TUNED)}
    broken_off(Trainer, steps, lambda: zoo.finetune(translator, pairs, tmp_path / "out", **options))
    asked_again = "what the teacher had said was asked again"
    monkeypatch.setattr(distillation, "progress", lambda *_: pytest.fail(asked_again))
    zoo.finetune(translator, pairs, tmp_path / "out", resume=True, **options)
    for name in ("2-qat/model.pt", "1-prune-distil.cut/sensitivity.json"):
        assert (tmp_path / "out/checkpoint" / name).read_bytes() == (whole / "out/checkpoint" / name).read_bytes()


@pytest.mark.slow
def test_a_speed_is_measured_on_this_machine(translator, pairs, tmp_path):
    settings = TUNED | {"epochs": "1"}
    with pytest.raises(RequestError, match=r"found .*x with all groups pruned, expected 50x; choose a lower goal"):
        zoo.finetune(translator, pairs, tmp_path / "out", prune="50x", settings=settings)
