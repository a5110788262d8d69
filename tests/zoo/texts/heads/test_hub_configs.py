"""Published configurations of classifiers, with fewer and smaller layers, beside transformers."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models  # noqa: E402

import zoo  # noqa: E402

CONFIGS = Path(os.environ.get("ZOO_SHARED", Path(__file__).parents[5] / "shared")) / "hub-configs"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 128,
}
CLASSIFIERS = (
    "distilbert__distilbert-base-uncased-finetuned-sst-2-english",
    "cardiffnlp__twitter-roberta-base-sentiment-latest",
    "nlptown__bert-base-multilingual-uncased-sentiment",
    "ProsusAI__finbert",
    "s-nlp__roberta_toxicity_classifier",
    "siebert__sentiment-roberta-large-english",
    "j-hartmann__emotion-english-distilroberta-base",
    "RTI__rota",
)
TAGGERS = ("dslim__bert-large-NER", "ModernBERT-token-classification")
pytestmark = pytest.mark.data


def imported(path, name, task):
    """(a folder imported from a random model of a published configuration, transformers' model and tokenizer)."""
    content = json.loads((CONFIGS / name / "config.json").read_text())
    kind = content.pop("model_type")
    content |= {key: value for key, value in SMALL.items() if key in content}
    special = {"pad": 0, "unk": 1, "cls": 2, "bos": 2, "sep": 3, "eos": 3, "mask": 4}
    large = {key for key in content if key.endswith("_token_id") and (content[key] or 0) >= SMALL["vocab_size"]}
    content |= {key: special[key.removesuffix("_token_id")] for key in large}
    model = getattr(transformers, task).from_config(transformers.AutoConfig.for_model(kind, **content)).float().eval()
    text_models.randomize(model)
    fast = text_models.save(path / "theirs", model)
    saved = path / "theirs" / "config.json"  # what transformers 5 leaves out, such as the architecture's name
    saved.write_text(json.dumps({**json.loads(saved.read_text()), **content}))
    zoo.import_model(path / "theirs", path / "ours")
    return zoo.pipeline(path / "ours", "fp32", "onnxruntime"), model, fast


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_labels_of_published_classifiers(tmp_path, name):
    ours, model, fast = imported(tmp_path, name, "AutoModelForSequenceClassification")
    assert ours.folder.entry.name == "text-classification"
    theirs = transformers.pipeline("text-classification", model=model, tokenizer=fast)
    for labels, wanted in zip(ours(text_models.TEXTS, top_k=None), theirs(text_models.TEXTS, top_k=None), strict=True):
        assert [label["label"] for label in labels] == [label["label"] for label in wanted]
        assert np.allclose([label["score"] for label in labels], [label["score"] for label in wanted], 0, 1e-5)


@pytest.mark.parametrize("name", TAGGERS)
def test_entities_of_published_taggers(tmp_path, name):
    ours, model, fast = imported(tmp_path, name, "AutoModelForTokenClassification")
    theirs = transformers.pipeline("token-classification", model=model, tokenizer=fast)
    for strategy in ("none", "simple", "first", "average", "max"):
        for entities, wanted in zip(
            ours(text_models.TEXTS, aggregation_strategy=strategy),
            theirs(text_models.TEXTS, aggregation_strategy=strategy),
            strict=True,
        ):
            assert [{**entity, "score": 0} for entity in entities] == [{**entity, "score": 0} for entity in wanted]
            assert np.allclose(
                [entity["score"] for entity in entities], [entity["score"] for entity in wanted], 0, 1e-5
            )
