"""Configuration and tokenizer of a model of transformers, which an imported folder keeps to be exported again."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from pipelines.core.errors import RequestError

ORIGINAL = "original.zip"  # in a model folder
NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
    "vocab.json",
    "target_vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "merges.txt",
    "source.spm",
    "target.spm",
    "sentencepiece.bpe.model",
    "spiece.model",
)


def pack(folder: Path) -> bytes:
    """Packs the files of a folder of transformers without its weights; the same files give the same bytes.

    Args:
        folder: The folder.

    Returns:
        A .zip.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in NAMES:
            if (folder / name).is_file():
                archive.writestr(zipfile.ZipInfo(name), (folder / name).read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def unpack(path: Path, folder: Path) -> None:
    """Writes packed files.

    Args:
        path: The .zip.
        folder: Folder to make.

    Raises:
        RequestError: The file is damaged.
    """
    folder.mkdir(parents=True)
    try:
        with zipfile.ZipFile(path) as archive:
            for name in {*archive.namelist()} & {*NAMES}:
                (folder / name).write_bytes(archive.read(name))
    except (OSError, zipfile.BadZipFile) as error:
        raise RequestError(f"{path} is damaged ({error}); import the model again") from error
