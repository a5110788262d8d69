"""A model zoo with optimized INT8 pipelines for CPUs.

    import zoo
    ctr = zoo.pipeline("wide-deep-criteo", precision="int8", engine="auto", threads=1)
    ctr(["\\t".join(row) for row in rows])

`names` and `load` find models, `pipeline` opens one. Verbs of the `zoo` command are functions of the same name here
(`zoo.evaluate`, `zoo.benchmark`, ...; `zoo.import_model`), loaded from `zoo.api` on first use; nothing heavy is
imported with the package.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.registry import BUILT_IN, SHIPPED, entries, entry, entry_of, hub, locations, names

if TYPE_CHECKING:
    from pipelines.engines.plan import PlannedSession
    from pipelines.models.folder import ModelFolder
    from pipelines.models.pipeline import Pipeline

VERBS = (
    "schema",
    "info",
    "download",
    "run",
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
    "doctor",
)

logger = logging.getLogger(__name__)

__all__ = [
    "BUILT_IN",
    "ENTRIES",
    "SHIPPED",
    "entries",
    "entry",
    "entry_of",
    "hub",
    "load",
    "names",
    "open_plan",
    "pipeline",
    "import_model",
    *VERBS,
]


def load(model: str | Path) -> ModelFolder:
    """The folder of a pretrained model (by name; downloaded if need be) or of one that a verb wrote (by path).

    The float graphs of a pretrained model are made from its float16 weights, the first time, where the cache can be
    written; where neither package nor cache has these weights and the model ships as int8, they are fetched when a
    stage needs them. Raises RequestError for an unknown name or a folder that holds no model.
    """
    from pipelines.core.errors import ZooError
    from pipelines.models.folder import open_folder
    from pipelines.models.record import HALF
    from pipelines.models.stages import build

    if Path(model).is_dir():
        return open_folder(model, entry)
    known, name = hub(), str(model)
    ships_int8 = any(file.name == "int8.onnx" for file in known.card(name).files)
    folder = open_folder(
        known.fetch(name, later=[HALF] if ships_int8 else []), entry, lambda file: known.fetch(name, [file])
    )
    if ships_int8 and folder.given(HALF) and not (folder.path / HALF).is_file():
        return folder
    try:
        build(folder, until="rewritten.onnx")
    except (OSError, ZooError) as error:  # int8 runs without them; who needs them is told
        logger.info("the float graphs of %s are not made: %s", model, error)
    return folder


def pipeline(
    model: str | Path, precision: str = "int8", engine: str = "auto", threads: int = 1, batch_size: int | None = None
) -> Pipeline:
    """Open a model for use: raw input -> results, and `preprocess`, `predict`, `postprocess` for the parts (see
    `pipelines.models.pipeline`).
    """
    folder = load(model)
    return folder.entry.pipeline()(folder, precision, engine, threads, batch_size)


def open_plan(path: str | Path) -> PlannedSession:
    """Open a plan file that `zoo plan` wrote; `run` takes batches of any size. See
    `pipelines.engines.plan.open_plan`.
    """
    from pipelines.engines import catalog, plan

    return plan.open_plan(path, catalog.load)


def __getattr__(name: str) -> Any:
    if name == "ENTRIES":
        return locations()
    if name in (*VERBS, "import_model"):
        return getattr(importlib.import_module("zoo.api"), name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
