"""Command that exports a model to another model server, or its tables to other programs: export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import onnx_ir as ir

import zoo
from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.graph import io, query
from pipelines.models.family import HasTables
from pipelines.models.folder import ModelFolder
from pipelines.models.pipeline import PRECISIONS
from zoo.api.paths import Model

TO = ("triton", "ovms")
TABLES = ("npz", "safetensors")  # files of embedding tables
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
    """Exports a model to a model repository of NVIDIA Triton or the OpenVINO Model Server (OVMS), or its tables.

    Writes the ONNX file to output/NAME/VERSION/, with output/NAME/config.pbtxt for Triton, or an entry in
    output/config.json for OVMS. VERSION is the highest existing version plus one; if the highest version holds the same
    file, it is reused. With "npz" and "safetensors" the embedding tables of a recommender are written to the file
    `output`, float32 and int8, with what maps values to rows (see `zoo.recommenders.export.tables.export_tables`).

    Args:
        model: Name of a pretrained model, or path of a model folder.
        to: "triton" or "ovms"; or "npz" or "safetensors" for embedding tables.
        output: Folder of the model repository, whose other contents are kept; or file of the tables.
        precision: "int8" or "fp32".
        threads: Number of intra-op threads; written for Triton.

    Returns:
        {"model", "to", "path", "version", "config"}; for tables {"model", "to", "path", "columns": {column: rows},
        "bytes"}.

    Raises:
        RequestError: The model has no such tables, server or precision is unknown, the model's name is no valid folder
            name, or config.json is no OVMS configuration.
    """
    if to in TABLES:
        return _tables(zoo.load(model), to, Path(output))
    if to not in TO:
        raise RequestError(f"unknown server {to!r}; choose {', '.join(TO)} or, for tables, {' or '.join(TABLES)}")
    if precision not in ("int8", "fp32"):
        raise RequestError(f"found the precision {precision!r}; expected int8 or fp32")
    folder = zoo.load(model)
    name, source = folder.card.name, folder.ensure(PRECISIONS[precision])
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise RequestError(f"{name!r} is no valid folder name in a model repository; change the name in the card")
    repository = Path(output)
    config = repository / ("config.json" if to == "ovms" else f"{name}/config.pbtxt")
    text = (
        json.dumps(_ovms(config, name), indent=2) + "\n"
        if to == "ovms"
        else triton(io.load(source), name, source.name, threads)
    )
    version = _version(repository / name, source)
    place = repository / name / str(version)
    place.mkdir(parents=True, exist_ok=True)
    files.copy_file(source, place / source.name)
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


def _version(folder: Path, source: Path) -> int:
    newest = max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal()), default=0)
    last = folder / str(newest) / source.name
    if not newest or (last.is_file() and files.sha256(last) == files.sha256(source)):
        return max(newest, 1)
    return newest + 1


def triton(model: ir.Model, name: str, file: str, threads: int) -> str:
    """Returns config.pbtxt of a graph: a ModelConfig in protobuf text format.

    If the first axis of every input and output is dynamic, it becomes Triton's batch axis, and dynamic batching is
    enabled.

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
    batched = all(shape and shape[0] is None for shape in shapes.values())
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
            lines.append(f'{kind} {{ name: "{value.name}" data_type: {TRITON[dtype]} dims: [ {dims} ] }}')
            if batched and len(shape) == 1:  # Triton requires at least one axis
                lines[-1] = lines[-1].replace("dims: [  ]", "dims: [ 1 ] reshape { shape: [ ] }")
    if batched:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {GATHER_US} }}")
    lines += [
        "instance_group { kind: KIND_CPU count: 1 }",
        f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "{threads}" }} }}',
    ]
    return "\n".join(lines) + "\n"


def _ovms(config: Path, name: str) -> dict[str, Any]:
    """Returns config.json with an entry for the model.

    Format: https://docs.openvino.ai/2025/model-server/ovms_docs_parameters.html
    """
    content: Any = files.read_json(config) if config.is_file() else {"model_config_list": []}
    configs = content.get("model_config_list") if isinstance(content, dict) else None
    if not isinstance(configs, list) or not all(isinstance(each, dict) and "config" in each for each in configs):
        raise RequestError(f"{config} has no list model_config_list; name another folder with -o")
    own = {"config": {"name": name, "base_path": name, "target_device": "CPU"}}
    others = [each for each in configs if each["config"].get("name") != name]
    return {**content, "model_config_list": [*others, own]}
