"""Import of Hugging Face folders, as written by sentence-transformers and transformers, as model folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError, one_line, requires
from pipelines.core.files import copy_file, read_json, replacing, require_place, sha256, write_json
from pipelines.models.family import Importer
from pipelines.models.hub import CARD, CardFile
from zoo.texts.data import tokenizer
from zoo.texts.data.tokenizer import Tokenizer
from zoo.texts.models import weights
from zoo.texts.models.config import POOLINGS, Form

CONFIG, MODULES, PICKLED = "config.json", "modules.json", "pytorch_model.bin"
SAID = "config_sentence_transformers.json"  # of the model as a whole: its prompts, a cross-encoder's activation
KINDS = {  # model types of transformers
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
    "distilbert": "distilbert",
    "mpnet": "mpnet",
}
UNFIT = {  # what an encoder has that no network here can
    "modernbert": "rotary positions, layers whose tokens see their neighbours alone, and a gated feed-forward (GeGLU)",
    "nomic_bert": "rotary positions and a gated feed-forward (SwiGLU)",
    "deberta-v2": "attention that takes content and relative position apart",
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "swish",
}
PATTERNS = ("*.json", "*/config.json", "model.safetensors", PICKLED)
IDENTITY, SIGMOID = "identity", "sigmoid"  # of a cross-encoder's scores
MODES = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}  # in the keys of a pooling's config.json


def is_scorer(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a network with a head of scores."""
    return any(str(each).endswith("ForSequenceClassification") for each in config.get("architectures") or [])


def importer(scorer: bool) -> Importer:
    """The importer of sentence encoders, or, for `scorer`, of cross-encoders."""
    name = "cross-encoder" if scorer else "sentence-transformers"
    kinds = ", ".join(KINDS)
    what = f"a {'cross-encoder' if scorer else 'sentence encoder'} in a folder of Hugging Face ({kinds})"

    def recognize(path: Path) -> str:
        if not (path / CONFIG).is_file():
            return ""
        config = read_json(path / CONFIG)
        if not isinstance(config, dict) or not config.get("model_type"):
            return ""
        known = config["model_type"] in {*KINDS, *UNFIT} or (path / MODULES).is_file() or is_scorer(config)
        return name if known and is_scorer(config) == scorer else ""

    def write(
        path: Path, output: Path, *, format: str, pooling: str = "", normalize: bool = False
    ) -> tuple[dict[str, Any], list[CardFile]]:
        return _write(path, output, scorer, pooling, normalize)

    return Importer({name: what}, recognize, write, ("pooling", "normalize"), PATTERNS)


def _write(
    path: Path, output: Path, scorer: bool, pooling: str, normalize: bool
) -> tuple[dict[str, Any], list[CardFile]]:
    """The details of the card of the model in the folder `path`, and its files, copied to `output` as they are.

    Raises RequestError with all that is wrong with it; nothing is written then.
    """
    if output.resolve() == path.resolve():
        raise RequestError(f"found {output} as the folder of both models; choose another output")
    config = read_json(path / CONFIG)
    faults: list[str] = []
    features: dict[str, Any] = {}
    try:
        features = features_of(path, config, scorer, pooling, normalize)
    except RequestError as error:
        faults.append(str(error))
    source = path / weights.FILE
    if not source.is_file() and not (path / PICKLED).is_file():
        faults.append(f"there is no {weights.FILE}, nor {PICKLED}")
    if not (path / tokenizer.FILE).is_file():
        faults.append(
            f"there is no {tokenizer.FILE}; transformers writes one: "
            "AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER)"
        )
    if faults:
        raise RequestError(f"cannot import {path}: {'; '.join(faults)}")
    form = Form.from_json(features["form"])
    Tokenizer(path / tokenizer.FILE, form.vocabulary, features["max_length"])  # raises where it is of another model
    names = (CARD, weights.FILE, tokenizer.FILE, CONFIG)
    for name in names:
        require_place(output / name)
    convert = None if source.is_file() else _converter()  # raises without torch, before there is a folder
    output.mkdir(parents=True, exist_ok=True)
    with replacing(output / weights.FILE) as temporary:
        if convert is None:
            shutil.copyfile(source, temporary)
        else:
            convert(path / PICKLED, temporary)
        weights.shared_names(form, weights.read(temporary), path)  # raises for what does not fit
    for name in names[2:]:
        copy_file(path / name, output / name)
    files = [
        CardFile(name, (output / name).stat().st_size, sha256(output / name), None) for name in names if name != CARD
    ]
    return {"preprocessing": features, "weights": {"file": weights.FILE}}, files


