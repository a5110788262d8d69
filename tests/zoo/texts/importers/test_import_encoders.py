"""Folders of sentence-transformers and transformers as they lie in public repositories."""

import itertools
import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models  # noqa: E402
from helpers.text_models import PAIRS, TEXTS  # noqa: E402
from helpers.tiers import one_in  # noqa: E402
from huggingface_hub.utils import filter_repo_objects  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from zoo.texts.importers import huggingface  # noqa: E402
from zoo.texts.importers.huggingface import importer  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "theirs").mkdir()
    return tmp_path / "theirs"


def check(folder, model, pooling="mean", normalize=True, labels=0, pooled=""):
    """The imported folder computes what its model does. pooled: option --pooling of the import."""
    zoo.import_model(folder, folder.parent / "ours", **({"pooling": pooled} if pooled else {}))
    texts = PAIRS if labels else TEXTS
    opened = zoo.pipeline(folder.parent / "ours", "fp32", "onnxruntime")
    outputs = opened.compute_texts(texts if labels else [(text,) for text in texts])
    wanted = text_models.expected(model, texts, pooling, normalize)
    assert np.abs(outputs - wanted).max() < 1e-5 * max(np.abs(wanted).max(), 1)


@pytest.mark.parametrize(("kind", "labels"), one_in(3, itertools.product(text_models.MORE_CONFIGS, (0, 1))))
def test_networks_of_the_shape_of_bert_are_imported(folder, kind, labels):
    check(folder, text_models.write(folder, kind, labels), labels=labels)
    data = folder.parent / "data.tsv"
    data.write_text("\n".join("\t".join(pair) if labels else pair[0] for pair in PAIRS * 10))
    zoo.calibrate(folder.parent / "ours", str(data), samples=8)
    texts = PAIRS if labels else [(text,) for text in TEXTS]
    exact, int8 = (zoo.pipeline(folder.parent / "ours", name).compute_texts(texts) for name in ("fp32", "int8"))
    assert np.abs(int8 - exact).max() < 0.2


def from_the_hub(folder):
    """Removes the files that are not downloaded from a hub."""
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    for name in {*names} - {*filter_repo_objects(names, allow_patterns=huggingface.PATTERNS)}:
        (folder / name).unlink()


@pytest.mark.parametrize("pickled", [False, True])
def test_weights_of_several_files(folder, pickled):
    model = text_models.write(folder)
    (folder / "model.safetensors").unlink()
    if pickled:
        parts, index = list(model.state_dict().items()), {}
        for i in (0, 1):
            torch.save(dict(parts[i::2]), folder / f"pytorch_model-{i}.bin")
            index |= {name: f"pytorch_model-{i}.bin" for name, _ in parts[i::2]}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        model.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("*model-*")]) > 1
    from_the_hub(folder)
    check(folder, model)
    next(folder.glob("*model-*")).unlink()
    with pytest.raises(RequestError, match="model.*index.json names"):
        zoo.import_model(folder, folder.parent / "less")


