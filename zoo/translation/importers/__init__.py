"""Importers of translation models of other toolkits; a module per format (`FORMATS`) reads an `ImportedModel`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.errors import RequestError, requires
from pipelines.core.files import require_place, write_bytes, write_json
from pipelines.models.family import Importer
from pipelines.models.hub import CARD, CardFile
from pipelines.models.record import RANGES
from zoo.translation.data.vocabularies import PIECES, SOURCE, TARGET, ImportedVocabulary
from zoo.translation.search.shortlist import SHORTLIST, load_shortlist

if TYPE_CHECKING:
    from zoo.translation.models.transformer import Transformer

FORMATS = {  # modules of this package, in order of preference
    "ctranslate2": "a folder of CTranslate2",
    "huggingface": "a folder of transformers",
    "marian": "a model of Marian, .npz or .bin",
}
PATTERNS = (
    "*.json",
    "*.spm",
    "*.model",
    "*_vocabulary.txt",
    "merges.txt",
    "README.md",
    "*.safetensors",
    "pytorch_model*.bin",
    "*.yml",
    "*.npz",
    "*.bin",
)


def recognize(path: Path) -> str:
    """Returns the format of a model.

    Args:
        path: Folder or file.

    Returns:
        A key of `FORMATS`; "" for an unknown format.
    """
    return next((name for name in FORMATS if _reader(name).recognizes(path)), "")


def supports(path: Path) -> bool:
    """Returns whether the architecture of a model is supported: a folder of transformers may have any.

    Args:
        path: Folder or file of one of `FORMATS`.
    """
    name = recognize(path)
    return name != "huggingface" or bool(_reader(name).supports(path))


def write(
    build: type[Transformer],
    path: Path,
    output: Path,
    *,
    format: str,
    source_language: str = "",
    target_language: str = "",
    shortlist: str = "",
    prompt: str = "",
) -> tuple[dict[str, Any], list[CardFile]]:
    """Writes another toolkit's model as a model folder: model.pt, the files of its vocabulary, train.json.

    Nothing in the files is executed.

    Args:
        build: Class of the network.
        path: The folder or file to import.
        output: The model folder to write.
        format: A key of `FORMATS`.
        source_language: Source language of a multilingual model.
        target_language: Target language of a multilingual model.
        shortlist: Replaces the model's own shortlist, see `zoo.translation.search.shortlist.load_shortlist`.
        prompt: Text before every source where none is chosen by a target language.

    Returns:
        Details for the card, and the files that came with the model.

    Raises:
        RequestError: The model is not supported; the message lists every reason. Nothing is written.
    """
    with requires(f"importing {FORMATS[format]}", "int8-zoo[import]"):
        import torch

    from zoo.training.runs import fill, save_weights
    from zoo.translation.export.freeze import export
    from zoo.translation.models.checkpoints import MODEL

    if path.is_dir() and output.resolve() == path.resolve():
        raise RequestError(f"found {output} as the folder of both models; choose another output")
    imported = _reader(format).read(path, source_language=source_language, target_language=target_language)
    framing = dataclasses.replace(imported.framing, prompt=prompt)
    pieces = {SOURCE: imported.pieces[0], **({TARGET: imported.pieces[1]} if len(imported.pieces) > 1 else {})}
    files = {**imported.files, PIECES: json.dumps(pieces, ensure_ascii=False).encode()}
    vocabulary = ImportedVocabulary(framing, files)  # raises, where they are none, before anything is written
    if shortlist:
        files[SHORTLIST] = load_shortlist(shortlist, vocabulary).to_bytes()
    features = {
        "form": imported.config.to_json(),
        "pre_norm": imported.pre_norm,
        "languages": imported.languages,
        "max_length": imported.max_length,
        "vocabulary": framing.to_json(),
        "search": imported.rules.to_json(),
        **({"shortlist": SHORTLIST} if SHORTLIST in files else {}),
        **({"alignment": dict(imported.alignment)} if imported.alignment else {}),
    }
    sizes = [len(side) for side in imported.pieces]
    model = build(imported.config, sizes[-1], pre_norm=imported.pre_norm, dropout=0.0, source_vocabulary=sizes[0])
    fill(model, {name: torch.from_numpy(array) for name, array in imported.state.items()}, path)
    if imported.magnitudes:
        files[RANGES] = json.dumps(_ranges(export(model), imported.magnitudes), indent=1).encode()
    for name in (CARD, MODEL, *files):
        require_place(output / name)
    for name, content in files.items():
        write_bytes(output / name, content)
    save_weights(output / MODEL, model.state_dict())
    about = {
        "features": features,
        "form": dataclasses.asdict(imported.config),
        "vocabulary": sizes,
        "imported": dict(imported.about),
    }
    write_json(output / "train.json", about)
    listed = [CardFile.of(output / name) for name in (*files, MODEL)]
    return {"preprocessing": features, "imported": dict(imported.about)}, listed


def _ranges(graph: Any, magnitudes: Mapping[str, float]) -> dict[str, float]:
    """Returns the maximum magnitude of each input of a MatMul whose weight is in `magnitudes`."""
    ranges: dict[str, float] = {}
    for node in graph.graph:
        if node.op_type == "MatMul":
            x, weight = node.inputs
            table = weight.producer()  # logits are made by the transposed table of embeddings
            name = (table.inputs[0] if table is not None and table.op_type == "Transpose" else weight).name
            if magnitude := magnitudes.get(name, 0.0):
                ranges[x.name] = max(ranges.get(x.name, 0.0), magnitude)
    return ranges


def _reader(name: str) -> Any:
    """Returns the module of a format, with `recognizes` and `read`."""
    return importlib.import_module(f"{__name__}.{name}")


def importer(build: type[Transformer]) -> Importer:
    """Returns the importer of a family.

    Args:
        build: Class of the network.
    """
    options = ("source_language", "target_language", "shortlist", "prompt")
    runtime_options = ("shortlist", "prompt")
    writer = functools.partial(write, build)
    return Importer(FORMATS, recognize, writer, options, PATTERNS, runtime_options, supports=supports)
