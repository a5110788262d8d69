"""Commands that export a model: export (servers, tables), delta (of two models), push and verify (the hub)."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

import zoo
from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.deltas.application import apply
from pipelines.deltas.delta import Delta, open_delta, served_files, write_delta
from pipelines.deltas.transport import is_place, publish
from pipelines.graph import io, query, tensor_sizes
from pipelines.kernels import extension
from pipelines.models import stages
from pipelines.models.family import HasTables, Lowerable
from pipelines.models.folder import ModelFolder
from pipelines.models.pipeline import PRECISIONS
from pipelines.models.protocols import HuggingFaceExportable, ModulesExportable
from pipelines.models.record import NATIVE
from zoo.api.paths import Model, is_file
from zoo.huggingface.repository import Repository, is_address

TO = ("triton", "ovms")
MODULES = "sentence-transformers"  # a folder that SentenceTransformer opens
TRANSFORMERS = "huggingface"  # a folder that transformers opens
TABLES = ("npz", "safetensors")  # files of embedding tables
DATA_SIZED = frozenset(("NonMaxSuppression", "NonZero", "Unique", "Compress"))  # operators
MAX_BATCH = 64  # maximum dynamic batch size of Triton, in requests
GATHER_US = 100  # maximum queue delay of Triton, in microseconds
# https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto, enum DataType
TRITON = {
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "DOUBLE": "TYPE_FP64",
    "BFLOAT16": "TYPE_BF16",
    "INT8": "TYPE_INT8",
    "INT16": "TYPE_INT16",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "UINT8": "TYPE_UINT8",
    "UINT16": "TYPE_UINT16",
    "UINT32": "TYPE_UINT32",
    "UINT64": "TYPE_UINT64",
    "BOOL": "TYPE_BOOL",
    "STRING": "TYPE_STRING",
}


def export(model: Model, to: str, output: str | Path, *, precision: str = "int8", threads: int = 1) -> dict[str, Any]:
    """Exports a model to Triton, OpenVINO Model Server (OVMS), sentence-transformers or transformers, or its tables.

    Writes the ONNX file to output/NAME/VERSION/, with output/NAME/config.pbtxt for Triton, or an entry in
    output/config.json for OVMS. VERSION is the highest existing version plus one; if the highest version holds the same
    file, it is reused. With "npz" and "safetensors" the embedding tables of a recommender are written to the file
    `output`, float32 and int8, with the mapping of values to rows (see `zoo.recommenders.export.tables.export_tables`).
    "sentence-transformers" writes a sentence encoder or a cross-encoder as a new folder, which
    `SentenceTransformer(output, trust_remote_code=True)` or `CrossEncoder` runs on the native kernels. "huggingface"
    writes an imported translation or text-to-text model, fine-tuned or not, as a new folder for
    `AutoModelForSeq2SeqLM`, float32.

    Args:
        model: Name of a pretrained model, or path of a model folder; for Triton and OVMS also an .onnx file, float or
            int8, whose name is that of the model.
        to: "triton", "ovms", "sentence-transformers" or "huggingface"; or "npz" or "safetensors" for embedding tables.
        output: Folder of the model repository (other contents are kept), or a new folder, or file of the tables.
        precision: "int8" or "fp32".
        threads: Number of intra-op threads; written for Triton and sentence-transformers.

    Returns:
        {"model", "to", "path", "version", "config"}; for tables {"model", "to", "path", "columns": {column: rows},
        "bytes"}; for sentence-transformers and huggingface {"model", "to", "path", "files": {name: bytes}}.

    Raises:
        RequestError: The model has no such tables, server or precision is unknown, the model's name is no valid folder
            name, or config.json is no OVMS configuration.
    """
    if to in TABLES:
        return _tables(zoo.load(model), to, Path(output))
    if to not in (targets := (*TO, MODULES, TRANSFORMERS)):
        raise RequestError(f"unknown target {to!r}; choose {', '.join(targets)} or, for tables, {' or '.join(TABLES)}")
    if precision not in ("int8", "fp32"):
        raise RequestError(f"found the precision {precision!r}; expected int8 or fp32")
    if to in TO and is_file(model):
        path = Path(model)
        return _to_repository(re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._"), path, to, Path(output), threads)
    folder = zoo.load(model)
    if to == TRANSFORMERS:
        if not isinstance(folder.entry, HuggingFaceExportable):
            raise RequestError(f"{folder.card.name} is no translation model that was imported from transformers")
        report = folder.entry.export_huggingface(folder, Path(output))
        stages.remove_intermediate_files(folder)  # the weights, where they were made for this export
        return {"model": folder.card.name, "to": to, **report}
    if to == MODULES:
        if not isinstance(folder.entry, ModulesExportable):
            raise RequestError(f"{folder.card.name} embeds no texts; expected a sentence encoder")
        report = folder.entry.export_modules(folder, Path(output), precision, threads)
        return {"model": folder.card.name, "to": to, **report}
    return _to_repository(folder.card.name, folder.ensure(PRECISIONS[precision]), to, Path(output), threads)


def _to_repository(name: str, source: Path, to: str, repository: Path, threads: int) -> dict[str, Any]:
    """Adds an ONNX file to a model repository of Triton or OVMS."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise RequestError(f"{name!r} is no valid folder name in a model repository; change the name in the card")
    if files.starts_with(source, files.GZIP):
        raise RequestError(f"{source} is compressed, which model servers do not read; run: gunzip -k {source}")
    model = io.load(source)  # also for OVMS: a file that is no model does not get there
    config = repository / ("config.json" if to == "ovms" else f"{name}/config.pbtxt")
    text = (
        json.dumps(_ovms(config, name), indent=2) + "\n" if to == "ovms" else triton(model, name, source.name, threads)
    )
    files.require_place(config)
    names = [*tensor_sizes.external_files(source), source.name]
    version = _version(repository / name, source.parent, names)
    place = repository / name / str(version)
    for file in names:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        files.copy_file(source.parent / file, place / file)
    files.write_text(config, text)
    return {"model": name, "to": to, "path": str(place), "version": version, "config": str(config)}