def test_the_layout_of_the_first_sentence_transformers(folder):
    model = text_models.write(folder)
    (folder / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.move(folder / name, folder / "0_Transformer" / name)
    (folder / "0_Transformer/sentence_bert_config.json").write_text('{"max_seq_length": 45}')
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config.json").write_text('{"__version__": "0.3.1"}')
    from_the_hub(folder)
    check(folder, model)
    assert zoo.info(folder.parent / "ours")["preprocessing"]["max_length"] == 45


def test_a_tokenizer_with_fewer_tokens_than_the_table_has_rows(folder):
    model = text_models.write(folder, vocab_size=128)
    check(folder, model)
    text_models.write(folder.parent, vocab_size=256)
    with pytest.raises(RequestError, match="is of another model: it has 64 tokens"):
        zoo.import_model(folder.parent, folder.parent / "other")


def test_of_several_poolings_the_last_makes_the_embedding(folder):
    model = text_models.write(folder, pooling="cls", normalize=False)
    listed = json.loads((folder / "modules.json").read_text())
    for i, (mode, more) in enumerate((("mean_tokens", {}), ("max_tokens", {"output_key": "query_embedding"})), 2):
        (folder / f"{i}_Pooling").mkdir()
        (folder / f"{i}_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True, **more}))
        listed.append(
            {"idx": i, "name": str(i), "path": f"{i}_Pooling", "type": "sentence_transformers.models.Pooling"}
        )
    (folder / "modules.json").write_text(json.dumps(listed))
    check(folder, model, "mean", False)


def test_keys_that_a_configuration_leaves_out_have_the_defaults_of_transformers(folder):
    model = text_models.write(folder, intermediate_size=3072, num_attention_heads=12, hidden_size=48)
    config = json.loads((folder / "config.json").read_text())
    for key in ("intermediate_size", "num_attention_heads", "type_vocab_size", "hidden_act", "layer_norm_eps"):
        config.pop(key)
    (folder / "config.json").write_text(json.dumps(config))
    check(folder, model)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("BertLMHeadModel", "it generates text"),
        ("BertForMultipleChoice", "it chooses among answers"),
    ],
)
def test_networks_with_other_heads_are_named(folder, name, what):
    text_models.write(folder)
    shutil.rmtree(folder / "1_Pooling")
    (folder / "modules.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    for options in ({}, {"pooling": "mean"}):
        with pytest.raises(RequestError, match=f"found {name}, expected an encoder, or one with a head .*: {what}"):
            zoo.import_model(folder, folder.parent / "ours", **options)
    assert not (folder.parent / "ours").exists()


def test_an_unknown_architecture_is_read_by_its_model_type_for_a_named_pooling(folder):
    """As AutoModel does, such as Contriever."""
    model = text_models.write(folder)
    shutil.rmtree(folder / "1_Pooling")
    (folder / "modules.json").unlink()
    change(folder / "config.json", architectures=["Contriever"])
    with pytest.raises(RequestError, match="found Contriever, .*; --pooling reads it as bert"):
        zoo.import_model(folder, folder.parent / "ours")
    check(folder, model, normalize=False, pooled="mean")
    change(folder / "config.json", auto_map={"AutoModel": "modeling.Contriever"})
    with pytest.raises(RequestError, match="found Contriever, .*: the architecture is not supported$"):
        zoo.import_model(folder, folder.parent / "other", pooling="mean")


def test_encoders_of_dpr_are_bert(folder):
    import transformers

    config = transformers.DPRConfig(**text_models.USUAL)
    model = transformers.DPRQuestionEncoder(config).eval()
    text_models.randomize(model)
    text_models.save(folder, model)
    with pytest.raises(RequestError, match="name it with --pooling"):
        zoo.import_model(folder, folder.parent / "ours")
    check(folder, model.question_encoder.bert_model, "cls", normalize=False, pooled="cls")
    change(folder / "config.json", projection_dim=8)
    with pytest.raises(RequestError, match="its projection_dim is 8; expected 0"):
        zoo.import_model(folder, folder.parent / "other", pooling="cls")


def change(path, **values):
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | values))


def vectors(folder, texts):
    shutil.rmtree(folder.parent / "ours", ignore_errors=True)
    zoo.import_model(folder, folder.parent / "ours")
    return zoo.pipeline(folder.parent / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in texts])


TRUNCATED = {"direction": "Left", "max_length": 40, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize(
    ("name", "values"),
    [("tokenizer_config.json", {"truncation_side": "left"}), ("tokenizer.json", {"truncation": TRUNCATED})],
)
def test_texts_are_truncated_at_the_side_of_the_tokenizer(folder, name, values):
    text_models.write(folder)
    letters = "abcdefghijklmnopqrstuvwxyz" * 400 + "zqj"  # more characters than are looked at for the first tokens
    first, last = (" ".join(part) for part in (letters[:78], letters[-78:]))
    embeddings = vectors(folder, [" ".join(letters), first, last])
    assert (embeddings[0] == embeddings[1]).all() and (embeddings[0] != embeddings[2]).any()
    change(folder / name, **values)
    embeddings = vectors(folder, [" ".join(letters), first, last])
    assert (embeddings[0] == embeddings[2]).all() and (embeddings[0] != embeddings[1]).any()


@pytest.mark.parametrize(("kind", "same"), [("BertTokenizer", False), ("PreTrainedTokenizerFast", True)])
def test_normalization_of_the_configuration_of_a_tokenizer_of_bert(folder, kind, same):
    text_models.write(folder)
    change(folder / "tokenizer_config.json", tokenizer_class=kind, do_lower_case=False)
    embeddings = vectors(folder, ["the cat", "THE cat"])
    assert (embeddings[0] == embeddings[1]).all() == same


@pytest.mark.parametrize("name", ["swish", "gelu_python", "gelu_fast"])
def test_other_names_of_activations(folder, name):
    text_models.write(folder)
    change(folder / "config.json", hidden_act=name, position_embedding_type=None)
    activation = {"swish": "silu", "gelu_python": "gelu", "gelu_fast": "gelu_new"}[name]
    embeddings = vectors(folder, TEXTS)
    change(folder / "config.json", hidden_act=activation)
    assert (vectors(folder, TEXTS) == embeddings).all()


SETTINGS = "config_sentence_transformers.json"
MODULE = "sentence_transformers.models."


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("config.json", {"is_decoder": True}, "it is a decoder (is_decoder in config.json)"),
        (SETTINGS, {"truncate_dim": 0}, "its truncate_dim is 0 (config_sentence_transformers.json)"),
        (SETTINGS, {"truncate_dim": 99}, "embeddings are truncated to 99 components; expected at most their 32"),
        (SETTINGS, {"prompts": {"query": "q: "}, "default_prompt_name": "nope"}, "its default prompt is 'nope'"),
        (SETTINGS, {"prompts": {"query": ["q"]}}, "its prompts are {'query': ['q']}"),
        (SETTINGS, {"prompts": "q"}, "its prompts are 'q'"),
    ],
)
def test_settings_that_would_change_the_embeddings_are_refused(folder, name, values, found):
    text_models.write(folder)
    change(folder / name, **values)
    with pytest.raises(RequestError) as error:
        zoo.import_model(folder, folder.parent / "ours")
    assert found in str(error.value) and "expected" in str(error.value)
    assert not (folder.parent / "ours").exists()


