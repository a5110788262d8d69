r"""A model zoo with optimized INT8 pipelines for CPUs.

    import zoo
    ctr = zoo.pipeline("wide-deep-criteo", precision="int8", engine="auto", threads=1)
    ctr(["\t".join(row) for row in rows])

`names` lists the pretrained models, `load` opens the folder of a model, `pipeline` opens it for inference. The commands
of `zoo` are functions of the same name (`zoo.evaluate`, `zoo.benchmark`, ...); `zoo import` is `zoo.import_model`. They
are loaded from `zoo.api` on first use, so that importing `zoo` is fast.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.registry import BUILT_IN, SHIPPED, entries, entry, entry_of, hub, located, locations, names

if TYPE_CHECKING:
    from pipelines.engines.plan import PlannedSession
    from pipelines.models.folder import ModelFolder
    from pipelines.models.pipeline import Pipeline

VERBS = (
    "schema",
    "info",
    "download",
    "run",
    "rank",
    "serve",
    "train",
    "finetune",
    "freeze",
    "rewrite",
    "calibrate",
    "quantize",
    "tune",
    "evaluate",
    "benchmark",
    "build",
    "plan",
    "export",
    "delta",
    "push",
    "verify",
    "doctor",
)

logger = logging.getLogger(__name__)

__all__ = [
    "BUILT_IN",
    "ENTRIES",
    "SHIPPED",
    "annotate",
    "entries",
    "entry",
    "entry_of",
    "hub",
    "load",
    "located",
    "names",
    "open_plan",
    "pipeline",
    "import_model",
    *VERBS,
]


def load(model: str | Path, **options: Any) -> ModelFolder:
    """Opens the folder of a model, or an ONNX file of an image network as one.

    A pretrained model is downloaded if it is not in the cache. Its float graphs are made from its float16 weights on
    first use, if the cache is writable. If the model ships as int8 and its weights are not on the machine, they are
    downloaded when a build stage needs them.

    Args:
        model: Name of a pretrained model, path of a model folder, hf://ORG/NAME[@REVISION] of the Hugging Face Hub, or
            path of an .onnx file.
        **options: Of an .onnx file, see `pipeline`.

    Returns:
        The model folder.

    Raises:
        RequestError: The name is unknown, or the folder holds no model; or there are options without an .onnx file.
    """
    from pipelines.core.errors import RequestError, ZooError
    from pipelines.core.files import is_onnx
    from pipelines.models.folder import open_folder
    from pipelines.models.record import HALF
    from pipelines.models.stages import build

    model = located(model)
    if is_onnx(model):
        network: ModelFolder = importlib.import_module("zoo.vision.networks.family").open_network(model, **options)
        return network
    if options:
        raise RequestError(f"--{next(iter(options))} is for .onnx files; {model} has its own, leave the option out")
    if Path(model).is_dir():
        folder = open_folder(model, entry)
        if folder.source:
            return replace(
                folder, fetch=lambda file: importlib.import_module("zoo.api.importing").restore(folder, file)
            )
        return folder
    model_hub, name = hub(), str(model)
    ships_int8 = any(file.name == "int8.onnx" for file in model_hub.card(name).files)
    folder = open_folder(
        model_hub.fetch(name, later=[HALF] if ships_int8 else []), entry, lambda file: model_hub.fetch(name, [file])
    )
    if ships_int8 and folder.is_listed(HALF) and not (folder.path / HALF).is_file():
        return folder
    try:
        build(folder, until="rewritten.onnx")
    except (OSError, ZooError) as error:  # int8 runs without them; stages that need them raise
        logger.info("the float graphs of %s are not made: %s", model, error)
    return folder


def pipeline(
    model: str | Path,
    precision: str = "int8",
    engine: str = "auto",
    threads: int = 1,
    batch_size: int | None = None,
    **options: Any,
) -> Pipeline:
    """Opens a model for inference on raw input.

    The pipeline is called with raw samples; its parts are `preprocess`, `predict` and `postprocess` (see
    `pipelines.models.pipeline.Pipeline`).

    Args:
        model: Name of a pretrained model, path of a model folder, hf://ORG/NAME[@REVISION] of the Hugging Face Hub, or
            path of an .onnx file of an image network.
        precision: "int8", "fp32", or "bf16" (the fp32 graph computed in bfloat16 by OpenVINO). An .onnx file runs as it
            is, unless this is "bf16".
        engine: "auto" (the fastest engine on this machine), "onnxruntime", "openvino" or "native".
        threads: Number of intra-op threads.
        batch_size: Samples of one inference; None for the default of the family.
        **options: Of an .onnx file: `task` ("detect", "segment", "classify" or "embed"), `labels`, `preprocess`,
            `confidence` and `iou`, see `zoo.vision.networks.family.open_network`.

    Returns:
        The pipeline of the model's family.

    Raises:
        RequestError: There is no such model, or the engine cannot run it in this precision.
    """
    folder = load(model, **options)
    return folder.entry.pipeline()(folder, precision, engine, threads, batch_size)


def open_plan(path: str | Path) -> PlannedSession:
    """Opens a plan file written by `zoo.plan`.

    Args:
        path: Path of the plan file.

    Returns:
        A session; `run` takes batches of any size (see `pipelines.engines.plan.open_plan`).

    Raises:
        RequestError: The file is no plan, or it must be rebuilt and its model is missing.
    """
    from pipelines.engines import catalog, plan

    return plan.open_plan(path, catalog.load)


def __getattr__(name: str) -> Any:
    if name == "ENTRIES":
        return locations()
    if name == "annotate":
        return importlib.import_module("zoo.frames").annotate
    if name in (*VERBS, "import_model"):
        return getattr(importlib.import_module("zoo.api"), name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