def _tables(folder: ModelFolder, to: str, output: Path) -> dict[str, Any]:
    """Writes the embedding tables of a model."""
    if not isinstance(folder.entry, HasTables):
        able = [name for name, entry in zoo.entries().items() if isinstance(entry, HasTables)]
        raise RequestError(f"{folder.card.name} has no embedding tables; these families have some: {', '.join(able)}")
    if output.suffix != f".{to}":
        raise RequestError(f"found the output {output}, expected a file of the suffix .{to}")
    files.require_place(output)
    return folder.entry.export_tables(folder, to, output)


def delta(old: Model, new: Model, output: Model, *, apply: bool = False, whole: bool = False) -> dict[str, Any]:
    """Writes the difference of two models, for `zoo serve --deltas` and for copies of the older model.

    Both models are built first, also for the native kernels where they run there. A delta has the rows of tables that
    differ in the files that servers of int8 run, and all other bytes of these files that differ.

    Args:
        old: Folder of the older model.
        new: Folder of the newer model, of the same family; with `apply` the file of a delta.
        output: File of the delta; or a folder of deltas or a URL (see `pipelines.deltas.transport`), where the delta
            gets the next number. With `apply` the folder of the newer model.
        apply: Apply a delta to the older model instead.
        whole: Write the differences of all files, also of the float model and its weights, as `apply` needs.

    Returns:
        {"path", "parent", "digest", "family", "rows", "columns", "bytes"}; see `describe`.

    Raises:
        RequestError: The models are of different families, or a delta does not follow the model.
    """
    if apply:
        if whole:
            raise RequestError("--all has no effect with --apply; the delta has what it was written with")
        return apply_delta(old, new, output)
    before, after = zoo.load(old), zoo.load(new)
    if before.entry.name != after.entry.name:
        raise RequestError(
            f"found the families {before.entry.name} ({old}) and {after.entry.name} ({new}), expected two models of one"
        )
    with contextlib.ExitStack() as stack:
        published = is_place(output)
        path = Path(output)
        if published:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "delta.zoo"
        else:
            files.require_place(path)
        for folder in (before, after):
            _build_served(folder)
        columns = after.entry.changed_rows(before, after) if isinstance(after.entry, HasTables) else {}
        names = None if whole else {*served_files(after.path), *after.entry.files}
        made = write_delta(before.path, after.path, path, after.entry.name, columns, names)
        size = path.stat().st_size
        place = f"{str(output).rstrip('/')}/{publish(path, output)}" if published else str(path)
    return {"path": place, **describe(made), "bytes": size}


