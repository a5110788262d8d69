"""A model zoo with optimized INT8 pipelines for CPUs.

    import zoo
    ctr = zoo.pipeline("wide-deep-criteo", precision="int8", engine="auto", threads=1)
    ctr(["\\t".join(row) for row in rows])

`names` and `load` find models, `pipeline` opens one. Every verb of the `zoo` command is a function of the same name
here (`zoo.evaluate`, `zoo.benchmark`, ...), loaded from `zoo.verbs` on first use; nothing heavy is imported with the
package.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.engines.plan import PlannedSession
    from pipelines.models.build import ModelFolder
    from pipelines.models.entry import Entry
    from pipelines.models.pipeline import Pipeline

SHIPPED = Path(__file__).parent / "weights"
ENTRIES = {
    "wide-deep": "zoo.wide_deep:ENTRY",
    "resnet50": "zoo.resnet:RESNET50",
    "resnet26d": "zoo.resnet:RESNET26D",
    "mobilenet-v1": "zoo.mobilenet:MOBILENET_V1",
    "mobilenet-v2": "zoo.mobilenet:MOBILENET_V2",
    "transformer-mt": "zoo.transformer_mt:ENTRY",
}
VERBS = (
    "info",
    "download",
    "run",
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

__all__ = ["ENTRIES", "SHIPPED", "entry", "load", "names", "open_plan", "pipeline", *VERBS]


def names() -> list[str]:
    """The pretrained models."""
    from pipelines.models.hub import Hub

    return Hub(SHIPPED).names()


def entry(name: str) -> Entry:
    """The entry (architecture) called `name`, e.g. "wide-deep". Raises RequestError for an unknown one."""
    from pipelines.core.errors import RequestError

    if name not in ENTRIES:
        raise RequestError(f"unknown model family {name!r}; choose one of {', '.join(ENTRIES)}")
    module, attribute = ENTRIES[name].split(":")
    found: Entry = getattr(importlib.import_module(module), attribute)
    return found


def load(model: str | Path) -> ModelFolder:
    """The folder of a pretrained model (by name; downloaded if need be) or of one that a verb wrote (by path).

    The float graphs of a pretrained model are made from its float16 weights beside them, the first time, where the
    cache can be written. Raises RequestError for an unknown name or a folder that holds no model.
    """
    from pipelines.core.errors import ZooError
    from pipelines.models.build import build, open_folder
    from pipelines.models.hub import Hub

    if Path(model).is_dir():
        return open_folder(model, entry)
    folder = open_folder(Hub(SHIPPED).fetch(str(model)), entry)
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
    opened: Pipeline = folder.entry.part("pipeline")(folder, precision, engine, threads, batch_size)
    return opened


def open_plan(path: str | Path) -> PlannedSession:
    """Open a plan file that `zoo plan` wrote; `run` takes batches of any size. See
    `pipelines.engines.plan.open_plan`.
    """
    from pipelines.engines import catalog, plan

    return plan.open_plan(path, catalog.load)


def __getattr__(name: str) -> Any:
    if name in VERBS:
        return getattr(importlib.import_module("zoo.verbs"), name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
