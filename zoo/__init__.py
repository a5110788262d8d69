"""A model zoo with optimized INT8 pipelines for CPUs.

    import zoo
    ctr = zoo.pipeline("wide-deep-criteo", precision="int8", engine="auto", threads=1)
    ctr(["\\t".join(row) for row in rows])

`names` and `load` find models, `pipeline` opens one. Verbs of the `zoo` command are functions of the same name here
(`zoo.evaluate`, `zoo.benchmark`, ...; `zoo.import_model`), loaded from `zoo.api` on first use; nothing heavy is
imported with the package.

Another package adds families and models by entry points of its metadata: in the group `int8_zoo.families` a family's
name = "module:ENTRY", in the group `int8_zoo.models` any name = "package", whose folder holds NAME/card.json and the
files that ship.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.engines.plan import PlannedSession
    from pipelines.models.entry import Entry
    from pipelines.models.folder import ModelFolder
    from pipelines.models.hub import Hub
    from pipelines.models.pipeline import Pipeline

SHIPPED = Path(__file__).parent / "weights"
FAMILIES, MODELS = "int8_zoo.families", "int8_zoo.models"  # groups of entry points
BUILT_IN = {
    "wide-deep": "zoo.wide_deep:ENTRY",
    "wide-deep-log": "zoo.wide_deep:LOGS",
    "deepfm": "zoo.deepfm:ENTRY",
    "dcn-v2": "zoo.dcn_v2:ENTRY",
    "dlrm": "zoo.dlrm:ENTRY",
    "two-tower": "zoo.two_tower:ENTRY",
    "ranker": "zoo.ranker:ENTRY",
    "resnet50": "zoo.resnet:RESNET50",
    "resnet26d": "zoo.resnet:RESNET26D",
    "mobilenet-v1": "zoo.mobilenet:MOBILENET_V1",
    "mobilenet-v2": "zoo.mobilenet:MOBILENET_V2",
    "sentence-encoder": "zoo.sentence_encoder:ENTRY",
    "cross-encoder": "zoo.cross_encoder:ENTRY",
    "transformer-mt": "zoo.translation:ENTRY",
}
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


def hub() -> Hub:
    """The pretrained models: those that ship here, then those of other packages (`MODELS`)."""
    from importlib.metadata import entry_points

    from pipelines.models.hub import Hub

    folders = [SHIPPED]
    for point in entry_points(group=MODELS):
        try:
            spec = importlib.util.find_spec(point.value)
        except Exception:  # whatever the import of another package raises
            spec = None
        if spec is None or not spec.submodule_search_locations:
            logger.warning(
                "the models %s are left out: there is no package %s; install it again", point.name, point.value
            )
            continue
        folders += map(Path, spec.submodule_search_locations)
    return Hub(*folders)


def names() -> list[str]:
    """The pretrained models."""
    return hub().names()


def entry(name: str) -> Entry:
    """The entry of the family `name`, e.g. "wide-deep". Raises RequestError for an unknown or a broken one."""
    from pipelines.core.errors import RequestError, one_line
    from pipelines.models.entry import Entry

    known = BUILT_IN if name in BUILT_IN else _entries()  # what is installed is looked through for others alone
    if name not in known:
        raise RequestError(f"unknown model family {name!r}; choose one of {', '.join(known)}")
    try:
        module, attribute = known[name].split(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, Entry) or found.name != name:
            raise TypeError(f"it is no Entry of the name {name}")
    except Exception as error:  # whatever the import of another package raises
        if name in BUILT_IN:
            raise
        raise RequestError(
            f"the family {name} cannot be opened as {known[name]}: {one_line(error)}; repair or uninstall its package"
        ) from error
    return found


def entries() -> dict[str, Entry]:
    """All families by name, without those that cannot be opened."""
    from pipelines.core.errors import RequestError

    found = {}
    for name in _entries():
        try:
            found[name] = entry(name)
        except RequestError as error:
            logger.info("%s", error)
    return found


def entry_of(model: str | Path) -> Entry:
    """The entry of a model, by name or folder, whose files are neither fetched nor checked. Raises RequestError where
    there is no such model.
    """
    from pipelines.models.hub import CARD, Card

    card = Card.read(Path(model) / CARD) if Path(model).is_dir() else hub().card(str(model))
    return entry(card.entry)


def _entries() -> dict[str, str]:
    """{family: "module:attribute"} of all families; built-in ones win."""
    from importlib.metadata import entry_points  # which takes longer than all else that this module imports

    return {point.name: point.value for point in entry_points(group=FAMILIES)} | BUILT_IN


def load(model: str | Path) -> ModelFolder:
    """The folder of a pretrained model (by name; downloaded if need be) or of one that a verb wrote (by path).

    The float graphs of a pretrained model are made from its float16 weights, the first time, where the cache can be
    written; where neither package nor cache has these weights and the model ships as int8, they are fetched when a
    stage needs them. Raises RequestError for an unknown name or a folder that holds no model.
    """
    from pipelines.core.errors import ZooError
    from pipelines.models.folder import HALF, open_folder
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
    opened: Pipeline = folder.entry.part("pipeline")(folder, precision, engine, threads, batch_size)
    return opened


def open_plan(path: str | Path) -> PlannedSession:
    """Open a plan file that `zoo plan` wrote; `run` takes batches of any size. See
    `pipelines.engines.plan.open_plan`.
    """
    from pipelines.engines import catalog, plan

    return plan.open_plan(path, catalog.load)


def __getattr__(name: str) -> Any:
    if name == "ENTRIES":
        return _entries()
    if name in (*VERBS, "import_model"):
        return getattr(importlib.import_module("zoo.api"), name)
    raise AttributeError(f"module 'zoo' has no attribute {name!r}")