def apply_delta(old: Model, source: Model, output: Model) -> dict[str, Any]:
    """Writes the newer model of a delta, the same files byte for byte.

    Args:
        old: Folder of the older model.
        source: File of the delta.
        output: Folder of the newer model.

    Returns:
        See `delta`.

    Raises:
        RequestError: The delta was made from another model, is damaged, has only the served files, or `output` holds
            something else.
    """
    folder, target = zoo.load(old), Path(output)
    files.require_free(target)
    _build_served(folder)
    with open_delta(Path(source)) as opened:
        with files.making_folder(target) as made:
            apply(opened, folder.path, made)
        return {"path": str(target), **describe(opened), "bytes": Path(source).stat().st_size}


def describe(opened: Delta) -> dict[str, Any]:
    """Describes a delta.

    Args:
        opened: The delta.

    Returns:
        {"parent", "digest": digests of both models, "family", "whole": whether it has all files of the model, "rows":
        table rows in the served files, "columns": see `pipelines.models.family.HasTables.changed_rows`}.
    """
    columns = {name: dict(counts) for name, counts in opened.columns.items()}
    return {
        "parent": opened.parent,
        "digest": opened.digest,
        "family": opened.family,
        "whole": opened.whole,
        "rows": opened.rows,
        "columns": columns,
    }


def push(
    model: Model,
    repository: str,
    *,
    private: bool = False,
    create: bool = False,
    signature: str | Path | None = None,
) -> dict[str, Any]:
    """Uploads a model to the Hugging Face Hub, built and with a model card; `zoo.load(repository)` runs it at once.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        repository: hf://ORG/NAME[@BRANCH].
        private: Make the new repository private; requires `create`.
        create: Make the repository if there is none.
        signature: PEM file of the private key that signs the files.

    Returns:
        {"model", "repository", "url", "commit", "files": {name: bytes}}.

    Raises:
        RequestError: The address is invalid, or there is no such repository or no access to it.
        ZooError: The network or the hub failed.
    """
    from zoo.huggingface import model_card
    from zoo.huggingface.push import push as upload

    if not is_address(repository):
        raise RequestError(f"found the repository {repository!r}, expected hf://ORG/NAME")
    if private and not create:
        raise RequestError("--private is for a new repository; add --create")
    if is_address(model):
        raise RequestError(f"found {model} as the model, expected a folder or the name of a pretrained model")
    target = Repository.parse(repository)
    if not Path(model).is_dir():
        zoo.hub().fetch(str(model))  # the files that int8 needs not, too
    folder = zoo.load(model)
    _build_served(folder)
    for file in folder.card.files:
        folder.verify(file.name)
    shipped = folder.path if Path(model).is_dir() else zoo.hub().shipped(folder.card.name)
    key = None if signature is None else Path(signature)
    return upload(folder, target, shipped / model_card.REPORTS, private=private, create=create, private_key=key)


def verify(model: Model, key: str | Path) -> dict[str, Any]:
    """Verifies the signature of a model that was pushed with `signature`: no file is missing, new or different.

    Args:
        model: hf://ORG/NAME[@REVISION], or a folder with all files of the repository.
        key: PEM file of the public key.

    Returns:
        {"model", "path", "key", "files": names of the signed files}.

    Raises:
        RequestError: The model has no signature, or the key is invalid.
        ZooError: The signature does not match.
    """
    from zoo.huggingface import signing

    folder = Repository.parse(str(model)).snapshot() if is_address(model) else Path(model)
    if not folder.is_dir():
        raise RequestError(f"found no folder {model}, expected a folder or hf://ORG/NAME")
    return {"model": str(model), "path": str(folder), "key": str(key), "files": signing.verify(folder, Path(key))}


