"""Labels of pairs to train on, prompts, and folders of encoders that have no network here."""

import json

import numpy as np
import pytest

train = pytest.importorskip("zoo.texts.training.train", reason="needs the train extra", exc_type=ImportError)
torch = pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="needs the train extra")
from helpers import text_models, text_networks  # noqa: E402
from helpers.tiers import one_in  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from zoo.texts.models.config import ModelConfig, Rotary  # noqa: E402
from zoo.texts.train_config import TrainConfig  # noqa: E402
from zoo.texts.training import networks  # noqa: E402

read_pairs = train.read_pairs


def pairs(tmp_path, *labels: str):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"one {i}\ttwo {i}\t{label}\n" for i, label in enumerate(labels)))
    return str(path)


@pytest.mark.parametrize(
    ("classes", "label", "told"),
    [
        (2, "2", "pairs.tsv:3 has the label 2, expected a whole number from 0 to 1"),
        (2, ".7", "has the label 0.7, expected a whole number"),
        (1, "-3", "has the label -3, expected a number of 0 or more"),
        (0, "inf", "has the label inf, expected a finite number"),
    ],
)
def test_labels_that_no_loss_takes_are_named(tmp_path, classes, label, told):
    with pytest.raises(RequestError) as error:
        read_pairs(pairs(tmp_path, "0", "1", label), classes, "raise")
    assert told.removeprefix("pairs.tsv:3 ") in str(error.value)
    kept, labels = read_pairs(pairs(tmp_path, "0", label, "1"), classes, "skip")
    assert len(kept) == 2 and labels.tolist() == [0, 1]


@pytest.mark.parametrize("classes", [0, 1])
def test_a_label_that_is_none_in_the_first_row_is_named(tmp_path, classes):
    """Pairs with labels are never taken for matching ones."""
    path = pairs(tmp_path, "gold", "1", "0")
    with pytest.raises(RequestError, match="1 has the label 'gold', expected a number"):
        read_pairs(path, classes, "raise")
    kept, labels = read_pairs(path, classes, "skip")
    assert len(kept) == 2 and labels.tolist() == [1, 0]
    with pytest.raises(RequestError, match="found no pairs in .*has the label 'gold'"):
        read_pairs(pairs(tmp_path, "gold", "gold"), classes, "skip")


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl", ".txt"])
def test_pairs_without_a_third_column_have_no_labels(tmp_path, suffix):
    path = tmp_path / f"pairs{suffix}"
    lines = [("a", "b"), ("c", "d")]
    mark = "," if suffix == ".csv" else "\t"
    text = "".join(f"{mark.join(pair)}\n" for pair in lines)
    path.write_text(
        "".join(json.dumps({"query": q, "answer": a}) + "\n" for q, a in lines) if suffix == ".jsonl" else text
    )
    assert read_pairs(str(path), 0, "raise") == (lines, None)
    if suffix != ".jsonl":
        path.write_text(f"\n{text}")
        assert read_pairs(str(path), 0, "skip") == (lines, None)


def test_a_cosine_may_be_negative(tmp_path):
    assert read_pairs(pairs(tmp_path, "-1", "1"), 0, "raise")[1].tolist() == [-1, 1]


def test_an_epoch_of_5000_pairs_leaves_checkpoints():
    assert 5000 // TrainConfig().batch_size >= 4 * TrainConfig().checkpoint_steps


@pytest.mark.parametrize(
    ("kind", "why"),
    [("bart", "expected BartForSequenceClassification"), ("longformer", "longformer, which is not supported")],
)
def test_encoders_without_a_network_here_are_refused_by_name(tmp_path, kind, why):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": kind, "architectures": ["SomeModel"]}))
    (tmp_path / "model/modules.json").write_text("[]")
    with pytest.raises(RequestError, match=why):
        zoo.import_model(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [("", "the the"), (",", "a a"), ("query,passage", "the a"), ("query,document", "the a"), ("query", "the the")],
)
def test_fine_tuning_trains_and_calibrates_with_the_prompts_of_inference(tmp_path, monkeypatch, prompts, expected):
    text_models = pytest.importorskip("helpers.text_models", reason="needs the test extra", exc_type=ImportError)
    begin = {prompt: text_models.tokenizer().encode(prompt).ids[:2] for prompt in ("the", "a")}
    (tmp_path / "theirs").mkdir()
    text_models.write(tmp_path / "theirs")
    text_models.prompted(tmp_path / "theirs")
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "pairs.tsv").write_text("a cat\ta zoo\n" * 4)
    seen = []
    monkeypatch.setattr(train._Trainer, "fit", lambda self, pairs, *_: seen.append(self._inputs(pairs[0])) or 0.0)
    settings = {"batch_size": "4", "prompts": prompts}
    zoo.finetune(tmp_path / "ours", str(tmp_path / "pairs.tsv"), tmp_path / "tuned", settings=settings)
    assert seen[0]["input_ids"][:, :2].tolist() == [begin[prompt] for prompt in expected.split()]
    first = begin[expected.split()[0]]
    assert np.load(tmp_path / "tuned" / "calibration.npz")["input_ids"][0, :2].tolist() == first
    with pytest.raises(RequestError, match="found no prompt qurey; the model has query, passage, document"):
        zoo.finetune(
            tmp_path / "ours", str(tmp_path / "pairs.tsv"), tmp_path / "x", settings={**settings, "prompts": "qurey"}
        )
    zoo.import_model(tmp_path / "tuned", tmp_path / "again")
    assert zoo.pipeline(tmp_path / "again", "fp32").prompt == "the "


