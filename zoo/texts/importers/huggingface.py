"""Import of Hugging Face folders, as written by sentence-transformers and transformers, as model folders."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, one_line, requires
from pipelines.core.files import copy_file, link_or_copy, read_json, replacing, require_place, write_json, write_text
from pipelines.models.family import Importer
from pipelines.models.hub import CARD, CardFile
from pipelines.quantization.recipe import QuantRecipe
from zoo.texts.data import tokenizer
from zoo.texts.data.tokenizer import Tokenizer
from zoo.texts.importers import chat_templates, sentence_modules, static_embeddings, tokenizer_files
from zoo.texts.importers.sentence_modules import CONFIG, MODULES, SETTINGS, weight_files
from zoo.texts.importers.sentence_modules import read_object as _json
from zoo.texts.models import weights
from zoo.texts.models.architectures import MODEL_TYPES, architecture_of
from zoo.texts.models.architectures.base import ConfigFile
from zoo.texts.models.config import TYPES, ModelConfig
from zoo.texts.models.head import Head

logger = logging.getLogger(__name__)

PICKLED_HEAD = "model_head.pkl"  # of SetFit; unpickling would run its code
MORE_HEADS = "*_linear.pt"  # of BGE-M3, beside its embeddings
PATTERNS = (  # whose * also stands for folders
    "*.json",
    "artifact.metadata",
    "chat_template.jinja",
    PICKLED_HEAD,
    MORE_HEADS,
    "*model*.safetensors",
    "*pytorch_model*.bin",
    *(f"*{name}" for name in tokenizer_files.OLDER),
)
ENCODERS = (  # ends of architectures
    "Model",
    "ForMaskedLM",
    "ForPreTraining",
    "ForNextSentencePrediction",
    "QuestionEncoder",  # of DPR, as the next one
    "ContextEncoder",
)
TASKS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)  # architectures of other families
HEADS = {  # what other architectures do, by the end of their name
    "ForMultipleChoice": "it chooses among answers",
    "ForCausalLM": "it generates text; a reranker needs --format cross-encoder and, without modules, --template",
    "LMHeadModel": "it generates text",
}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")  # of sentence-transformers


def importer(head: Head | None) -> Importer:
    """Returns the importer of a family.

    Args:
        head: Head of its models; None: sentence encoders.
    """
    name = head.FORMAT if head else "sentence-transformers"
    kind = head.TITLE if head else "sentence encoder"
    description = f"a {kind} in a folder of Hugging Face ({', '.join(MODEL_TYPES)})"

    def recognize(path: Path) -> str:
        if static_embeddings.folder_of_table(path):
            return "" if head else name
        network = _network_folder(path)
        if not (network / CONFIG).is_file():
            return ""
        config = read_json(network / CONFIG)
        if not isinstance(config, dict) or not config.get("model_type"):
            return ""
        if head:
            return name if head.recognizes(path, config) else ""
        architecture = _architecture(config)
        recognized = (
            (_is_known(config) and not architecture.endswith("ForConditionalGeneration"))
            or (path / MODULES).is_file()
            or (_is_encoder(architecture) and not config.get("is_encoder_decoder"))
        )
        if chat_templates.is_reranker(path, config):
            return ""
        tasks = TASKS[:1] if (path / MODULES).is_file() else TASKS
        has_task = any(str(architecture).endswith(tasks) for architecture in config.get("architectures") or [])
        return name if recognized and not has_task else ""

    def write(
        path: Path,
        output: Path,
        *,
        format: str,
        pooling: str = "",
        normalize: bool = False,
        task: str = "",
        template: str = "",
    ) -> tuple[dict[str, Any], list[CardFile]]:
        if output.resolve() == path.resolve():
            raise RequestError(f"found {output} as the folder of both models; choose another output")
        with tokenizer_files.completed(path, _network_folder(path)) as folder:
            return _write(folder, output, head, pooling, normalize, task, template)

    options = head.OPTIONS if head else ("pooling", "normalize", "task")
    paths = tuple(name for name in options if name == "template")
    return Importer({name: description}, recognize, write, options, PATTERNS, path_options=paths)


def _write(
    path: Path, output: Path, head: Head | None, pooling: str, normalize: bool, task: str, template: str
) -> tuple[dict[str, Any], list[CardFile]]:
    """Copies the files of a model to `output`; returns the details of its card and the files.

    Raises RequestError with all errors of the model; nothing is written then.
    """
    network = _network_folder(path)
    static = static_embeddings.folder_of_table(path)
    table = {static_embeddings.TABLES[0]: static_embeddings.read_table(static)} if static else {}
    content = static_embeddings.config_of(*table.values()) if table else read_json(network / CONFIG)
    config = {**content, "template": template}  # of the caller alone: it may name any file
    errors: list[str] = []
    features: dict[str, Any] = {}
    try:
        features = read_features(path, config, head, pooling, normalize, task)
    except RequestError as error:
        errors.append(str(error))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        errors.append(f"its configuration is not as transformers writes it ({one_line(error)})")
    sources: dict[Path, str] = {}
    try:
        sources = {} if table else dict.fromkeys(weight_files(network), "")
        dense = [] if head and not head.DENSE_MODULES else sentence_modules.dense_folders(path)
        sources |= {file: f"dense.{i}." for i, folder in enumerate(dense) for file in weight_files(folder)}
    except RequestError as error:
        errors.append(str(error))
    if not (network / tokenizer.FILE).is_file():
        errors.append(tokenizer_files.missing(network))
    if errors:
        raise RequestError(f"cannot import {path}: {'; '.join(errors)}")
    model_config = ModelConfig.from_json(features["form"])
    Tokenizer(  # raises for a damaged one, and for another model's
        network / tokenizer.FILE,
        model_config.vocabulary - bool(static),
        features["max_length"],
        pairs=bool(head and head.PAIRS),
    )
    names = (CARD, weights.FILE, tokenizer.FILE, CONFIG)
    for name in names:
        require_place(output / name)
    tables = head.tables(path, network, features) if head else table
    whole = not tables and [*sources] == [network / weights.FILE]
    convert = None if whole else _converter([*sources])  # raises without torch, before anything is written
    output.mkdir(parents=True, exist_ok=True)
    if convert is None:
        weights.load_weights(model_config, network / weights.FILE, path, head)  # raises for another configuration
        link_or_copy(network / weights.FILE, output / weights.FILE)
    else:
        with replacing(output / weights.FILE) as temporary:
            convert(sources, tables, temporary)
        weights.load_weights(model_config, output / weights.FILE, path, head)
    if not head:
        _warn_of_heads(path)
    end = "" if "template" in features else tokenizer_files.padding_end(network, config, model_config)
    changed: dict[str, Any] = {tokenizer.FILE: tokenizer_files.content(network, end), CONFIG: None}
    details: dict[str, Any] = {"preprocessing": features, "weights": {"file": weights.FILE}}
    if static:
        changed = {tokenizer.FILE: static_embeddings.tokenizer_content(static), CONFIG: content}
        details["recipe"] = QuantRecipe().to_json()
    for name, new in changed.items():
        if new is None:
            (_copy_tokenizer if name == tokenizer.FILE else copy_file)(network / name, output / name)
        else:
            write_json(output / name, new)
    return details, [CardFile.of(output / name) for name in names if name != CARD]


def _copy_tokenizer(source: Path, path: Path) -> None:
    """Copies a tokenizer without the blanks of its JSON: 250,000 pieces take 8 MB instead of 16.

    It is a link to a file of the cache of huggingface_hub, which never changes.
    """
    if source.resolve().parent.name == "blobs":
        link_or_copy(source, path)
    else:
        write_text(path, json.dumps(read_json(source), ensure_ascii=False, separators=(",", ":")) + "\n")


def _warn_of_heads(path: Path) -> None:
    """Warns of heads beside a sentence encoder, which are not imported."""
    if (path / PICKLED_HEAD).is_file():
        logger.warning(
            "%s has a classifier in %s, which is pickled and not imported: the model returns embeddings; for labels "
            "run zoo train text-classification --data labelled.tsv --set encoder=MODEL -o FOLDER",
            path,
            PICKLED_HEAD,
        )
    if others := sorted(file.name for file in path.glob(MORE_HEADS)):
        logger.warning(
            "%s has %s, which are not imported: the model returns its dense embeddings; for a vector of every token "
            "run zoo import --format multi-vector-encoder, for sparse vectors --format sparse-encoder",
            path,
            " and ".join(others),
        )


def read_features(
    path: Path,
    config: Mapping[str, Any],
    head: Head | None,
    pooling: str = "",
    normalize: bool = False,
    task: str = "",
) -> dict[str, Any]:
    """Reads the features of a model for its card.

    Args:
        path: Folder of the model.
        config: Content of its config.json.
        head: Head of the network; None: a sentence encoder.
        pooling: Pooling of a folder without one, one of `POOLINGS`; "": that of the folder.
        normalize: Whether embeddings are L2-normalized in any case.
        task: Task whose adapter is merged into the weights; "" for none. Its prompt, if it has one, is the default.

    Returns:
        {"form", "max_length", "lower"} and those of the head; with prompts also "prompts" and "prompt", and
        "similarity" if the model names one.

    Raises:
        RequestError: The architecture, or a part of it, is not supported.
    """
    _require_known(config)
    kind = str(config["model_type"])
    if head is None:
        _require_encoder(path, config, pooling)
    elif (name := _architecture(config)) and not head.accepts(path, name):
        raise RequestError(f"found {name}, expected {' or '.join(f'...{end}' for end in head.ENDS)} for a {head.TITLE}")
    architecture = architecture_of(config)
    if head and (name := _architecture(config)).endswith(architecture.decoded):
        raise RequestError(f"found {name}, whose head reads the output of a decoder; expected a head of the encoder")
    if task and not config.get("lora_adaptations"):
        raise RequestError(f"it has no adapters of tasks (lora_adaptations in {CONFIG}); found --task {task}")
    network = architecture.read(ConfigFile({**config, "task": task or None}))
    modules = sentence_modules.read_modules(path)
    transformer = _json(path / sentence_modules.folder_of(modules, "Transformer") / "sentence_bert_config.json")
    settings = _json(path / SETTINGS)
    prompts = _prompts(settings)
    changes: dict[str, Any] = {}
    if head:
        if not head.HAS_LAYERS and not architecture.head:
            raise RequestError(f"{kind} with a classification head is not supported; expected a sentence encoder")
        first = "cls" if head.HAS_LAYERS else architecture.head_pooling
        changes = {"labels": head.outputs(config), "head_activation": head.activation(config)}
        inputs = _json(_network_folder(path) / "tokenizer_config.json").get("model_input_names") or (TYPES,)
        changes["typed"] = TYPES in inputs
        named = str((not head.HAS_LAYERS and config.get("classifier_pooling")) or first)
        changes["pooling"] = {"bos": "cls"}.get(named, named)
        changes |= head.form(path, _network_folder(path), config)
    else:
        embedding = sentence_modules.read_embedding(path, modules, pooling, any(prompts.values()))
        size = sentence_modules.truncate_dim(settings)
        changes = {**embedding, "truncate_dim": size, "renormalize": bool(size and normalize)}
        changes["normalize"] = embedding["normalize"] or (normalize and not size)
    if static := static_embeddings.folder_of_table(path):
        max_length = static_embeddings.max_length(static, network.max_tokens)
    else:
        max_length = _max_length(_network_folder(path), network, {} if head and head.OWN_LENGTHS else transformer)
    if not network.absolute:  # without a position embedding, the limit of the folder is that of the tables
        changes["positions"] = max_length
    model_config = dataclasses.replace(network, **changes)
    features = {
        "form": model_config.to_json(),
        "max_length": max_length,
        "lower": bool(transformer.get("do_lower_case", False)),
    }
    if static and (token := static_embeddings.left_out(static)):
        features["left_out"] = token
    if not head and sentence_modules.leaves_prompts_out(path, modules):
        features["unpooled_prompts"] = True
    if head:
        features |= head.features(path, _network_folder(path), config)
    if "template" not in features and tokenizer_files.padding_end(_network_folder(path), config, model_config):
        features["max_length"] = max_length - 1  # a truncated text loses the token in transformers, too
    if prompts:
        default = task if task in prompts else str(settings.get("default_prompt_name") or "")
        features |= {"prompts": prompts, "prompt": default}
    if (similarity := settings.get("similarity_fn_name")) in SIMILARITIES:
        features["similarity"] = similarity
    return features


def _prompts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the prompts of a model by name. Raises RequestError if they are no texts, or lack the default one."""
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(text is None or isinstance(text, str) for text in prompts.values()):
        raise RequestError(f"its prompts are {prompts!r:.60} ({SETTINGS}); expected a text by name")
    default = settings.get("default_prompt_name")
    if default and default not in prompts:
        names = ", ".join(prompts) or "none"
        raise RequestError(f"its default prompt is {default!r:.60} ({SETTINGS}); expected one of its prompts, {names}")
    return {name: text or "" for name, text in prompts.items()}


