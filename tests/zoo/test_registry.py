"""Families by name: former names, and the defaults that a family has for the form of its data."""

import json
import random

import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, sha256, write_json
from pipelines.models.family import Trainable
from pipelines.models.hub import CARD
from zoo.cli import app as cli
from zoo.recommenders.criteo import LABEL, category, logarithm
from zoo.recommenders.data.schema import Column, Schema
from zoo.recommenders.family import RECIPE
from zoo.recommenders.models.wide_deep import WIDE_DEEP, CriteoConfig, WideDeepConfig

SETTINGS = {"epochs": "1", "hidden": "8", "embedding_size": "4", "refit": "false", "l2_embeddings": "10"}
HEADERLESS = Schema((LABEL, logarithm("I1", 0.0, 1.0), category("C1", 50)), header=False)
WITH_HEADER = Schema((Column("click", "label"), category("user", 50)))


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A log with a header."""
    drawn, path = random.Random(0), tmp_path_factory.mktemp("log") / "log.csv"
    rows = [(drawn.randrange(40), drawn.randrange(18, 70)) for _ in range(600)]
    lines = [f"u{user},{age},{int(drawn.random() < (0.2, 0.7)[user % 2])}" for user, age in rows]
    path.write_text("\n".join(["user,age,click", *lines]) + "\n")
    return path


def test_former_names_lead_to_families_of_today():
    assert zoo.entry("wide-deep-log") is zoo.entry("wide-deep") and "wide-deep-log" not in zoo.entries()


def test_an_unknown_family_names_the_nearest():
    with pytest.raises(
        RequestError, match="unknown model family 'deepfmm'; did you mean 'deepfm'. choose one of wide-"
    ):
        zoo.entry("deepfmm")


def test_a_family_trains_by_its_former_name(log, tmp_path):
    pytest.importorskip("torch", reason="needs the train extra")
    options = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    for name in ("wide-deep-log", "wide-deep"):
        cli.call(["train", name, "--data", str(log), "-o", str(tmp_path / name), *options])
        assert read_json(tmp_path / name / CARD)["entry"] == "wide-deep"
    one, other = (sha256(tmp_path / name / "model.pt") for name in ("wide-deep-log", "wide-deep"))
    assert one == other


def test_folders_and_plans_of_a_former_name_are_opened_run_and_trained_on(log, tmp_path, capsys):
    pytest.importorskip("torch", reason="needs the train extra")
    folder = tmp_path / "model"
    zoo.train("wide-deep", str(log), folder, settings=SETTINGS)
    zoo.build(folder)
    plan = zoo.plan(folder, engines=["onnxruntime"], batch_sizes=[16], data=log)["path"]
    zoo.run(folder, str(log), tmp_path / "scores.csv", engine="onnxruntime")
    write_json(folder / CARD, read_json(folder / CARD) | {"entry": "wide-deep-log"})
    assert {*zoo.build(folder)["stages"].values()} == {"kept"}
    zoo.run(folder, str(log), tmp_path / "again.csv", engine="onnxruntime")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "scores.csv").read_bytes()
    assert zoo.open_plan(plan) is not None
    assert zoo.load(folder).recipe == RECIPE
    capsys.readouterr()
    cli.call(["info", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["entry"] == "wide-deep-log"
    zoo.finetune(folder, str(log), tmp_path / "tuned", settings={"epochs": "1", "refit": "false"})
    assert read_json(tmp_path / "tuned" / CARD)["entry"] == "wide-deep"


def test_wide_deep_has_the_defaults_of_the_form_of_its_data(log, tmp_path):
    rows = tmp_path / "rows.tsv"
    rows.write_text("1\t" * 13 + "0\t" + "a\t" * 25 + "a\n")
    HEADERLESS.save(tmp_path / "headerless.json")
    WITH_HEADER.save(tmp_path / "schema.json")
    headerless = ((rows,), (log, "criteo"), (log, HEADERLESS), (log, tmp_path / "headerless.json"))
    named = ((log,), (rows, None, "click"), (rows, WITH_HEADER), (rows, tmp_path / "schema.json"))
    for form, expected in ((headerless, CriteoConfig()), (named, WideDeepConfig())):
        assert all(WIDE_DEEP.for_data(*arguments).train_config() == expected for arguments in form)
    assert zoo.entry("deepfm").for_data(rows) is zoo.entry("deepfm")
    image_family = zoo.entry("resnet50")
    assert isinstance(image_family, Trainable) and image_family.for_data(rows) is image_family


def test_models_have_the_defaults_of_the_form_of_their_rows():
    former = {"hash": "farmhash fingerprint64 mod buckets"}
    unscaled = Schema((LABEL, Column("I1", "number", encoding={"type": "value"}), category("C1", 50)), header=False)
    passes = {}
    for name, preprocessing, expected in (
        ("headerless", {"schema": HEADERLESS.to_json()}, (0, CriteoConfig, 0.15)),
        ("unscaled", {"schema": unscaled.to_json()}, (0, CriteoConfig, 0.15)),
        ("of 0.2.0", former, (0, CriteoConfig, 0.15)),
        ("with a header", {"schema": WITH_HEADER.to_json()}, (RECIPE.bound, WideDeepConfig, 0.1)),
        ("damaged", {"schema": 5}, (RECIPE.bound, WideDeepConfig, 0.1)),
    ):
        family = WIDE_DEEP.for_model(preprocessing)
        config = family.finetune_config()
        assert (family.recipe.bound, type(config), config.held_out) == expected, name
        assert family.for_model(preprocessing) == family and family.name == "wide-deep"
        if name in ("headerless", "unscaled", "with a header"):
            passes[name] = [type(rewrite).__name__ for rewrite in family.passes(preprocessing)]
    assert "EqualizeConcat" in passes["headerless"] and "SplitNumbers" not in passes["headerless"]
    assert passes["unscaled"] == passes["with a header"] != passes["headerless"]
    shipped = zoo.load("wide-deep-criteo")
    assert not shipped.entry.recipe.bound and isinstance(shipped.entry.finetune_config(), CriteoConfig)