def features_of(
    path: Path, config: Mapping[str, Any], scorer: bool, pooling: str = "", normalize: bool = False
) -> dict[str, Any]:
    """What a card says of the model in the folder `path`: form, max_length, lower, prompts, activation.

    pooling, normalize: of a folder that tells none, and whether vectors get length 1 though it does not say so.
    Raises RequestError for what no model here has.
    """
    kind = str(config["model_type"])
    if kind not in KINDS:
        raise RequestError(
            f"{kind} has {UNFIT.get(kind, 'parts that no encoder here has')}; known are {', '.join(KINDS)}"
        )
    roberta = KINDS[kind] in ("roberta", "mpnet")

    def number(*keys: str, default: Any = None) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), default)

    if config.get("position_embedding_type", "absolute") != "absolute":
        raise RequestError(f"its positions are {config['position_embedding_type']}; expected absolute ones")
    activation = str(number("hidden_act", "activation", default="gelu"))
    if activation not in ACTIVATIONS:
        raise RequestError(f"its activation is {activation}; known are {', '.join(ACTIVATIONS)}")
    modules = _modules(path)
    about = _json(path / _folder(modules, "Transformer") / "sentence_bert_config.json")
    said = _json(path / SAID)
    named = said.get("prompts")
    prompts = {str(key): str(each or "") for key, each in named.items()} if isinstance(named, dict) else {}
    labels = 0
    if scorer:
        labels = len(config.get("id2label") or {}) or int(number("num_labels", default=2))
        pooled, unit = "cls", False
    else:
        pooled, unit = _pooling(path, modules, pooling, any(prompts.values()))
    form = Form(
        kind=KINDS[kind],
        layers=number("num_hidden_layers", "n_layers"),
        width=number("hidden_size", "dim"),
        heads=number("num_attention_heads", "n_heads"),
        hidden=number("intermediate_size", "hidden_dim"),
        vocabulary=number("vocab_size"),
        positions=number("max_position_embeddings"),
        first_position=int(number("pad_token_id", default=1)) + 1 if roberta else 0,
        types=0 if kind in ("distilbert", "mpnet") else number("type_vocab_size", default=2),
        activation=ACTIVATIONS[activation],
        epsilon=float(number("layer_norm_eps", default=1e-12)),
        buckets=number("relative_attention_num_buckets", default=32) if kind == "mpnet" else 0,
        pooling=pooled,
        normalize=unit or (normalize and not scorer),
        labels=labels,
    )
    features = {
        "form": form.to_json(),
        "max_length": _longest(path, form, about),
        "lower": bool(about.get("do_lower_case", False)),
    }
    if scorer:
        features["activation"] = _activation(config, said, labels)
        features["names"] = [
            str(each) for _, each in sorted((config.get("id2label") or {}).items(), key=lambda x: int(x[0]))
        ]
    if prompts:
        features |= {"prompts": prompts, "prompt": str(said.get("default_prompt_name") or "")}
    return features


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no file."""
    found = read_json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _modules(path: Path) -> list[tuple[str, str]]:
    """(kind, folder) of the modules of sentence-transformers; [] where it is no folder of that."""
    found = read_json(path / MODULES) if (path / MODULES).is_file() else []
    try:
        return [(str(each["type"]).rsplit(".", 1)[-1], str(each["path"])) for each in found]
    except (KeyError, TypeError) as error:
        raise RequestError(f"{MODULES} is no list of modules ({error!r})") from error


def _folder(modules: list[tuple[str, str]], kind: str) -> str:
    return next((folder for each, folder in modules if each == kind), "")


def _pooling(path: Path, modules: list[tuple[str, str]], told: str, prompted: bool) -> tuple[str, bool]:
    """(pooling, whether vectors are normalized). told: "" to find it. prompted: whether the model has prompts."""
    if told and told not in POOLINGS:
        raise RequestError(f"pooling is {told!r}; choose {', '.join(POOLINGS)}")
    if unknown := [kind for kind, _ in modules if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise RequestError(f"its module {unknown[0]} has no form here; known are Transformer, Pooling and Normalize")
    normalize = any(kind == "Normalize" for kind, _ in modules)
    folder = _folder(modules, "Pooling") or "1_Pooling"
    about = _json(path / folder / CONFIG)
    if prompted and about.get("include_prompt") is False:
        raise RequestError(
            f"its pooling leaves prompts out (include_prompt in {folder}/{CONFIG}), and it has prompts ({SAID}); "
            "expected a pooling of all tokens, or no prompts"
        )
    if told:
        return told, normalize
    if not about:
        raise RequestError(
            f"there is no {folder}/{CONFIG}, which says how a text's vector is made; say it with --pooling"
        )
    mode = about.get("pooling_mode")
    modes = [mode] if mode else [key.removeprefix("pooling_mode_") for key, each in about.items() if each is True]
    found = [MODES.get(str(each), str(each)) for each in modes if each != "include_prompt"]
    if len(found) != 1 or found[0] not in POOLINGS:
        raise RequestError(f"its pooling is {' and '.join(found) or 'none'}; expected one of {', '.join(POOLINGS)}")
    return found[0], normalize


def write_modules(folder: Path, form: Form, features: Mapping[str, Any]) -> None:
    """What sentence-transformers, and an import, read beside the network: how a text's vector is made of it."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if form.normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for i, (place, kind) in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    pooling: dict[str, Any] = {"word_embedding_dimension": form.width}
    pooling |= {f"pooling_mode_{key}": form.pooling == mode for key, mode in MODES.items()}
    write_json(folder / "1_Pooling" / CONFIG, pooling)
    about = {"max_seq_length": features["max_length"], "do_lower_case": bool(features.get("lower"))}
    write_json(folder / "sentence_bert_config.json", about)
    write_json(folder / MODULES, modules)
    if prompts := features.get("prompts"):
        write_json(folder / SAID, {"prompts": prompts, "default_prompt_name": features.get("prompt") or None})


