"""Folders of static embeddings, as model2vec and sentence-transformers (`StaticEmbedding`) write them.

Folders of model2vec leave unknown tokens out, as model2vec does; in others these count, as in sentence-transformers. A
text without tokens has a vector of zeros, the last row of the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from zoo.texts.data import tokenizer
from zoo.texts.importers import sentence_modules
from zoo.texts.importers.sentence_modules import CONFIG, EMBEDDINGS, MODEL2VEC, read_object
from zoo.texts.models import weights
from zoo.texts.models.architectures.base import Floats
from zoo.texts.models.config import STATIC
from zoo.texts.models.tensor_file import TensorFile

TABLES = ("embedding.weight", "embeddings")  # names of the table: sentence-transformers, model2vec
MAPPING, WEIGHTS = "mapping", "weights"  # row and factor of each token, of model2vec


def folder_of_table(path: Path) -> Path | None:
    """Returns the folder of the table and the tokenizer; None for a folder of another model.

    Args:
        path: Folder of the model.
    """
    try:
        (kind, folder), *_ = sentence_modules.read_modules(path) or [("", "")]
    except RequestError:
        return None
    return path / folder if kind == EMBEDDINGS else None


def config_of(table: Floats) -> dict[str, Any]:
    """Returns a config.json for a table.

    Args:
        table: Result of `read_table`.
    """
    return {"model_type": STATIC, "vocab_size": len(table), "hidden_size": table.shape[1]}


def read_table(folder: Path) -> Floats:
    """Reads the vectors of all tokens, and zeros for a text without tokens: float32 [tokens + 1, columns].

    Args:
        folder: Result of `folder_of_table`.

    Raises:
        RequestError: There is no table, or its file is damaged.
    """
    if not (file := folder / weights.FILE).is_file():
        raise RequestError(f"there is no {weights.FILE} in {folder}; expected one with the table of static embeddings")
    tensors = TensorFile(file)
    name = next((name for name in TABLES if name in tensors), "")
    table = tensors[name] if name else np.zeros(0, np.float32)
    if table.ndim != 2 or not table.size:
        raise RequestError(f"{file} has {', '.join(tensors) or 'no tensors'}; expected a table named {TABLES[0]}")
    if (mapping := tensors.integers(MAPPING)) is not None:
        if mapping.ndim != 1 or not mapping.size or mapping.min() < 0 or mapping.max() >= len(table):
            raise RequestError(f"{file} maps tokens to other rows than the {len(table):,} of {name}")
        table = table[mapping]
    if WEIGHTS in tensors:
        if (factors := tensors[WEIGHTS]).shape != (len(table),):
            raise RequestError(
                f"{file} has {WEIGHTS} {list(factors.shape)}, expected one for each of {len(table):,} tokens"
            )
        table = table * factors[:, None]
    return np.concatenate([table, np.zeros((1, table.shape[1]), np.float32)])


def tokenizer_content(folder: Path) -> dict[str, Any]:
    """Returns the content of tokenizer.json without special tokens, padding and truncation.

    Args:
        folder: Result of `folder_of_table`.
    """
    return {**read_json(folder / tokenizer.FILE), "post_processor": None, "padding": None, "truncation": None}


def left_out(folder: Path) -> str:
    """Returns the unknown token of a folder of model2vec; "" where unknown tokens count.

    Args:
        folder: Result of `folder_of_table`.
    """
    if read_object(folder / CONFIG).get("model_type") != MODEL2VEC:
        return ""
    return str(read_object(folder / tokenizer.FILE).get("model", {}).get("unk_token") or "")


def max_length(folder: Path, longest: int) -> int:
    """Returns the maximum number of tokens of a text: that of tokenizer.json, at most `longest`.

    Args:
        folder: Result of `folder_of_table`.
        longest: Maximum of the network.
    """
    truncation = read_object(folder / tokenizer.FILE).get("truncation") or {}
    return min(longest, int(truncation.get("max_length") or longest))
