"""Export to a folder that sentence-transformers opens on this project's kernels."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.models.folder import ModelFolder
from pipelines.models.hub import CARD, CardFile
from pipelines.models.pipeline import PRECISIONS
from zoo.texts.data import tokenizer
from zoo.texts.models.config import SIGMOID, ModelConfig
from zoo.texts.sentence_encoder import COSINE, PairRanker, SentenceEncoder

PACKAGE = "zoo.texts.export.native_encoder"
ENCODER, RANKER = "NativeEncoder", "NativeRanker"
ACTIVATIONS = {SIGMOID: "torch.nn.modules.activation.Sigmoid"}  # others: Identity
IDENTITY = "torch.nn.modules.linear.Identity"
SETTINGS = "native_encoder.json"  # of the module


def export_modules(folder: ModelFolder, output: Path, precision: str, threads: int) -> dict[str, Any]:
    """Writes a model as a folder of sentence-transformers with one module, `NativeEncoder` or `NativeRanker`.

    Args:
        folder: Model folder of a sentence encoder, or of a cross-encoder with one score.
        output: Folder to make, which must not exist or be empty.
        precision: "int8" or "fp32".
        threads: Number of intra-op threads.

    Returns:
        {"path", "files": {name: bytes}}.

    Raises:
        RequestError: The model embeds or ranks no texts, or the folder holds something.
    """
    pipeline_type, features = folder.entry.pipeline(), folder.preprocessing
    settings: dict[str, Any] = {
        "prompts": features.get("prompts", {}),
        "default_prompt_name": features.get("prompt") or None,
    }
    if issubclass(pipeline_type, SentenceEncoder):
        name, similarity = ENCODER, features.get("similarity", COSINE)
        settings |= {"model_type": "SentenceTransformer", "similarity_fn_name": similarity}
    elif issubclass(pipeline_type, PairRanker) and ModelConfig.from_json(features["form"]).labels == 1:
        name, activation = RANKER, ACTIVATIONS.get(features.get("activation", ""), IDENTITY)
        settings |= {"model_type": "CrossEncoder", "activation_fn": activation}
    else:
        raise RequestError(f"{folder.card.name} embeds no texts; expected a sentence encoder, or a ranker of one score")
    if output.is_dir() and any(output.iterdir()):
        raise RequestError(f"{output} holds other files; choose a new folder")
    place = f"0_{name}"
    module = {"idx": 0, "name": "0", "path": place, "type": f"{PACKAGE}.{name}"}
    copy_model(folder, output / place, precision)
    files.write_json(output / place / SETTINGS, {"precision": precision, "threads": threads})
    files.write_json(output / "config_sentence_transformers.json", settings)
    files.write_text(output / "modules.json", json.dumps([module], indent=2) + "\n")
    written = {str(path.relative_to(output)): path.stat().st_size for path in output.rglob("*") if path.is_file()}
    return {"path": str(output), "files": dict(sorted(written.items()))}


def copy_model(folder: ModelFolder, output: Path, precision: str) -> None:
    """Copies what inference in one precision needs: the graph, the tokenizer and a card that lists both.

    Args:
        folder: Model folder.
        output: Folder to make.
        precision: "int8" or "fp32".
    """
    output.mkdir(parents=True, exist_ok=True)
    sources = [folder.ensure(PRECISIONS[precision]), folder.verify(tokenizer.FILE)]
    for source in sources:
        files.copy_file(source, output / source.name)
    listed = tuple(CardFile.of(output / source.name) for source in sources)
    details = {key: value for key, value in folder.card.details.items() if key != "weights"}  # which stay behind
    files.write_json(output / CARD, dataclasses.replace(folder.card, files=listed, details=details).to_json())
