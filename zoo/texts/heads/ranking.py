"""Scores of pairs of texts by cross-encoders of sentence-transformers, and by language models that judge them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from zoo.texts import metrics
from zoo.texts.importers import chat_templates, sentence_modules
from zoo.texts.importers.sentence_modules import CONFIG, LOGIT_SCORE, SETTINGS
from zoo.texts.inference import RankingPipeline
from zoo.texts.models.config import IDENTITY, SCORES, SIGMOID
from zoo.texts.models.head import Head, label_count, label_names
from zoo.texts.models.tensor_file import TensorFile

VOCABULARY = ("lm_head.weight", "model.embed_tokens.weight")  # layer of the vocabulary; where it is tied, the embedding


class Ranking(Head):
    """Scores of a pair of texts."""

    FORMAT: ClassVar[str] = "cross-encoder"
    TITLE: ClassVar[str] = "cross-encoder"
    ENDS: ClassVar[tuple[str, ...]] = ("ForSequenceClassification", chat_templates.LANGUAGE_MODEL)
    MODEL: ClassVar[str] = "AutoModelForSequenceClassification"
    OUTPUT: ClassVar[str] = SCORES
    HAS_LAYERS: ClassVar[bool] = False
    PAIRS: ClassVar[bool] = True
    OPTIONS: ClassVar[tuple[str, ...]] = ("template",)

    def recognizes(self, path: Path, config: Mapping[str, Any]) -> bool:
        """See `Head`: sentence-transformers has written it, it has one output, or a template for pairs."""
        if not super().recognizes(path, config):
            return False
        if chat_templates.is_language_model(config):
            return chat_templates.is_reranker(path, config)
        is_marked = "sentence_transformers" in config or "sbert_ce_default_activation_function" in config
        is_ranking = label_count(config) == 1 and config.get("problem_type") != "regression"
        return is_marked or is_ranking or (path / SETTINGS).is_file()

    def outputs(self, config: Mapping[str, Any]) -> int:
        """See `Head`."""
        return 1 if chat_templates.is_language_model(config) else label_count(config)

    def features(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`: "activation" of the logits, "names" of the labels, and "template" of pairs.

        Of a language model also "answers", the ids of the tokens whose logits are subtracted, the second one or None.
        """
        settings, is_model = sentence_modules.read_object(path / SETTINGS), chat_templates.is_language_model(config)
        template, tokens = chat_templates.read(path, network, config)
        named = bool(config.get("id2label")) and not is_model
        features: dict[str, Any] = {
            "activation": _activation(config, settings, self.outputs(config)),
            "names": label_names(config) if named else [],
        }
        if template:
            features["template"] = template
        if is_model:
            features["answers"] = _answers(path, network, tokens)
        return features

    def tables(self, path: Path, network: Path, features: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
        """See `Head`: of a language model the difference of the rows of the two answers in the vocabulary's layer."""
        if "answers" not in features:
            return {}
        rows = _rows(network, [number for number in features["answers"] if number is not None])
        return {"score.weight": (rows[0] - rows[1] if len(rows) > 1 else rows[0])[None]}

    def pipeline(self) -> type[RankingPipeline]:
        """See `Head`."""
        return RankingPipeline

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Head` and `zoo.texts.metrics.evaluate`."""
        return metrics.evaluate(pipelines, data, on_error)


def _answers(path: Path, network: Path, tokens: tuple[str, str]) -> list[int | None]:
    """Returns the ids of the tokens for a relevant and for an irrelevant document; the second may be None."""
    folder = sentence_modules.folder_of(sentence_modules.read_modules(path), LOGIT_SCORE)
    settings = sentence_modules.read_object(path / folder / CONFIG) if folder else {}
    if type(settings.get("true_token_id")) is int:
        return [settings["true_token_id"], settings.get("false_token_id")]
    content = read_json(network / "tokenizer.json")
    vocabulary = content.get("model", {}).get("vocab", {}) if isinstance(content, dict) else {}
    if missing := [token for token in tokens if token not in vocabulary]:
        raise RequestError(f"its tokenizer has no token {missing[0]!r}, whose logit is the score")
    return [vocabulary[token] for token in tokens]


def _rows(network: Path, numbers: Sequence[int]) -> list[NDArray[np.float32]]:
    """Returns the rows of tokens in the vocabulary's layer."""
    files = [TensorFile(file) for file in sentence_modules.weight_files(network) if file.suffix == ".safetensors"]
    for name in VOCABULARY:
        for file in files:
            if name in file:
                return [file.row(name, number) for number in numbers]
    raise RequestError(f"there is no {' nor '.join(VOCABULARY)} in a file of safetensors; expected the model's weights")


def _activation(config: Mapping[str, Any], settings: Mapping[str, Any], labels: int) -> str:
    """Returns the activation of the logits, as sentence-transformers' CrossEncoder chooses it."""
    names = [settings.get("activation_fn"), config.get("sentence_transformers", {}).get("activation_fn")]
    names.append(config.get("sbert_ce_default_activation_function"))
    name = next((str(name) for name in names if name), "")
    if not name:
        return SIGMOID if labels == 1 else IDENTITY
    kind = name.rpartition(".")[2].lower()
    if kind not in (IDENTITY, SIGMOID):
        raise RequestError(f"its scores go through {name}; supported: Identity, Sigmoid")
    return kind


HEAD = Ranking()