def _network_folder(path: Path) -> Path:
    """Returns the folder of the network's files: that of the module Transformer, such as 0_Transformer, or `path`."""
    if static := static_embeddings.folder_of_table(path):
        return static
    if _json(path / CONFIG).get("model_type") or not (path / MODULES).is_file():
        return path
    try:
        modules = sentence_modules.read_modules(path)
        kinds = ("Transformer", "MLMTransformer")
        network = path / next(filter(None, (sentence_modules.folder_of(modules, kind) for kind in kinds)), "")
    except RequestError:
        return path
    return network if (network / CONFIG).is_file() else path


def _require_encoder(path: Path, config: Mapping[str, Any], pooling: str) -> None:
    """Raises RequestError for a network with another head; with `MODULES` the head is not used.

    Unknown architectures with a named pooling are read by their model_type, as AutoModel of transformers reads them.
    """
    name = _architecture(config)
    if not name or (path / MODULES).is_file() or _is_encoder(name):
        return
    what = next((text for end, text in HEADS.items() if name.endswith(end)), "the architecture is not supported")
    if not config.get("auto_map") and not name.endswith(tuple(HEADS)):
        if pooling:
            return
        what += f"; --pooling reads it as {config['model_type']}"
    raise RequestError(f"found {name}, expected an encoder, or one with a head that zoo import --help lists: {what}")


