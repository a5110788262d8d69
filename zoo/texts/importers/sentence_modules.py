"""Modules of sentence-transformers after the network: pooling, Dense layers, normalization, and truncation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, replacing, write_json
from zoo.texts.models import weights
from zoo.texts.models.config import POOLINGS, Dense, ModelConfig

CONFIG, MODULES = "config.json", "modules.json"
SETTINGS = "config_sentence_transformers.json"  # prompts and truncation; activation of a cross-encoder
PICKLED, INDEX = "pytorch_model.bin", ".index.json"  # older weights; suffix of the index of shards
OTHERS = (  # weights of others, and parts of a model
    *("adapter_model.*", "*.onnx", "onnx/*.onnx", "*.xml", "openvino/*.xml", "*.gguf", "*.h5", "*.msgpack", "*.ot"),
    *("*.npz", "coreml/*/*.mlpackage", "*.pth", "*.safetensors", "*model*.bin"),
)
ROUTER, STATIC = "router_config.json", "SparseStaticEmbedding"
EMBEDDINGS = "StaticEmbedding"  # module of a table, which takes the mean of a text's rows
MODEL2VEC = "model2vec"  # model_type of such a folder, also without modules.json
LOGIT_SCORE = "LogitScore"  # module of a reranker that is a language model
SENTENCE = "sentence_embedding"  # what modules hand on
POOLING_MODES = {  # by the keys of a pooling's config.json, in the order in which several are concatenated
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean",
    "lasttoken": "last",
}
NAMES = {**POOLING_MODES, "weightedmean": "weighted_mean"}  # older and newer names
NEWER = {"mean_sqrt_len": "mean_sqrt_len_tokens", "weighted_mean": "weightedmean", "last": "lasttoken"}
CLASSES = {  # of activations
    "identity": "torch.nn.modules.linear.Identity",
    "tanh": "torch.nn.modules.activation.Tanh",
    "relu": "torch.nn.modules.activation.ReLU",
    "gelu": "torch.nn.modules.activation.GELU",
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
}
AFTER_POOLING = ("Dense", "Normalize")


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; {} for a missing file.

    Args:
        path: The file.
    """
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def weight_files(network: Path) -> list[Path]:
    """Returns the files of a network's weights: one, or the shards.

    Args:
        network: Folder of the network.

    Raises:
        RequestError: There are none, or a shard is missing.
    """
    for name in (weights.FILE, PICKLED):
        if (network / name).is_file():
            return [network / name]
        if (network / f"{name}{INDEX}").is_file():
            places = read_object(network / f"{name}{INDEX}").get("weight_map")
            shards = sorted({str(shard) for shard in places.values()}) if isinstance(places, dict) else []
            if not shards or any(Path(shard).name != shard for shard in shards):
                raise RequestError(f"{name}{INDEX} names no files")
            if missing := [shard for shard in shards if not (network / shard).is_file()]:
                raise RequestError(f"there is no {missing[0]}, which {name}{INDEX} names")
            return [network / shard for shard in shards]
    others = sorted(str(file.relative_to(network)) for name in OTHERS for file in network.glob(name))
    but = f" but {others[0]}, which is not read," if others else ""
    raise RequestError(f"there is no {weights.FILE}, nor {PICKLED},{but} in {network.name}")


def read_modules(path: Path) -> list[tuple[str, str]]:
    """Returns (type, folder) of the modules of a sentence-transformers folder; [] for other folders.

    Args:
        path: Folder of the model.

    Raises:
        RequestError: modules.json is no list of modules, or one lies outside the folder.
    """
    modules = read_json(path / MODULES) if (path / MODULES).is_file() else []
    try:
        entries = [(str(module["type"]).rsplit(".", 1)[-1], str(module["path"])) for module in modules]
    except (KeyError, TypeError) as error:
        raise RequestError(f"{MODULES} is no list of modules ({error!r})") from error
    if not entries and (config := read_object(path / CONFIG)).get("model_type") == MODEL2VEC:
        entries = [(EMBEDDINGS, ""), *[("Normalize", "")] * bool(config.get("normalize"))]
    if [kind for kind, _ in entries] == ["Router"]:
        entries = _routed(path, entries[0][1])
    for _, folder in entries:
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise RequestError(f"{MODULES} names the folder {folder}; expected one in the model's folder")
    return entries


