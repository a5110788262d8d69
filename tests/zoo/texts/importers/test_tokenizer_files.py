"""Tokenizers of older models, which have a vocabulary but no tokenizer.json."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models  # noqa: E402
from huggingface_hub.utils import filter_repo_objects  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from zoo.texts.importers import huggingface  # noqa: E402

TEXTS = ["The cat sat, and SAT.", "a", "Zebra? é the🙂"]
LETTERS = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]


def write(folder, files, task="AutoModel", **options):
    """A random network of 64 tokens whose tokenizer consists of `files`; returns the network."""
    torch.manual_seed(0)
    sizes = {**text_models.USUAL, "max_position_embeddings": 80, "vocab_size": 64}
    network = getattr(transformers, task).from_config(transformers.AutoConfig.for_model(**{**sizes, **options})).eval()
    text_models.randomize(network)
    network.save_pretrained(folder)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return network


def wordpieces():
    vocabulary = sorted(text_models.tokenizer().get_vocab().items(), key=lambda item: item[1])
    settings = {"do_lower_case": True, "model_max_length": 70}
    return {"vocab.txt": "\n".join(word for word, _ in vocabulary), "tokenizer_config.json": settings}


def byte_pairs():
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    names = [*special, *"abcdehnorstuz", "Ġ", "th", "the", "Ġthe"]
    merges = "#version: 0.2\nt h\nth e\nĠ the\n"
    numbers = {name: number for number, name in enumerate([*names, *(f"<{i}>" for i in range(64 - len(names)))])}
    return {"vocab.json": numbers, "merges.txt": merges, "tokenizer_config.json": {"model_max_length": 70}}


@pytest.mark.parametrize(("kind", "files"), [("bert", wordpieces()), ("roberta", byte_pairs())])
def test_a_vocabulary_is_converted_as_transformers_does(tmp_path, kind, files):
    theirs = tmp_path / "theirs"
    network = write(theirs, files, model_type=kind, pad_token_id=int(kind == "roberta"))
    names = [file.name for file in theirs.iterdir()]
    assert sorted(filter_repo_objects(names, allow_patterns=huggingface.PATTERNS)) == sorted(names)
    zoo.import_model(theirs, tmp_path / "ours", pooling="mean")
    assert sorted(file.name for file in theirs.iterdir()) == sorted(names)
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    with torch.no_grad():
        inputs = [tokenizer(text, return_tensors="pt", return_token_type_ids=False) for text in TEXTS]
        expected = [network(**values).last_hidden_state[0].mean(0).numpy() for values in inputs]
    assert np.abs(vectors - np.stack(expected)).max() < 1e-5
    assert zoo.info(tmp_path / "ours")["preprocessing"]["max_length"] == 70


def test_masks_of_a_tokenizer_are_those_of_its_class(tmp_path):
    write(tmp_path / "theirs", wordpieces(), "AutoModelForMaskedLM", model_type="bert")
    made = text_models.tokenizer()
    made.add_special_tokens(text_models.SPECIAL)
    made.save(str(tmp_path / "theirs" / "tokenizer.json"))
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    assert len(zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")(["the [MASK] sat"])[0]) == 5


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "there is no tokenizer.json, nor an older vocabulary"),
        ({"vocab.json": "{", "merges.txt": ""}, "cannot convert the tokenizer of .*theirs to tokenizer.json"),
    ],
)
def test_folders_without_a_vocabulary_are_named(tmp_path, files, expected):
    write(tmp_path / "theirs", files, model_type="roberta")
    with pytest.raises(RequestError, match=expected):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours", pooling="mean")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("name", ["tf_model.h5", "onnx/model.onnx"])
def test_weights_that_are_not_read_are_named(tmp_path, name):
    write(tmp_path, wordpieces(), model_type="bert")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(RequestError, match=f"there is no model.safetensors, .* but {name}, which is not read"):
        zoo.import_model(tmp_path, tmp_path / "ours", pooling="mean")


def test_letters_of_proteins(tmp_path):
    theirs = tmp_path / "theirs"
    files = {"vocab.txt": "\n".join(LETTERS), "tokenizer_config.json": {"tokenizer_class": "EsmTokenizer"}}
    rotary = {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 32, "vocab_size": 33}
    sizes = {"pad_token_id": 1, "max_position_embeddings": 1026}
    network = write(theirs, files, "AutoModelForMaskedLM", model_type="esm", **rotary, **sizes)
    with pytest.raises(RequestError, match="masks change the embeddings of all tokens of a text"):
        zoo.import_model(theirs, tmp_path / "ours")
    zoo.import_model(theirs, tmp_path / "ours", format="sentence-transformers", pooling="mean")
    opened, tokenizer = (
        zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime"),
        transformers.EsmTokenizer(theirs / "vocab.txt"),
    )
    for text in ("MKTVRQERLKSIVRILERSKE", "M", "mkt MK<unk>Jx", "MK<eos>TV 🙂"):
        with torch.no_grad():
            hidden = network.esm(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        assert np.abs(opened.compute_texts([(text,)])[0] - hidden.mean(0).numpy()).max() < 1e-5