def _require_known(config: Mapping[str, Any]) -> None:
    """Raises RequestError for an architecture that is not supported, and for quantized weights."""
    if not (kind := config.get("model_type")):
        raise RequestError(f"{CONFIG} has no model_type, which names the architecture")
    if str(kind) not in MODEL_TYPES:
        found = f"{name} of the model type {kind}" if (name := _architecture(config)) else f"the model type {kind}"
        raise RequestError(f"found {found}, which is not supported; supported: {', '.join(MODEL_TYPES)}")
    if quantized := config.get("quantization_config") or config.get("compression_config"):
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else ""
        raise RequestError(
            f"its weights are quantized (quantization_config {method or quantized!r:.40} in {CONFIG}); expected the "
            "float model that they were made from"
        )


def _architecture(config: Mapping[str, Any]) -> str:
    """Returns the first architecture of a config.json; "" if it names none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _is_known(config: Mapping[str, Any]) -> bool:
    """Returns whether an architecture is known without a head."""
    return config["model_type"] in MODEL_TYPES and not architecture_of(config).decoder


def _is_encoder(name: str) -> bool:
    """Returns whether an architecture is a network without the head of another task."""
    return name.endswith(ENCODERS) and not name.endswith((*HEADS, "EncoderDecoderModel"))


def _max_length(path: Path, config: ModelConfig, transformer: Mapping[str, Any]) -> int:
    """Returns the maximum number of tokens of a text: that of the folder, at most the network's positions."""
    tokenizer_config = _json(path / "tokenizer_config.json")
    limits = (tokenizer_config.get(key) for key in ("model_max_length", "max_len"))
    length = next(filter(None, (transformer.get("max_seq_length"), *limits)), config.max_tokens)
    return min(config.max_tokens, int(length))