DENSE = {"in_features": 32, "out_features": 24, "activation_function": "torch.nn.modules.activation.Tanh"}
WIDE = {
    "in_features": 24,
    "out_features": 40,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
}
NETWORKS = {
    "qwen3": [("Pooling", {"pooling_mode_lasttoken": True})],
    "modernbert": [("Pooling", {"pooling_mode": ["mean", "weightedmean", "mean_sqrt_len_tokens"]})],
    "nomic_bert": [("Pooling", {"pooling_mode_mean_tokens": True})],
    "gte": [
        ("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}),
        ("Dense", DENSE),
        ("Dense", WIDE),
        ("Normalize", {}),
    ],
    "stella": [("Pooling", {"pooling_mode_mean_tokens": True}), ("Dense", DENSE)],
    "t5": [("Pooling", {"pooling_mode_mean_tokens": True})],
}
CLASSES = {"nomic_bert": "NomicBertModel", "gte": "GteModel"}  # of transformers, instead of custom code


@pytest.mark.parametrize("kind", one_in(2, NETWORKS))
def test_newer_networks_and_poolings_are_fine_tuned(tmp_path, kind):
    text_networks.write(tmp_path / "theirs", text_networks.CONFIGS[kind], NETWORKS[kind])
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a in text_models.TEXTS for b in text_models.TEXTS))
    settings = {"batch_size": "8", "epochs": "1", "learning_rate": "1e-9"}
    zoo.finetune(tmp_path / "ours", str(tmp_path / "pairs.tsv"), tmp_path / "tuned", settings=settings)
    texts = [(text,) for text in text_models.TEXTS]
    before, after = (
        zoo.pipeline(tmp_path / name, "fp32", "onnxruntime").compute_texts(texts) for name in ("ours", "tuned")
    )
    assert np.abs(after - before).max() < 1e-3 * np.abs(before).max()
    zoo.import_model(tmp_path / "tuned", tmp_path / "again")
    again = zoo.pipeline(tmp_path / "again", "fp32", "onnxruntime").compute_texts(texts)
    assert np.abs(again - after).max() < 1e-5 * np.abs(after).max()
    if kind in CLASSES:
        opened = transformers.AutoModel.from_pretrained(tmp_path / "tuned")
        assert type(opened).__name__ == CLASSES[kind]


def test_dense_layers_are_trained(tmp_path):
    theirs = tmp_path / "theirs"
    text_networks.write(
        theirs, text_networks.CONFIGS["albert"], [("Pooling", {"pooling_mode_mean_tokens": True}), ("Dense", DENSE)]
    )
    zoo.import_model(theirs, tmp_path / "ours")
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a in text_models.TEXTS for b in text_models.TEXTS))
    settings = {"batch_size": "8", "epochs": "1", "learning_rate": "1e-2"}
    zoo.finetune(tmp_path / "ours", str(tmp_path / "pairs.tsv"), tmp_path / "tuned", settings=settings)
    before, after = (load_file(tmp_path / name / "model.safetensors")["dense.0.weight"] for name in ("ours", "tuned"))
    assert not torch.equal(before, after)
    assert torch.equal(after, load_file(tmp_path / "tuned/2_Dense/model.safetensors")["linear.weight"])


@pytest.mark.parametrize(
    ("kind", "changes", "found"),
    [
        ("bert", {"auto_map": {"AutoModel": "code.Model"}}, "custom code"),
        ("jina_bert", {}, "the network jina_bert"),
        ("nomic_bert", {}, "a network nomic_bert with other biases"),
        ("jina_v3", {"lora_adaptations": ["separation"]}, "a network jina_v3 with adapters"),
    ],
)
def test_networks_that_transformers_lacks_are_not_fine_tuned(kind, changes, found):
    sizes = {"layers": 1, "width": 32, "heads": 4, "hidden": 8, "vocabulary": 9, "positions": 3}
    config = ModelConfig(kind, **sizes, rotary=Rotary(theta=10_000.0, size=8))
    with pytest.raises(RequestError, match=f"{found}.*cannot be fine-tuned"):
        networks.require_trainable(config, changes)
