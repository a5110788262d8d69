"""The verbs that make a model's weights and its frozen graph: train, finetune, freeze."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, replacing, require_place, sha256, write_json
from pipelines.graph import io, query
from pipelines.models import stages
from pipelines.models.entry import Entry
from pipelines.models.folder import ModelFolder
from pipelines.models.hub import CARD, Card, CardFile
from zoo.api.models import run_stage
from zoo.api.paths import Model, listed, required
from zoo.training.runs import is_first, require_free

NOT_COPIED = ("checkpoint", "reports", ".*")  # of a model folder, into one with a shortlist

logger = logging.getLogger(__name__)


def train(
    family: str,
    data: Any,
    output: Model,
    *,
    settings: Mapping[str, str] | None = None,
    resume: bool = False,
    on_error: str = "raise",
    schema: Model | None = None,
    label: str | None = None,
) -> dict[str, Any]:
    """Train a model family on own data; `output` becomes a model folder. settings: {name of a training setting: value
    as text}.

    schema, label: of a click log, see `zoo.schema`; without one its columns are inferred. Returns the metrics. Raises
    RequestError for unknown settings, unusable data, or an output folder that holds something else.
    """
    entry = trained_by(family, data, schema=schema, label=label)
    options = {name: each for name, each in (("schema", schema), ("label", label)) if each is not None}
    if options and not entry.schema:
        able = ", ".join(name for name, each in zoo.entries().items() if each.schema or each.by_schema)
        raise RequestError(f"{entry.name} takes no --{next(iter(options))}; these families do: {able}")
    if not resume and is_first():
        require_free(Path(output), taught=True)  # before the seconds that importing a framework takes
    config = configured(entry.name, entry.part("settings"), settings or {})
    result: dict[str, Any] = entry.part("train")(
        data, Path(output), config=config, resume=resume, on_error=on_error, **options
    )
    write_trained_card(Path(output), entry.name, f"{entry.title}; trained by its user")
    return result


def trained_by(family: str, data: Any, schema: Any = None, label: str | None = None, **_: Any) -> Entry:
    """The entry that `train` takes for a family's name: where rows are no form of its own, the one for any log."""
    entry = zoo.entry(family)
    if entry.by_schema and not (_headerless(schema) if schema is not None else label is None and _is_criteo(data)):
        return zoo.entry(entry.by_schema)
    return entry


def finetune(
    model: Model,
    data: Any,
    output: Model,
    *,
    settings: Mapping[str, str] | None = None,
    resume: bool = False,
    on_error: str = "raise",
    prune: str | None = None,
    strategy: Model | None = None,
    drop: float | None = None,
) -> dict[str, Any]:
    """Go on training from a model's weights on own data; `output` becomes a model folder. See `train`.

    The setting qat trains with the rounding of int8 (`pipelines.quantization.training.qat`); `build` then takes the
    trained ranges.
    prune: "1.5x", "ratio=.3" or "rows=5", see `pipelines.compression.strategy.goal`. strategy: a file that says what is
    done when (`zoo.api.compression.compress`). drop: by how much int8's metric may fall in either.
    """
    folder = zoo.load(model)
    if "from" in folder.card.details.get("weights", {}) and not folder.entry.from_graph:
        raise RequestError(
            f"{folder.card.name} came as a graph (zoo freeze --from-onnx), which cannot be trained; start with: "
            "zoo train"
        )
    if prune is not None or strategy is not None:
        from zoo.api import compression

        own = dict(settings or {})
        planned = compression.plan(folder, prune, strategy, drop, own)
        return compression.compress(folder, data, Path(output), planned, settings=own, resume=resume, on_error=on_error)
    if drop is not None:
        raise RequestError("--drop is of --prune or --strategy; name one of them")
    if not resume and is_first():
        require_free(Path(output), taught=True)
    entry = folder.entry
    config = finetuned(folder, settings or {})
    folder.ensure("fp32.onnx")
    result: dict[str, Any] = entry.part("train")(
        data, Path(output), config=config, resume=resume, start_from=folder.path, on_error=on_error
    )
    write_trained_card(Path(output), entry.name, f"{folder.card.name} fine-tuned by its user")
    return result