def _routed(path: Path, folder: str) -> list[tuple[str, str]]:
    """Returns the modules of documents, and the one of queries where they are looked up in a table of weights."""
    routes = read_object(path / folder / ROUTER)
    try:
        kinds = {name: str(kind).rsplit(".", 1)[-1] for name, kind in routes["types"].items()}
        query, document = (
            [(kinds[name], (Path(folder) / name).as_posix()) for name in routes["structure"][role]]
            for role in ("query", "document")
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise RequestError(f"{ROUTER} has no modules of queries and documents ({error!r})") from error
    if [kind for kind, _ in query] != [STATIC]:
        raise RequestError(f"its queries have a network of their own ({ROUTER}); expected {STATIC}")
    return [*document, *query]


def folder_of(modules: list[tuple[str, str]], kind: str) -> str:
    """Returns the folder of the first module of a type; "" if there is none.

    Args:
        modules: See `read_modules`.
        kind: The type.
    """
    return next((folder for name, folder in modules if name == kind), "")


def dense_folders(path: Path) -> list[Path]:
    """Returns the folders of the Dense layers, in order.

    Args:
        path: Folder of the model.
    """
    return [path / folder for kind, folder in read_modules(path) if kind == "Dense"]


def read_embedding(path: Path, modules: list[tuple[str, str]], option: str, has_prompts: bool) -> dict[str, Any]:
    """Reads how the last layer becomes an embedding.

    Args:
        path: Folder of the model.
        modules: Its modules.
        option: --pooling, or "".
        has_prompts: Whether the model has prompts.

    Returns:
        The fields pooling, dense and normalize of `ModelConfig`.

    Raises:
        RequestError: A module or its place is not supported.
    """
    if option and option not in POOLINGS:
        raise RequestError(f"pooling is {option!r}; choose {', '.join(POOLINGS)}")
    kinds = [kind for kind, _ in modules if kind != "Transformer"]
    is_static = kinds[:1] == [EMBEDDINGS]
    kinds = kinds[is_static:]
    supported = ("Pooling", *AFTER_POOLING)
    if unknown := [kind for kind in kinds if kind not in supported]:
        raise RequestError(f"its module {unknown[0]} is not supported; supported: Transformer, {', '.join(supported)}")
    order = [supported.index(kind) for kind in kinds]
    if order != sorted(order):
        after, before = next((supported[b], supported[a]) for a, b in itertools.pairwise(order) if a > b)
        raise RequestError(
            f"its module {before} is before {after} ({MODULES}); expected Transformer, {', '.join(supported)}"
        )
    return {
        "pooling": "mean" if is_static else _pooling(path, modules, option, has_prompts),
        "dense": tuple(_dense(folder) for folder in dense_folders(path)),
        "normalize": "Normalize" in kinds,
    }


def truncate_dim(settings: Mapping[str, Any]) -> int:
    """Returns the number of leading components of embeddings that are kept; 0 for all.

    Args:
        settings: Content of config_sentence_transformers.json.

    Raises:
        RequestError: It is no whole number above 0.
    """
    size = settings.get("truncate_dim")
    if size is not None and (type(size) is not int or size < 1):
        raise RequestError(f"its truncate_dim is {size!r:.40} ({SETTINGS}); expected a whole number above 0")
    return size or 0


def _pooling_config(path: Path, modules: list[tuple[str, str]]) -> tuple[str, dict[str, Any]]:
    """Returns folder and config.json of the pooling that makes the embedding."""
    folder = folder_of(modules, "Pooling") or "1_Pooling"
    config = read_object(path / folder / CONFIG)
    for kind, other in modules:  # of several the last one makes the embedding, unless it makes something else
        content = read_object(path / other / CONFIG) if kind == "Pooling" else {}
        if content and content.get("output_key", SENTENCE) == SENTENCE:
            folder, config = other, content
    return folder, config


def leaves_prompts_out(path: Path, modules: list[tuple[str, str]]) -> bool:
    """Returns whether the tokens of prompts are not pooled (`include_prompt`).

    Args:
        path: Folder of the model.
        modules: Its modules.
    """
    return _pooling_config(path, modules)[1].get("include_prompt") is False


def _pooling(path: Path, modules: list[tuple[str, str]], option: str, has_prompts: bool) -> str:
    """Returns the pooling of the folder, or that of the option."""
    folder, config = _pooling_config(path, modules)
    if has_prompts and config.get("include_prompt") is False:
        raise RequestError(
            f"its pooling leaves prompts out (include_prompt in {folder}/{CONFIG}), and it has prompts ({SETTINGS}); "
            "expected a pooling of all tokens, or no prompts"
        )
    if option:
        return option
    if not config:
        raise RequestError(f"there is no {folder}/{CONFIG}, which says how tokens are pooled; name it with --pooling")
    flags = {"pooling_mode_mean_tokens": True, **config}  # the default of sentence-transformers
    mode = config.get("pooling_mode") or [key for key in POOLING_MODES if flags.get(f"pooling_mode_{key}") is True]
    modes = [mode] if isinstance(mode, str) else list(mode)
    modes += [  # of unknown names
        key
        for key, value in config.items()
        if value is True and key.startswith("pooling_mode_") and key.removeprefix("pooling_mode_") not in POOLING_MODES
    ]
    names = [NAMES.get(str(name), str(name)) for name in modes]
    if not names or not set(names) <= set(POOLINGS):
        raise RequestError(f"its pooling is {' and '.join(names) or 'none'}; expected one of {', '.join(POOLINGS)}")
    return "+".join(names)


def _dense(folder: Path) -> Dense:
    """Reads the config.json of a Dense layer."""
    config, place = read_object(folder / CONFIG), f"{folder.name}/{CONFIG}"
    for key, expected in (("module_input_name", SENTENCE), ("module_output_name", SENTENCE), ("use_residual", False)):
        if (value := config.get(key)) is not None and value != expected:
            raise RequestError(f"its Dense layer has the {key} {value!r:.40} ({place}); expected {expected!r}")
    activation = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh")
    return Dense(
        outputs=int(config["out_features"]),
        activation=activation.rpartition(".")[2].lower(),
        bias=bool(config.get("bias", True)),
    )


def _write_dense(folder: Path, dense: Dense, inputs: int, arrays: Mapping[str, NDArray[np.float32]]) -> None:
    """Writes a Dense layer of `inputs` columns."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {"in_features": inputs, "out_features": dense.outputs, "bias": dense.bias}
    write_json(folder / CONFIG, {**config, "activation_function": CLASSES[dense.activation]})
    with replacing(folder / "model.safetensors") as temporary:
        save_file({f"linear.{name}": array for name, array in arrays.items()}, temporary)


def write_modules(
    folder: Path,
    config: ModelConfig,
    features: Mapping[str, Any],
    layers: Sequence[Mapping[str, NDArray[np.float32]]],
) -> None:
    """Writes the files of sentence-transformers: modules, pooling, Dense layers, prompts and truncation.

    Args:
        folder: Folder of the model.
        config: Configuration of the network.
        features: Features of its card.
        layers: Weight and bias of its Dense layers.
    """
    named = ["Pooling", *["Dense"] * len(config.dense), *["Normalize"] * config.normalize]
    kinds = [("", "Transformer"), *((f"{i}_{kind}", kind) for i, kind in enumerate(named, 1))]
    inputs = config.width * len(config.poolings)
    for i, (dense, arrays) in enumerate(zip(config.dense, layers, strict=True), 2):
        _write_dense(folder / f"{i}_Dense", dense, inputs, arrays)
        inputs = dense.outputs
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    pooling: dict[str, Any] = {"word_embedding_dimension": config.width}
    pooling |= {f"pooling_mode_{key}": mode in config.poolings for key, mode in POOLING_MODES.items()}
    if features.get("unpooled_prompts"):
        pooling["include_prompt"] = False
    if len(config.poolings) > 1:  # in their order
        pooling["pooling_mode"] = [NEWER.get(mode, mode) for mode in config.poolings]
    write_json(folder / "1_Pooling" / CONFIG, pooling)
    transformer = {"max_seq_length": features["max_length"], "do_lower_case": bool(features.get("lower"))}
    write_json(folder / "sentence_bert_config.json", transformer)
    write_json(folder / MODULES, modules)
    settings: dict[str, Any] = {"truncate_dim": config.truncate_dim} if config.truncate_dim else {}
    if prompts := features.get("prompts"):
        settings |= {"prompts": prompts, "default_prompt_name": features.get("prompt") or None}
    if settings:
        write_json(folder / SETTINGS, settings)
