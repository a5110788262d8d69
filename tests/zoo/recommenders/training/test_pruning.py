"""Recommenders of any log made smaller: what is cut, by a strategy, interrupted and gone on."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.trainings import broken_off, random_network, results

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, write_json
from zoo.cli import app as cli

torch = pytest.importorskip("torch", reason="needs the train extra")

from zoo.recommenders.data.features import Features  # noqa: E402
from zoo.recommenders.data.schema_inference import infer  # noqa: E402
from zoo.recommenders.models.autoint import AutoInt, AutoIntConfig  # noqa: E402
from zoo.recommenders.models.dcn_v2 import DCNv2  # noqa: E402
from zoo.recommenders.models.dcn_v2 import DCNv2Config as OfDCN  # noqa: E402
from zoo.recommenders.models.deepfm import DeepFM  # noqa: E402
from zoo.recommenders.models.deepfm import DeepFMConfig as OfDeepFM  # noqa: E402
from zoo.recommenders.models.dlrm import DLRM  # noqa: E402
from zoo.recommenders.models.dlrm import DLRMConfig as OfDLRM  # noqa: E402
from zoo.recommenders.models.finalmlp import FinalMLP, FinalMLPConfig  # noqa: E402
from zoo.recommenders.models.gdcn import GDCN, GDCNConfig  # noqa: E402
from zoo.recommenders.models.two_tower import TwoTower  # noqa: E402
from zoo.recommenders.models.two_tower import TwoTowerConfig as OfTowers  # noqa: E402
from zoo.recommenders.models.wide_deep import WideDeep  # noqa: E402
from zoo.recommenders.models.wide_deep import WideDeepConfig as OfWideDeep  # noqa: E402
from zoo.recommenders.training.pruning import PrunableRecommender  # noqa: E402
from zoo.recommenders.training.pruning_groups import PruningGroups, importances  # noqa: E402
from zoo.recommenders.training.trainer import Trainer  # noqa: E402

ROOT = Path(__file__).resolve().parents[4]
FAMILIES = {
    "wide-deep": (WideDeep, OfWideDeep, {"embeddings", "deep.0", "deep.3"}),
    "deepfm": (DeepFM, OfDeepFM, {"embeddings", "deep.0", "deep.3"}),
    "dcn-v2": (DCNv2, OfDCN, {"embeddings", "cross.0.v", "deep.0", "deep.3"}),
    "dlrm": (DLRM, OfDLRM, {"embeddings", "bottom.0", "top.0", "top.3"}),
    "dlrm with cross layers": (
        DLRM,
        partial(OfDLRM, layers=2, rank=24),
        {"embeddings", "bottom.0", "cross.0.v", "top.0", "top.3"},
    ),
    "autoint": (AutoInt, AutoIntConfig, {"deep.0", "deep.3"}),
    "finalmlp": (
        FinalMLP,
        FinalMLPConfig,
        {"embeddings", "first_gates.network.0", "first.0", "first.3", "second.0", "second.3"},
    ),
    "gdcn": (GDCN, GDCNConfig, {"embeddings", "deep.0", "deep.3"}),
    "two-tower": (TwoTower, OfTowers, {"user.embeddings", "user.network.0", "user.network.3", "user.network.6"}),
}
SETTINGS = {"batch_size": "128", "held_out": "0.2", "l2_embeddings": "10"}
STRATEGY = {
    "epochs": 3,
    "drop": 1,
    "strategies": [
        {"kind": "distil", "from": 0, "to": 3, "weight": 0.5},
        {"kind": "prune", "from": 0, "to": 2, "goal": "ratio=.3", "schedule": "iterative", "times": 2},
        {"kind": "qat", "from": 2, "to": 3},
    ],
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    command = [sys.executable, ROOT / "scripts/synthesize_log.py", path, "-n", 1500, "--users", 80, "--items", 50]
    subprocess.run([str(argument) for argument in command], check=True)
    return str(path)


@pytest.fixture(scope="module")
def start(log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "deepfm"
    sizes = {"hidden": "48,32", "embedding_size": "32", "epochs": "1", "refit": "false"}
    zoo.train("deepfm", log, folder, settings=SETTINGS | sizes)
    zoo.build(folder)
    return folder


@pytest.fixture(scope="module")
def features(log):
    from zoo.recommenders.data.logs import open_logs

    return Features(infer(open_logs(log)[0], None))


@pytest.fixture(scope="module")
def rows(features, log):
    batch = next(features.read(log, batch_rows=300, labelled=True))
    named = {"label": batch.labels, "weight": batch.weights}
    named |= {name: getattr(batch, name) for name in ("ids", "numbers", "scales")}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in named.items()}


def made(family, features):
    """A network of small random weights, its settings and its units."""
    build, settings, _ = FAMILIES[family]
    config = settings(embedding_size=32, hidden=(48, 32))
    network = random_network(build, features, config)
    return network, config, PruningGroups(network, features, config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_network_is_the_one_whose_units_give_zeros(family, features, rows):
    network, config, units = made(family, features)
    assert units.groups.keys() >= FAMILIES[family][2]
    scores = importances(network, units, [rows], "taylor")
    assert (scores >= 0).all() and scores.any()
    widths = {name: group.shape[1] - 16 for name, group in units.groups.items()}
    gone = np.concatenate(
        [row[np.argsort(scores[row], kind="stable")[:16]] for group in units.groups.values() for row in group]
    )
    smaller = units.pruned(network, features, units.config(config, widths), gone)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in network.parameters())
    whole = results(network, rows)[0]
    for path, numbers in units.outputs.items():
        kept = torch.from_numpy(~np.isin(numbers.ravel(), gone)).float()
        network.get_submodule(path).register_forward_hook(lambda module, inputs, out, kept=kept: out * kept)
    zeroed, cut = results(network, rows)[0], results(smaller, rows)[0]
    np.testing.assert_allclose(cut, zeroed, rtol=1e-4, atol=1e-5)
    assert np.abs(cut - whole).max() > 1e-3  # what went mattered


def test_the_units_that_matter_least_are_those_whose_loss_changes_least(features, rows):
    """First-order Taylor beside what the loss does when a unit gives nearly nothing."""
    network, config, units = made("deepfm", features)
    (sets,) = (units.groups["deep.0"],)
    scores = importances(network, units, [rows], "taylor")[sets[0]]
    dead = network.get_submodule("deep.0")
    with torch.no_grad():
        dead.bias[:4] = -1e3
    after = importances(network, units, [rows], "taylor")[sets[0]]
    assert scores[:4].all() and not after[:4].any()
    shown = importances(network, units, [rows], "activation")[sets[0]]
    assert not config.qat and (shown[4:] > 0).any()


def test_a_group_of_another_name_is_refused(start, log, tmp_path):
    path = tmp_path / "compress.json"
    path.write_text(
        json.dumps({"epochs": 1, "strategies": [{"kind": "prune", "from": 0, "goal": "ratio=.3", "layers": ["head*"]}]})
    )
    with pytest.raises(RequestError, match=r"found no layers head\* that can be cut; there are embeddings, deep\.0"):
        zoo.finetune(start, log, tmp_path / "out", strategy=path, settings=dict(SETTINGS))


def test_from_the_command_line(start, log, tmp_path):
    out = tmp_path / "out"
    options = [option for name, value in SETTINGS.items() for option in ("--set", f"{name}={value}")]
    command = ["finetune", str(start), "--data", log, "-o", str(out), "--prune", "ratio=.4", "--epochs", "2"]
    cli.call([*command, "--drop", "1", *options])
    report = read_json(out / "compression.json")
    assert report["within"] and report["steps"][-1]["bytes"] < report["base"]["bytes"]
    sizes = read_json(out / "train.json")["config"]
    assert sizes["embedding_size"] + sum(sizes["hidden"]) <= 0.6 * (32 + 48 + 32)
    cli.call(["run", str(out), log, "-o", str(tmp_path / "scores.csv"), "--engine", "native"])
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 1501


@pytest.fixture(scope="module")
def whole(start, log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    (folder / "compress.json").write_text(json.dumps(STRATEGY))
    zoo.finetune(start, log, folder / "out", strategy=folder / "compress.json", settings=dict(SETTINGS))
    return folder


@pytest.mark.slow  # as that of rare rows
@pytest.mark.parametrize("steps", [5, 14, 24])
def test_interrupted_in_any_step_and_gone_on_it_leaves_the_same_bytes(whole, start, log, tmp_path, steps):
    log_of = read_json(whole / "out/compression.json")
    assert [step["step"] for step in log_of["steps"]] == ["1-prune-distil", "2-prune-distil", "3-distil-qat"]
    options = {"strategy": whole / "compress.json", "settings": dict(SETTINGS)}
    broken_off(Trainer, steps, lambda: zoo.finetune(start, log, tmp_path / "out", **options))
    zoo.finetune(start, log, tmp_path / "out", resume=True, **options)
    for name in ("3-distil-qat/model.pt", "2-prune-distil.cut/sensitivity.json"):
        assert (tmp_path / "out/checkpoint" / name).read_bytes() == (whole / "out/checkpoint" / name).read_bytes()


def test_other_data_end_what_was_begun(start, log, tmp_path):
    fewer = tmp_path / "fewer.csv"
    fewer.write_text("".join(Path(log).read_text().splitlines(keepends=True)[:-9]))
    out = tmp_path / "out"

    def gone_on(data, **options):
        zoo.finetune(start, str(data), out, prune="ratio=.3", settings=SETTINGS | {"epochs": "1"}, **options)

    broken_off(Trainer, 0, lambda: gone_on(log))
    with pytest.raises(RequestError, match="made with other data; resume with the same"):
        gone_on(fewer, resume=True)
    broken_off(Trainer, 0, lambda: gone_on(log, resume=True))
    kept = out / "checkpoint/compression.json"
    write_json(kept, {name: value for name, value in read_json(kept).items() if name != "data"})
    broken_off(Trainer, 0, lambda: gone_on(fewer, resume=True))  # a log of former versions does not tell


def test_what_cannot_begin_leaves_no_folder(start, log, tmp_path):
    for place in (tmp_path / "new", tmp_path):
        with pytest.raises(RequestError, match=r"found no file .*none\.csv"):
            zoo.finetune(start, str(tmp_path / "none.csv"), place, prune="ratio=.3", settings=dict(SETTINGS))
    assert list(tmp_path.iterdir()) == []


def test_a_log_shorter_than_what_is_held_out(start, log):
    from zoo.recommenders.models.deepfm import DeepFMConfig as Settings

    with pytest.raises(RequestError, match=r"found 1,500 rows, expected more than the 2,000 to hold out"):
        PrunableRecommender(zoo.load(start), log, config=Settings(held_out=2000))