def test_a_normalization_before_the_pooling_is_refused(folder):
    text_models.write(folder)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[0], modules[2], modules[1]]))
    with pytest.raises(RequestError, match="Normalize is before Pooling"):
        zoo.import_model(folder, folder.parent / "ours")


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_networks_that_generate_text_are_left_to_translation(tmp_path, kind):
    names = {"bart": "BartForConditionalGeneration", "t5": "T5ForConditionalGeneration"}
    content = {"model_type": kind, "architectures": [names[kind]], "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert importer(None).recognize(tmp_path) == ""


def test_weights_that_are_not_finite_or_cut_short_are_named(folder):
    from safetensors.numpy import load_file, save_file

    text_models.write(folder)
    file, name = folder / "model.safetensors", "encoder.layer.1.output.dense.weight"
    save_file({**(tensors := load_file(file)), name: tensors[name] * np.float32("nan")}, file)
    with pytest.raises(RequestError, match=f"theirs has {name} with NaN or infinity, expected finite weights"):
        zoo.import_model(folder, folder.parent / "ours")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(RequestError, match=r"cannot read the weights in .*theirs/model\.safetensors"):
        zoo.import_model(folder, folder.parent / "ours")
    assert not (folder.parent / "ours").exists()


def test_weights_of_more_layers_than_the_configuration_has_are_told(folder, caplog):
    text_models.write(folder)
    zoo.import_model(folder, folder.parent / "whole")
    assert "more layers" not in caplog.text
    change(folder / "config.json", num_hidden_layers=1)
    zoo.import_model(folder, folder.parent / "ours")
    assert "has weights of more layers than the 1 of its configuration" in caplog.text


def test_a_pooling_without_its_keys_is_the_mean(folder):
    """As in sentence-transformers, whose default `pooling_mode_mean_tokens` is."""
    model = text_models.write(folder)
    (folder / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 32}')
    check(folder, model)


def test_a_configuration_without_a_model_type_is_named(folder):
    text_models.write(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="cannot be imported: config.json has no model_type"):
        zoo.import_model(folder, folder.parent / "ours")


def test_weights_that_the_network_lacks_are_told_and_norms_refused(tmp_path, caplog):
    from safetensors.numpy import load_file, save_file

    (tmp_path / "theirs").mkdir()
    text_models.write(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    tensors, row = load_file(path), np.ones(32, np.float32)
    tensors["encoder.layer.1.attention.self.position_ids"] = row  # a buffer
    save_file(tensors, path)
    zoo.import_model(tmp_path / "theirs", tmp_path / "plain")
    assert "lacks" not in caplog.text
    save_file({**tensors, "encoder.layer.1.adapter.weight": row}, path)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    assert "has 1 weights that a network bert lacks: encoder.layer.1.adapter.weight" in caplog.text
    save_file({**tensors, "encoder.layer.0.attention.self.layer_norm_q.weight": row}, path)
    with pytest.raises(RequestError, match=r"layer.0.attention.self.layer_norm_q.weight, expected no such norm"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "other")


def test_pickled_classifiers_of_setfit_are_told_and_not_read(folder, caplog):
    model = text_models.write(folder)
    (folder / huggingface.PICKLED_HEAD).write_bytes(b"no pickle")
    from_the_hub(folder)
    check(folder, model)
    assert f"theirs has a classifier in {huggingface.PICKLED_HEAD}, which is pickled and not imported" in caplog.text
    assert not (folder.parent / "ours" / huggingface.PICKLED_HEAD).exists()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_tokenizers_without_a_file_are_named(folder, name):
    text_models.write(folder)
    (folder / "tokenizer.json").unlink()
    content = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    (folder / name).write_text(json.dumps({**content, "tokenizer_class": "PhobertTokenizer"}))
    with pytest.raises(RequestError, match="its PhobertTokenizer is written in Python, and has no tokenizer.json"):
        zoo.import_model(folder, folder.parent / "ours")
