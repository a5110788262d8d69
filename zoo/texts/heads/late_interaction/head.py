"""Multi-vector encoders: a normalized vector of every token, by the layers Dense after the network.

Folders of four kinds are read: of Stanford's ColBERT (architecture HF_ColBERT, artifact.metadata), of PyLate
(query_prefix, document_prefix, ... in config_sentence_transformers.json), of `MultiVectorEncoder` of
sentence-transformers (modules MultiVectorMask and Normalize), and of BGE-M3 (colbert_linear.pt), whose embeddings are
imported unless the format is named.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from zoo.texts.heads.late_interaction import metrics
from zoo.texts.heads.late_interaction.pipeline import VECTORS, MultiVectorPipeline
from zoo.texts.heads.late_interaction.roles import DOCUMENT, QUERY, ROLES
from zoo.texts.importers import sentence_modules
from zoo.texts.importers.sentence_modules import SETTINGS, read_object
from zoo.texts.models.config import DENSE_ACTIVATIONS, Dense, ModelConfig
from zoo.texts.models.head import Head, HeadWeights, special_token
from zoo.texts.models.tensor_file import TensorFile, read_pickled_layer
from zoo.texts.models.weights import FILE
from zoo.texts.sentence_encoder import COSINE

if TYPE_CHECKING:
    import onnx_ir as ir

STANFORD, METADATA = "HF_ColBERT", "artifact.metadata"
BGE_LAYER = "colbert_linear.pt"  # of every token but the first
MASK_MODULE, NORMALIZE = "MultiVectorMask", "Normalize"
MODEL_TYPES = ("ColBERT", "MultiVectorEncoder")  # of config_sentence_transformers.json
LENGTHS = {QUERY: 32, DOCUMENT: 180}  # defaults of PyLate
MARKERS = {"stanford": {QUERY: "[unused0]", DOCUMENT: "[unused1]"}, "pylate": {QUERY: "[Q] ", DOCUMENT: "[D] "}}
PUNCTUATION = list(string.punctuation)
SMALLEST_LENGTH = 4  # marker, a token, and two special tokens


class LateInteraction(Head):
    """Layers of every token, and L2 normalization."""

    FORMAT: ClassVar[str] = "multi-vector-encoder"
    TITLE: ClassVar[str] = "multi-vector encoder"
    ENDS: ClassVar[tuple[str, ...]] = ("",)
    MODEL: ClassVar[str] = "AutoModel"
    OUTPUT: ClassVar[str] = VECTORS
    PER_TOKEN: ClassVar[bool] = True
    DENSE_MODULES: ClassVar[bool] = True
    UNATTENDED: ClassVar[bool] = True
    OWN_LENGTHS: ClassVar[bool] = True

    def recognizes(self, path: Path, config: Mapping[str, Any]) -> bool:
        """See `Head`."""
        kinds = [kind for kind, _ in sentence_modules.read_modules(path)]
        is_multi = read_object(path / SETTINGS).get("model_type") in MODEL_TYPES or MASK_MODULE in kinds
        return _is_stanford(path, config) or (bool(kinds) and (is_multi or _is_pylate(path, kinds)))

    def outputs(self, config: Mapping[str, Any]) -> int:
        """See `Head`: no labels."""
        return 0

    def form(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`: the layers Dense."""
        if _is_stanford(path, config):
            return {"dense": (Dense(_stanford_outputs(network), bias=False),)}
        if _is_bge(path, config):
            return {"dense": (Dense(len(_bge_layer(path)["dense.0.weight"])),)}
        layers = []
        for kind, folder in sentence_modules.read_modules(path):
            if kind == "Dense":
                layers.append(_dense(path / folder))
            elif kind not in ("Transformer", MASK_MODULE, NORMALIZE):
                raise RequestError(f"its module {kind} is not supported; supported: Transformer, Dense, {MASK_MODULE}")
        return {"dense": tuple(layers)}

    def features(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`: what `Roles` reads."""
        kinds = [kind for kind, _ in sentence_modules.read_modules(path)]
        if _is_stanford(path, config):
            features = _stanford_features(network)
        elif _is_bge(path, config):
            features = _bge_features(network, config)
        elif MASK_MODULE in kinds:
            features = _module_features(path)
        else:
            features = _pylate_features(path)
        for role in ROLES:
            if type(length := features["roles"][role]["length"]) is not int or length < SMALLEST_LENGTH:
                raise RequestError(
                    f"its length of the role {role} is {length!r:.40}; expected {SMALLEST_LENGTH} tokens or more"
                )
        features["splits_skipped"] = _is_stanford(path, config)
        features["unknown"] = special_token(network, "unk_token")
        if features["expansion"] and not features["expansion"].get("token"):
            token = special_token(network, "mask_token") or special_token(network, "eos_token")
            if not token:
                raise RequestError("its tokenizer has no mask_token in tokenizer_config.json; copy it from the model")
            features["expansion"]["token"] = token
        return features

    def tables(self, path: Path, network: Path, features: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
        """See `Head`: the layer of BGE-M3, which is a file of its own."""
        return _bge_layer(path) if _is_bge(path, read_object(network / sentence_modules.CONFIG)) else {}

    def weights(self, store: HeadWeights, config: ModelConfig) -> None:
        """See `Head`: "dense.N"; a residual is added to the weights.

        Args:
            store: Where they are taken from, and gathered.
            config: Configuration of the network.
        """
        inputs = config.width
        for i, layer in enumerate(config.dense):
            name = f"dense.{i}"
            original = "linear" if f"{name}.weight" not in store.tensors and "linear.weight" in store.tensors else name
            store.take(f"{name}.weight", f"{original}.weight", layer.outputs, inputs)
            if layer.bias:
                store.take(f"{name}.bias", f"{original}.bias", layer.outputs)
            if layer.residual and f"{name}.weight" in store.weights:
                if inputs == layer.outputs:
                    store.weights[f"{name}.residual.weight"] = np.eye(inputs, dtype=np.float32)
                else:
                    store.take(f"{name}.residual.weight", f"{name}.residual.weight", layer.outputs, inputs)
                store.weights[f"{name}.weight"] = store.weights[f"{name}.weight"] + store.weights.pop(
                    f"{name}.residual.weight", np.float32(0)
                )
            inputs = layer.outputs

    def export(self, writer: Any, hidden: ir.Value, ids: ir.Value, mask: ir.Value) -> ir.Value:
        """See `Head`."""
        x = hidden
        for i, layer in enumerate(writer.config.dense):
            x = writer.dense_activation(writer.linear(x, f"dense.{i}"), f"dense.{i}", layer.activation)
        result: ir.Value = writer.normalize(x, VECTORS, axis=-1)
        return result

    def pipeline(self) -> type[MultiVectorPipeline]:
        """See `Head`."""
        return MultiVectorPipeline

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Head` and `zoo.texts.heads.late_interaction.metrics.evaluate`."""
        return metrics.evaluate(pipelines, data, on_error)


def _is_stanford(path: Path, config: Mapping[str, Any]) -> bool:
    """Returns whether a folder has a projection in the file of its network."""
    return STANFORD in (config.get("architectures") or []) and not (path / sentence_modules.MODULES).is_file()


def _is_bge(path: Path, config: Mapping[str, Any]) -> bool:
    """Returns whether a folder has the layer of BGE-M3, and no other."""
    kinds = [kind for kind, _ in sentence_modules.read_modules(path)]
    return (path / BGE_LAYER).is_file() and not _is_stanford(path, config) and not {"Dense", MASK_MODULE} & {*kinds}


def _bge_layer(path: Path) -> dict[str, NDArray[np.float32]]:
    return read_pickled_layer(path / BGE_LAYER, "dense.0")


def _bge_features(network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    first = special_token(network, "cls_token")
    if not first:
        raise RequestError("its tokenizer has no cls_token in tokenizer_config.json; copy it from the model")
    length = int(config.get("max_position_embeddings") or 512)  # at most that of the tokenizer
    return _features(dict.fromkeys(ROLES, ""), dict.fromkeys(ROLES, length), None, {role: [first] for role in ROLES})


def _is_pylate(path: Path, kinds: list[str]) -> bool:
    """Returns whether PyLate has written the modules; its versions before 3 name no type of model."""
    settings = read_object(path / SETTINGS)
    return "Pooling" not in kinds and any(key in settings for key in ("query_prefix", "query_length"))


def _stanford_outputs(network: Path) -> int:
    """Returns the number of components of a vector."""
    if (network / FILE).is_file() and (weight := TensorFile(network / FILE).get("linear.weight")) is not None:
        return len(weight)
    return int(_metadata(network).get("dim") or 128)


def _metadata(network: Path) -> dict[str, Any]:
    metadata = read_json(network / METADATA) if (network / METADATA).is_file() else {}
    return metadata if isinstance(metadata, dict) else {}


def _features(
    markers: Mapping[str, str], lengths: Mapping[str, Any], expansion: dict[str, Any] | None, skipped: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the features of a card: markers and lengths, query expansion or None, and skipped words, by role."""
    roles = {role: {"marker": markers[role], "length": lengths.get(role) or LENGTHS[role]} for role in ROLES}
    return {"roles": roles, "expansion": expansion, "skipped": {role: list(skipped.get(role) or []) for role in ROLES}}


def _stanford_features(network: Path) -> dict[str, Any]:
    metadata = _metadata(network)
    if (similarity := metadata.get("similarity")) not in (None, COSINE):
        raise RequestError(f"its similarity is {similarity!r:.40} ({METADATA}); expected {COSINE}")
    keys = {QUERY: "query_token_id", DOCUMENT: "doc_token_id"}
    markers = {role: str(metadata.get(key) or MARKERS["stanford"][role]) for role, key in keys.items()}
    lengths = {QUERY: metadata.get("query_maxlen") or LENGTHS[QUERY], DOCUMENT: metadata.get("doc_maxlen")}
    expansion = {"length": lengths[QUERY], "attend": bool(metadata.get("attend_to_mask_tokens"))}
    skipped = {DOCUMENT: PUNCTUATION if metadata.get("mask_punctuation", True) else []}
    return _features(markers, lengths, expansion, skipped)


def _pylate_features(path: Path) -> dict[str, Any]:
    settings = read_object(path / SETTINGS)

    def setting(key: str, default: Any) -> Any:
        return default if settings.get(key) is None else settings[key]

    markers = {role: str(setting(f"{role}_prefix", MARKERS["pylate"][role])) for role in ROLES}
    lengths = {role: setting(f"{role}_length", LENGTHS[role]) for role in ROLES}
    expansion = {"length": lengths[QUERY], "attend": bool(settings.get("attend_to_expansion_tokens"))}
    expands = setting("do_query_expansion", True)
    return _features(
        markers, lengths, expansion if expands else None, {DOCUMENT: setting("skiplist_words", PUNCTUATION)}
    )


def _module_features(path: Path) -> dict[str, Any]:
    """Reads the modules of sentence-transformers; markers are part of its prompts."""
    modules = sentence_modules.read_modules(path)
    transformer = read_object(path / sentence_modules.folder_of(modules, "Transformer") / "sentence_bert_config.json")
    mask = read_object(path / sentence_modules.folder_of(modules, MASK_MODULE) / sentence_modules.CONFIG)
    if mask.get("keep_only_token_ids"):
        raise RequestError(f"its {MASK_MODULE} keeps some tokens alone (keep_only_token_ids); expected a text model")
    longest = transformer.get("max_seq_length")
    lengths = {role: transformer.get(f"{role}_length") or longest for role in ROLES}
    expansion = transformer.get("query_expansion")
    if expansion is not None:
        strategy = expansion.get("strategy")
        if strategy not in ("fixed", "min"):
            raise RequestError(f"its query expansion has the strategy {strategy!r:.40}; expected fixed or min")
        if strategy == "fixed":
            lengths[QUERY] = expansion["length"]
        expansion = {key: expansion.get(key) for key in ("length", "attend", "token")}
        expansion["attend"] = bool(expansion["attend"])
    tasks = mask.get("skiplist_tasks") or [DOCUMENT]
    skipped = {role: mask.get("skiplist_words") for role in ([tasks] if isinstance(tasks, str) else tasks)}
    return _features(dict.fromkeys(ROLES, ""), lengths, expansion, skipped)


def _dense(folder: Path) -> Dense:
    """Reads the config.json of a Dense layer, of PyLate or sentence-transformers."""
    config, place = read_object(folder / sentence_modules.CONFIG), f"{folder.name}/{sentence_modules.CONFIG}"
    activation = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2].lower()
    residual = bool(config.get("use_residual"))
    if activation not in DENSE_ACTIVATIONS or (residual and activation != "identity"):
        raise RequestError(
            f"its Dense layer has the activation {activation}{' and a residual' if residual else ''} ({place}); "
            f"expected one of {', '.join(DENSE_ACTIVATIONS)}, and with a residual identity"
        )
    return Dense(int(config["out_features"]), activation, bool(config.get("bias", True)), residual)


HEAD = LateInteraction()