def _longest(path: Path, form: Form, about: Mapping[str, Any]) -> int:
    """The most tokens of a text: what the folder says, within the positions that the network has."""
    told = about.get("max_seq_length") or _json(path / "tokenizer_config.json").get("model_max_length") or form.longest
    return min(form.longest, int(told))


def _activation(config: Mapping[str, Any], said: Mapping[str, Any], labels: int) -> str:
    """What becomes of the logits: what sentence-transformers' CrossEncoder would do. Raises RequestError for what has
    no form here.
    """
    told = [said.get("activation_fn"), config.get("sentence_transformers", {}).get("activation_fn")]
    told.append(config.get("sbert_ce_default_activation_function"))
    name = next((str(each) for each in told if each), "")
    if not name:
        return SIGMOID if labels == 1 else IDENTITY
    kind = name.rpartition(".")[2].lower()
    if kind not in (IDENTITY, SIGMOID):
        raise RequestError(f"its scores go through {name}; known are Identity and Sigmoid")
    return kind


def _converter() -> Callable[[Path, Path], None]:
    """What writes weights that torch pickled as safetensors; nothing in them is executed. Raises RequestError without
    torch.
    """
    with requires(f"importing {PICKLED}", "int8-zoo[import]"):
        import torch
        from safetensors.torch import save_file

    def convert(path: Path, target: Path) -> None:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            save_file({name: each.contiguous().clone() for name, each in state.items()}, target)
        except Exception as error:  # pickle's and torch's own kinds
            raise RequestError(f"cannot read the weights in {path} ({one_line(error)}); copy them again") from error

    return convert