def freeze(
    model: Model,
    *,
    from_pb: Model | None = None,
    from_onnx: Model | None = None,
    schema: Model | None = None,
    data: Any = None,
    output: Model | None = None,
    columns: Sequence[str] | None = None,
    output_node: str | None = None,
    shortlist: str | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Checkpoint -> frozen inference graph, fp32.onnx; returns node counts and sizes.

    from_pb: a frozen TensorFlow graph from elsewhere (GraphDef, or a SavedModel's folder) of the family `model`;
    `output` becomes its model folder, built up to int8, calibrated on the first rows of `data`. columns: names of the
    columns of a row where they do not stand in their natural order. output_node: the node of the graph's result where
    there are several. Raises RequestError for a graph that the family does not read, with all that is in its way.

    from_onnx: likewise an ONNX export of a ranker of another library, see `zoo.recommenders.importers.rankers.read`.
    schema: of its
    log. columns: those that feed its inputs, in order.

    shortlist: of a translation model: parallel text that tells which words the translation of a sentence may have, or a
    text shortlist of Marian (`zoo.translation.search.shortlist.of_data`). It stays with the model, which is copied to
    `output` where that is given, as it must be for one of the zoo's by its name.
    """
    if shortlist is not None:
        if any(each is not None for each in (from_pb, from_onnx, schema, data, columns, output_node)):
            raise RequestError("--shortlist is for a translation model, which takes no other option but -o")
        return run_stage(_with_shortlist(model, shortlist, output), "fp32.onnx")
    if from_onnx is not None:
        if from_pb is not None:
            raise RequestError("found --from-pb and --from-onnx; a model is made of one graph")
        folder = import_ranker(from_onnx, data, output, schema, str(model), columns, output_node, on_error)
        made = stages.build(folder)
        shown = {key: folder.card.details[key] for key in ("structure", "weights")}
        return {
            "model": folder.card.name,
            "path": str(folder.path),
            "family": folder.entry.name,
            "stages": made,
            **shown,
        }
    if schema is not None:
        raise RequestError("--schema is of the log of a ranker from elsewhere; name that with --from-onnx RANKER.onnx")
    if from_pb is None:
        if any(each is not None for each in (data, output, columns, output_node)):
            raise RequestError(
                "--data, -o, --columns and --output-node are for a graph from elsewhere; name it with --from-pb "
                "GRAPH.pb"
            )
        return run_stage(model, "fp32.onnx")
    if Path(model).is_dir():
        raise RequestError(f"{model} is a folder, but a graph is read as one of a family: {', '.join(_readers())}")
    entry = zoo.entry(str(model))
    if not entry.from_graph:
        raise RequestError(f"{entry.name} cannot be read from a graph; these can: {', '.join(_readers())}")
    if data is None or not listed(data):
        raise RequestError("int8 needs rows to calibrate on; give some thousand rows of the log with --data FILE")
    require_place((target := required(output, "a graph")) / CARD)
    options: dict[str, Any] = {"columns": columns, "output_node": output_node, "on_error": on_error}
    details = entry.part("from_graph")(from_pb, data, target, **options)
    write_card(target, entry.name, f"{entry.title}; from the graph {Path(from_pb).name}", details)
    folder = zoo.load(target)
    made = stages.build(folder)
    return {"model": folder.card.name, "path": str(target), **folder.record["fp32.onnx"], "stages": made, **details}


def import_ranker(
    path: Model,
    data: Any,
    output: Model | None,
    schema: Model | None,
    family: str | None = None,
    columns: Sequence[str] | None = None,
    output_node: str | None = None,
    on_error: str = "raise",
) -> ModelFolder:
    """The model folder of an ONNX export of a ranker, up to fp32.onnx; see `freeze`. family: None to tell it by the
    graph's structure.
    """
    able = {name: entry for name, entry in zoo.entries().items() if entry.from_onnx}
    if family is not None:
        family = zoo.entry(family).by_schema or family
        if family not in able:
            raise RequestError(f"{family} cannot be read from an ONNX graph; these can: {', '.join(able)}")
    if schema is None or data is None or not listed(data):
        lost = "--schema schema.json (zoo schema LOG -o schema.json)" if schema is None else "--data LOG"
        raise RequestError(f"a ranker from elsewhere needs its log and what that log's columns are; add {lost}")
    require_place((target := required(output, "a ranker")) / CARD)
    read = able[family or next(iter(able))].part("from_onnx")
    options: dict[str, Any] = {"columns": columns, "output_node": output_node, "on_error": on_error}
    found, details, files = read(path, data, target, schema=schema, family=family, **options)
    recipe, operators = zoo.entry(found).recipe, [query.label(each) for each in io.load(target / "fp32.onnx").graph]
    kept = tuple(each for each in recipe.keep_float if any(re.fullmatch(each, name) for name in operators))
    details["recipe"] = dataclasses.replace(recipe, keep_float=kept).to_json()  # the family's, of operators it has
    write_card(target, found, f"{zoo.entry(found).title}; from the graph {Path(path).name}", details, files)
    return zoo.load(target)


def _with_shortlist(model: Model, data: str, output: Model | None) -> Path:
    """The folder of a model that has the shortlist of `data`: its own, or its copy `output`."""
    folder = zoo.load(model)
    name = folder.card.name
    if not folder.entry.shortlist:
        raise RequestError(f"{name} takes no shortlist; that is for translation")
    if output is None and not Path(model).is_dir():
        raise RequestError(f"{name} stays as its card lists it; name a folder for the one with a shortlist: -o FOLDER")
    target = folder.path if output is None else Path(output)
    if output is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"found {target} in use, wanted a new or empty folder; choose another")
    require_place(target / CARD)
    said, made = folder.entry.part("shortlist")(folder, data)
    if output is not None:
        shutil.copytree(folder.path, target, ignore=shutil.ignore_patterns(CARD, *NOT_COPIED), dirs_exist_ok=True)
    for each, content in made.items():
        with replacing(target / each) as temporary:
            temporary.write_bytes(content)
    files = {each.name: each for each in folder.card.files}
    files |= {each: CardFile(each, len(content), sha256(target / each), None) for each, content in made.items()}
    details = {**folder.card.details, "preprocessing": {**folder.preprocessing, **said}}
    write_card(target, folder.entry.name, folder.card.description, details, [*files.values()])
    return target


def _headerless(schema: Any) -> bool:
    from zoo.recommenders.criteo import NAME
    from zoo.recommenders.data.schema import Schema

    return str(schema) == NAME or not (schema if isinstance(schema, Schema) else Schema.load(schema)).header


def _is_criteo(data: Any) -> bool:
    from zoo.recommenders.data.logs import is_criteo

    return is_criteo(data)


def _readers() -> list[str]:
    return [name for name, entry in zoo.entries().items() if entry.from_graph]


def _qat_families() -> str:
    able = []
    for name, entry in zoo.entries().items():
        with contextlib.suppress(ImportError):  # a framework that is not installed
            able += [name] if hasattr(entry.part("finetune_settings"), "qat") else []
    return ", ".join(able)


def configured(family: str, defaults: Any, settings: Mapping[str, str]) -> Any:
    """`defaults` of a family (a dataclass instance) with `settings`, given as text, converted to the types of the
    defaults.
    """
    known = {each.name: getattr(defaults, each.name) for each in dataclasses.fields(defaults)}
    if "qat" in settings and "qat" not in known:
        raise RequestError(
            f"{family} has no training with int8's rounding (--qat); these families do: {_qat_families()}"
        )
    if unknown := [name for name in settings if name not in known]:
        raise RequestError(f"{family} has no training setting {', '.join(unknown)}; choose among {', '.join(known)}")
    return dataclasses.replace(defaults, **{name: convert(name, text, known[name]) for name, text in settings.items()})


def finetuned(folder: ModelFolder, settings: Mapping[str, str]) -> Any:
    """`configured`, to go on from a model. Raises RequestError where another value is given of what a model keeps, the
    settings `KEPT`.
    """
    entry, details = folder.entry, folder.card.details
    defaults = entry.part("finetune_settings")
    config = configured(entry.name, defaults, settings)
    own = {
        **dataclasses.asdict(defaults),
        **details.get("training", {}).get("config", {}),
        **details.get("weights", {}),
        **details.get("preprocessing", {}),
    }
    for name in getattr(defaults, "KEPT", ()):
        if name in settings and (found := getattr(config, name)) != own[name]:
            raise RequestError(
                f"found the setting {name} {found}, but fine-tuning keeps that of {folder.card.name} ({own[name]}); "
                "leave it out"
            )
    return config


def convert(name: str, text: str, like: Any) -> Any:
    """The value that a setting's text is, of the type of `like`. Raises RequestError for text that is none such."""
    try:
        if isinstance(like, bool):
            return {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}[text.lower()]
        if isinstance(like, tuple):
            return tuple(type(like[0])(each) for each in text.split(",") if each)
        return type(like)(text)
    except (KeyError, ValueError):
        shown = ",".join(map(str, like)) if isinstance(like, tuple) else like
        raise RequestError(f"setting {name} is {text!r}; wanted a value like {shown}") from None


def write_trained_card(folder: Path, entry: str, description: str) -> None:
    """Write the card of a folder that a training left."""
    if not is_first():
        return
    trained = read_json(folder / "train.json")
    details = {
        "preprocessing": trained["features"],
        "training": {key: trained[key] for key in ("rows", "metrics", "config") if key in trained},
        **{key: trained[key] for key in ("classes", "shapes") if key in trained},
    }
    write_card(folder, entry, description, details)


def write_card(
    folder: Path, entry: str, description: str, details: Mapping[str, Any], files: Sequence[CardFile] = ()
) -> None:
    """Write the card of a model folder, which is named after it."""
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in folder.resolve().name).lstrip("._-") or entry
    write_json(folder / CARD, Card(name, entry, description, tuple(files), details).to_json())
