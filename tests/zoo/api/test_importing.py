"""Imports of damaged folders: one line, exit code 2, and no folder."""

import base64
import json
import os

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
from helpers import text_models
from helpers.fake_hub import fake_hub
from safetensors.numpy import load_file, save_file

import zoo
from pipelines.core.errors import RequestError

WEIGHTS = "model.safetensors"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "theirs"
    path.mkdir()
    return path


def edited(name, change):
    """A function that edits a JSON file of a folder."""

    def edit(folder):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def configured(**options):
    return edited("config.json", lambda content: content.update(options))


def charsmap(content):
    """A normalizer of sentencepiece with this table."""
    table = base64.b64encode(content).decode()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": table}
    return edited("tokenizer.json", lambda tokenizer: tokenizer.update(normalizer=normalizer))


def overrun(folder):
    """A byte-pair merge of another prefix length than the vocabulary's: the library panics."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]], "continuing_subword_prefix": "##"}
    edited("tokenizer.json", lambda tokenizer: tokenizer.update(model=model))(folder)


def unknown_special(template):
    special = {"SpecialToken": {"id": "[NOPE]", "type_id": 0}}
    return edited("tokenizer.json", lambda tokenizer: tokenizer["post_processor"][template].insert(0, special))


def as_fifo(name):
    def replace(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return replace


def as_pointer(name):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    return lambda folder: (folder / name).write_text(text)


def renamed(name, other):
    return lambda folder: (folder / name).rename(folder / other)


def in_8_bits(folder):
    file = folder / WEIGHTS
    save_file({name: np.zeros(array.shape, np.int8) for name, array in load_file(file).items()}, file)


def pickled(change):
    """A function that replaces the weights of a folder by a pickled file."""

    def replace(folder):
        import torch

        torch.save(change({"a": torch.zeros(1)}), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()

    return replace


@pytest.mark.parametrize(
    ("damage", "labels", "message"),
    [
        (overrun, 0, r"cannot read .*tokenizer\.json"),
        (unknown_special("single"), 0, r"cannot read .*tokenizer\.json"),
        (unknown_special("pair"), 1, r"cannot read .*tokenizer\.json"),
        (charsmap(b"ab"), 0, r"cannot read .*tokenizer\.json"),
        (charsmap(b"\xff\xff\xff\xff" + bytes(60)), 0, r"cannot read .*tokenizer\.json"),
        (charsmap(b"\x10\0\0\0" + bytes(range(1, 60))), 0, r"cannot read .*tokenizer\.json"),
        (configured(layer_norm_eps="x"), 0, "could not convert string to float: 'x'"),
        (configured(layer_norm_eps=float("nan")), 0, "epsilon nan; expected a number from 0 to 1"),
        (configured(num_hidden_layers=10**9), 0, "layers 1000000000; expected a whole number from 1 to 1,000"),
        (configured(hidden_size=10**9, num_attention_heads=1), 0, "width 1000000000; expected a whole number"),
        (configured(pad_token_id="x", hidden_size="y"), 0, "'y'"),
        (configured(id2label={"x": "y"}), 2, "not as transformers writes it"),
        (configured(architectures=3), 0, "not as the toolkit writes them"),
        (configured(model_type=["bert"]), 0, r"the model type \['bert'\], which is not supported; supported: bert"),
        (configured(model_type=None), 0, "config.json has no model_type"),
        (configured(alibi_starting_size=512), 0, "no encoder.layer.0.attention.self.Wqkv.weight"),
        (configured(quantization_config={"quant_method": "gptq", "bits": 4}), 0, "are quantized .*'gptq'"),
        (as_pointer("model.safetensors"), 0, r"model\.safetensors, a pointer of Git LFS"),
        (as_pointer("config.json"), 0, r"config\.json, a pointer of Git LFS"),
        (in_8_bits, 0, "word_embeddings.weight is I8, expected F64"),
        (pickled(lambda state: {"state_dict": state}), 0, "pytorch_model.bin have state_dict, which is no tensor"),
        (pickled(lambda state: {"run": print}), 0, "objects other than tensors"),
        (renamed("model.safetensors", "adapter_model.safetensors"), 0, "but adapter_model.safetensors, which is not"),
        (edited("modules.json", lambda modules: modules[0].update(path="../x")), 0, r"names the folder \.\./x"),
        (as_fifo("modules.json"), 0, r"modules\.json, which is no regular file"),
        (as_fifo("model.safetensors"), 0, r"model\.safetensors, which is no regular file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), 0, "cannot read the weights"),
    ],
)
def test_a_damaged_folder_is_one_line_and_leaves_nothing(tmp_path, source, capfd, damage, labels, message):
    text_models.write(source, labels=labels)
    damage(source)
    capfd.readouterr()
    with pytest.raises(RequestError, match=message) as caught:
        zoo.import_model(source, tmp_path / "new" / "ours")
    assert "\n" not in str(caught.value) and ".ours-" not in str(caught.value)
    assert capfd.readouterr().err == ""  # no backtrace of the library
    assert list(tmp_path.iterdir()) == [source]


def test_a_failed_import_keeps_the_model_that_was_there(tmp_path, source):
    text_models.write(source)
    zoo.import_model(source, tmp_path / "ours")
    before = {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()}
    overrun(source)
    with pytest.raises(RequestError, match="damaged|cannot"):
        zoo.import_model(source, tmp_path / "ours", force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()} == before
    assert json.loads(before["card.json"])["name"] == "ours"


def test_the_tokenizer_is_written_without_blanks_and_that_of_the_hub_s_cache_is_linked(tmp_path, source):
    text_models.write(source)
    zoo.import_model(source, tmp_path / "ours")
    written, theirs = ((folder / "tokenizer.json").read_bytes() for folder in (tmp_path / "ours", source))
    assert len(written) < len(theirs) and json.loads(written) == json.loads(theirs)
    blob = tmp_path / "blobs" / "digest"
    blob.parent.mkdir()
    (source / "tokenizer.json").rename(blob)
    (source / "tokenizer.json").symlink_to(blob)
    zoo.import_model(source, tmp_path / "linked")
    assert (tmp_path / "linked" / "tokenizer.json").samefile(blob)


def test_an_import_with_force_replaces_no_folder_of_other_files(tmp_path, source):
    text_models.write(source)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "thesis.txt").write_text("mine")
    with pytest.raises(RequestError, match="in use"):
        zoo.import_model(source, tmp_path / "ours", force=True)
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["thesis.txt"]


def test_an_import_replaces_a_model_and_what_was_built_of_it(tmp_path, source):
    text_models.write(source)
    zoo.import_model(source, tmp_path / "ours")
    zoo.rewrite(tmp_path / "ours")
    for path in source.rglob("*.json"):
        path.unlink()
    for path in ("1_Pooling", "2_Normalize"):
        if (source / path).is_dir():
            (source / path).rmdir()
    text_models.write(source, seed=1)
    with pytest.raises(RequestError, match="ours in use, expected a new or empty folder.*--force"):
        zoo.import_model(source, tmp_path / "ours")
    assert (tmp_path / "ours" / "rewritten.onnx").is_file()
    zoo.import_model(source, tmp_path / "ours", force=True)
    assert not (tmp_path / "ours" / "rewritten.onnx").exists()
    assert zoo.load(tmp_path / "ours").ensure("rewritten.onnx").is_file()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with fake_hub(monkeypatch, tmp_path / "hub-cache") as fake:
        yield fake


def test_a_repository_of_transformers_is_imported_once(hub, source, caplog):
    text_models.write(source)
    commit = hub.add("theirs/bert", source).refs["main"]
    folder = zoo.load("hf://theirs/bert")
    assert "importing it into" in caplog.text and folder.path.is_relative_to(os.environ["ZOO_HOME"])
    assert folder.card.name == "bert" and folder.entry.name == "sentence-encoder"
    assert folder.card.details["base_model"] == {"repository": "theirs/bert", "commit": commit}
    caplog.clear()
    assert zoo.load("hf://theirs/bert@main").path == folder.path and not caplog.text
