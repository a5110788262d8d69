"""Export to a folder of transformers, the inverse of `zoo.translation.importers.huggingface`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import files
from pipelines.core.errors import RequestError, requires
from pipelines.models.folder import ModelFolder
from zoo.translation.data.vocabularies import SOURCE, TARGET, Framing
from zoo.translation.importers.architectures.base import QUICK, SIDES
from zoo.translation.importers.huggingface_folder import CONFIG, GENERATION, TOKENIZER
from zoo.translation.importers.huggingface_vocabulary import VocabularyFolder
from zoo.translation.importers.imported import FIRST, Renumbering
from zoo.translation.importers.original import ORIGINAL, unpack
from zoo.translation.models.checkpoints import load_model

if TYPE_CHECKING:
    from zoo.translation.models.transformer import Transformer

WEIGHTS = "model.safetensors"


def export_huggingface(folder: ModelFolder, build: type[Transformer], output: Path) -> dict[str, Any]:
    """Writes an imported model, fine-tuned or not, as a folder of transformers.

    Args:
        folder: The model folder.
        build: Class of the network.
        output: Folder to make, which must not exist or be empty.

    Returns:
        {"path", "files": {name: bytes}}.

    Raises:
        RequestError: The model was not imported from transformers, or the folder holds something.
    """
    if not (folder.path / ORIGINAL).is_file():
        raise RequestError(
            f"found no {ORIGINAL} in {folder.path}, the configuration and tokenizer of transformers; import the model "
            "from a folder of transformers"
        )
    files.require_free(output, "choose another")
    with requires("writing weights of transformers", "int8-zoo[import]"):
        import safetensors.numpy
    framing = Framing.from_json(folder.preprocessing["vocabulary"])
    with files.making_folder(output) as made:
        unpack(folder.verify(ORIGINAL), made)
        reader = VocabularyFolder(made, {SOURCE: "", TARGET: ""})
        tensors, language = _tensors(reader, load_model(folder.path, build)[0], framing)
        safetensors.numpy.save_file(tensors, made / WEIGHTS, metadata={"format": "pt"})
        _settle(made, reader, framing, language)
    return {"path": str(output), "files": {path.name: path.stat().st_size for path in sorted(output.iterdir())}}


def _tensors(
    reader: VocabularyFolder, network: Transformer, framing: Framing
) -> tuple[dict[str, NDArray[np.float32]], int]:
    """Returns the tensors by their names in transformers, and the original token of the target language, or -1."""
    architecture, unknown, end = reader.numbers()
    state = {name: tensor.detach().cpu().numpy() for name, tensor in network.state_dict().items()}
    model_config = network.config
    target = _renumbering(len(state["embedding.weight"]), unknown, end)
    tensors: dict[str, NDArray[np.float32]] = {}
    source_name, target_name, shared_name, output_name = architecture.tables
    decoder = state["embedding.weight"][target.ours]
    encoder = decoder
    apart = shared_name == target_name  # no table stands for others
    if model_config.shared_source and _shares_source(reader.config) and not apart:
        tensors[shared_name] = decoder
    else:
        if not model_config.shared_source:
            table = state["source_embedding.weight"]
            encoder = table[_renumbering(len(table), unknown, end).ours]
        tensors |= {source_name: encoder, target_name: decoder}
    if apart or not (model_config.tied_output and reader.config.get("tie_word_embeddings", True)):
        tensors[output_name] = state["output_weight"][target.ours] if not model_config.tied_output else decoder
    if architecture.bias:
        tensors["final_logits_bias"] = state["output_bias"][target.ours][None]
    if architecture.positions in ("learned", "interleaved rates"):
        for side, name in zip(SIDES, ("source_positions", "positions"), strict=True):
            offset = architecture.offset if architecture.positions == "learned" else 0
            unused = np.zeros((offset, model_config.width), np.float32)
            tensors[f"model.{side}.embed_positions.weight"] = np.concatenate([unused, state[name]])
    factors = {"inner.weight": 1 / QUICK, "inner.bias": 1 / QUICK, "outer.weight": QUICK}
    quick = reader.config.get("activation_function") == "quick_gelu"
    for name, tensor in state.items():
        if name.partition(".")[0] in (
            "encoder",
            "decoder",
            "encoder_norm",
            "decoder_norm",
            "source_norm",
            "target_norm",
        ):
            _, feed, part = name.partition(".feed.")
            factor = np.float32(factors.get(part, 1.0) if quick and feed else 1.0)
            tensors[architecture.name(name, model_config)] = tensor * factor
    language = (framing.languages or {}).get(framing.target_language, -1) if framing.prefixed else -1
    original = int(np.flatnonzero(target.ours == language)[0]) if language >= 0 else -1
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}, original


def _shares_source(config: Mapping[str, Any]) -> bool:
    """Returns whether source and target share a table of embeddings in transformers."""
    return bool(config.get("share_encoder_decoder_embeddings", True))


def _renumbering(tokens: int, unknown: int, end: int) -> Renumbering:
    """Returns the renumbering that gave a vocabulary of so many tokens."""
    return Renumbering(tokens - FIRST + sum(token >= 0 for token in (unknown, end)), unknown, end)


def _settle(folder: Path, reader: VocabularyFolder, framing: Framing, language: int) -> None:
    """Writes the precision of the weights and the chosen languages into the configuration.

    Args:
        folder: The folder of transformers.
        reader: Its reader.
        framing: Tokenizer and languages.
        language: Original token that translations begin with; -1: unchanged.
    """
    config = {name: value for name, value in reader.config.items() if name != "torch_dtype"}
    files.write_json(folder / CONFIG, {**config, "dtype": "float32"})
    generation = folder / GENERATION
    if language >= 0 and generation.is_file():
        files.write_json(generation, {**files.read_json(generation), "forced_bos_token_id": language})
    languages = {"src_lang": framing.source_language, "tgt_lang": framing.target_language if language >= 0 else ""}
    before = {key: str(reader.tokenizer.get(key) or "").removeprefix("__").removesuffix("__") for key in languages}
    chosen = {key: name for key, name in languages.items() if name and before[key] and before[key] != name}
    if chosen:
        files.write_json(folder / TOKENIZER, {**reader.tokenizer, **chosen})