def _converter(
    files: Sequence[Path],
) -> Callable[[Mapping[Path, str], Mapping[str, NDArray[np.float32]], Path], None]:
    """Returns a function that joins weights as safetensors, given the files with the new names' prefix, and arrays.

    Files are shards, pickled, or Dense layers, whose names get a prefix; nothing in them is executed. Without files,
    torch is not needed.
    """
    if not files:
        from safetensors import numpy

        return lambda sources, tables, target: numpy.save_file(dict(tables), target)
    with requires(f"importing {files[0].name}", "int8-zoo[import]"):
        import torch
        from safetensors.torch import load_file, save_file

    def convert(sources: Mapping[Path, str], tables: Mapping[str, NDArray[np.float32]], target: Path) -> None:
        state: dict[str, Any] = {name: torch.from_numpy(array) for name, array in tables.items()}
        for path, prefix in sources.items():
            try:
                pickled = path.suffix != ".safetensors"
                tensors = torch.load(path, map_location="cpu", weights_only=True) if pickled else load_file(path)
                state |= {prefix + (key.removeprefix("linear.") if prefix else key): tensors[key] for key in tensors}
            except pickle.UnpicklingError as error:
                raise RequestError(
                    f"{path} is damaged or has objects other than tensors, which could run code and are not loaded; "
                    f"expected model.safetensors, or a pickled dictionary of tensors"
                ) from error
            except Exception as error:  # classes of torch
                raise RequestError(f"cannot read the weights in {path} ({one_line(error)}); copy them again") from error
        if other := next((name for name, tensor in state.items() if not isinstance(tensor, torch.Tensor)), None):
            raise RequestError(f"the weights in {next(iter(sources))} have {other}, which is no tensor")
        try:
            save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, target)
        except Exception as error:  # of the library
            raise RequestError(f"cannot read the weights in {next(iter(sources))} ({one_line(error)})") from error

    return convert