def _build_served(folder: ModelFolder) -> None:
    """Builds the files that a server runs."""
    folder.ensure(PRECISIONS["int8"])
    if isinstance(folder.entry, Lowerable) and extension.isas():
        with contextlib.suppress(RequestError):  # a model that does not run there
            folder.ensure(NATIVE)


def _version(folder: Path, source: Path, names: Sequence[str]) -> int:
    """Version of a model: the newest one if it holds the same files."""
    newest = max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal()), default=0)
    last = folder / str(newest)
    same = ((last / name).is_file() and files.sha256(last / name) == files.sha256(source / name) for name in names)
    if not newest or all(same):
        return max(newest, 1)
    return newest + 1


def triton(model: ir.Model, name: str, file: str, threads: int) -> str:
    """Returns config.pbtxt of a graph: a ModelConfig in protobuf text format.

    If the first axis of every input and output is dynamic, it becomes Triton's batch axis, and dynamic batching is
    enabled. It is none if the data determine the number of rows of an output, such as all boxes of a batch.

    Args:
        model: ONNX graph.
        name: Name of the model in the repository.
        file: Name of the model file.
        threads: Number of intra-op threads.

    Returns:
        The text.

    Raises:
        RequestError: The shape or dtype of an input or output is not supported by Triton.
    """
    ports = {"input": list(model.graph.inputs), "output": list(model.graph.outputs)}
    shapes = {value.name: query.dimensions(value) for values in ports.values() for value in values}
    batched = all(shape and shape[0] is None for shape in shapes.values()) and not _counts_rows(model)
    lines = [
        f'name: "{name}"',
        'platform: "onnxruntime_onnx"',
        f'default_model_filename: "{file}"',
        f"max_batch_size: {MAX_BATCH if batched else 0}",
    ]
    for kind, values in ports.items():
        for value in values:
            shape, dtype = shapes[value.name], value.dtype.name if value.dtype else "none"
            if shape is None or dtype not in TRITON:
                raise RequestError(f"{kind} {value.name} is {dtype} of shape {shape}, which Triton cannot hold")
            dims = ", ".join("-1" if size is None else str(size) for size in shape[batched:])
            name_text = json.dumps(value.name, ensure_ascii=False)  # the escapes of protobuf's text format
            lines.append(f"{kind} {{ name: {name_text} data_type: {TRITON[dtype]} dims: [ {dims} ] }}")
            if batched and len(shape) == 1:  # Triton requires at least one axis
                lines[-1] = lines[-1].replace("dims: [  ]", "dims: [ 1 ] reshape { shape: [ ] }")
    if batched:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {GATHER_US} }}")
    lines += [
        "instance_group { kind: KIND_CPU count: 1 }",
        f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "{threads}" }} }}',
    ]
    return "\n".join(lines) + "\n"


def _counts_rows(model: ir.Model) -> bool:
    """Returns whether the data may determine the number of rows of an output."""
    axes = {str(value.shape[0]) for value in model.graph.inputs if value.shape}
    rows = {str(value.shape[0]) for value in model.graph.outputs if value.shape}
    return not rows <= axes - {"None"} and any(node.op_type in DATA_SIZED for node in model.graph.all_nodes())


def _ovms(config: Path, name: str) -> dict[str, Any]:
    """Returns config.json with an entry for the model.

    Format: https://docs.openvino.ai/2025/model-server/ovms_docs_parameters.html
    """
    content: Any = files.read_json(config) if config.is_file() else {"model_config_list": []}
    configs = content.get("model_config_list") if isinstance(content, dict) else None
    if not isinstance(configs, list) or not all(isinstance(config, dict) and "config" in config for config in configs):
        raise RequestError(f"{config} has no list model_config_list; name another folder with -o")
    own = {"config": {"name": name, "base_path": name, "target_device": "CPU"}}
    others = [config for config in configs if config["config"].get("name") != name]
    return {**content, "model_config_list": [*others, own]}
