"""The verbs that make a model's weights and its frozen graph: schema, train, finetune, freeze."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import replacing, require_place, sha256
from pipelines.graph import io, query
from pipelines.models import stages
from pipelines.models.family import Family, FixedForm, GraphImportable, OnnxImportable, Shortlistable, Trainable
from pipelines.models.folder import ModelFolder
from pipelines.models.hub import CARD, CardFile
from zoo.api.models import run_stage
from zoo.api.paths import Model, listed, required, spare
from zoo.api.training_settings import configured, finetuned, require_trainable, write_card, write_trained_card
from zoo.training.runs import is_first, require_free

NOT_COPIED = ("checkpoint", "reports", ".*")  # of a model folder, into one with a shortlist

logger = logging.getLogger(__name__)


def schema(
    log: Model,
    output: Model | None = None,
    *,
    label: str | None = None,
    delimiter: str | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """The schema of a click log, inferred from all its rows; written to `output` as JSON where one is given.

    log: CSV or TSV with a header, JSON lines (plain or .gz) or Parquet. label: the column of 0 and 1 that is predicted;
    None: one called label, click, clicked, target or y. on_error: "skip" passes over rows that training with it leaves
    out. Returns {"schema": see `zoo.recommenders.data.schema.JSON_SCHEMA`,
    "table": rows of text under `zoo.recommenders.data.schema.COLUMNS`, "path": of the file or None}. Raises
    RequestError for a log
    that cannot be read, or has no such label.
    """
    from zoo.recommenders.data.logs import open_log
    from zoo.recommenders.data.schema_inference import infer

    if delimiter is not None and len(delimiter) != 1:
        raise RequestError(f"found the delimiter {delimiter!r}, wanted one character")
    spare(output, log)
    found = infer(open_log(log, delimiter), label, on_error)
    path = None if output is None else str(found.save(output))
    return {"schema": found.to_json(), "table": found.table(), "path": path}


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
    trainer = require_trainable(entry)
    options: dict[str, Any] = {name: each for name, each in (("schema", schema), ("label", label)) if each is not None}
    if options and not trainer.takes_schema:
        able = ", ".join(
            name
            for name, each in zoo.entries().items()
            if isinstance(each, FixedForm) or (isinstance(each, Trainable) and each.takes_schema)
        )
        raise RequestError(f"{entry.name} takes no --{next(iter(options))}; these families do: {able}")
    if not resume and is_first():
        require_free(Path(output), taught=True)  # before the seconds that importing a framework takes
    config = configured(entry.name, trainer.train_config(), settings or {})
    result = trainer.train(data, Path(output), config=config, resume=resume, on_error=on_error, **options)
    write_trained_card(Path(output), entry.name, f"{entry.title}; trained by its user")
    return result


def trained_by(family: str, data: Any, schema: Any = None, label: str | None = None, **_: Any) -> Family:
    """The family that `train` takes for a name: the one for any log if the data is not of the family's fixed form."""
    entry = zoo.entry(family)
    if isinstance(entry, FixedForm) and not entry.reads(data, schema, label):
        return zoo.entry(entry.log_family)
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
    if "from" in folder.card.details.get("weights", {}) and not isinstance(folder.entry, GraphImportable):
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
    result = require_trainable(entry).train(
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
    if not isinstance(entry, GraphImportable):
        raise RequestError(f"{entry.name} cannot be read from a graph; these can: {', '.join(_readers())}")
    if data is None or not listed(data):
        raise RequestError("int8 needs rows to calibrate on; give some thousand rows of the log with --data FILE")
    require_place((target := required(output, "a graph")) / CARD)
    options: dict[str, Any] = {"columns": columns, "output_node": output_node, "on_error": on_error}
    details = entry.from_graph(from_pb, data, target, **options)
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
    able = {name: entry for name, entry in zoo.entries().items() if isinstance(entry, OnnxImportable)}
    if family is not None:
        named = zoo.entry(family)
        family = named.log_family if isinstance(named, FixedForm) else family
        if family not in able:
            raise RequestError(f"{family} cannot be read from an ONNX graph; these can: {', '.join(able)}")
    if schema is None or data is None or not listed(data):
        lost = "--schema schema.json (zoo schema LOG -o schema.json)" if schema is None else "--data LOG"
        raise RequestError(f"a ranker from elsewhere needs its log and what that log's columns are; add {lost}")
    require_place((target := required(output, "a ranker")) / CARD)
    read = able[family or next(iter(able))].from_onnx
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
    if not isinstance(folder.entry, Shortlistable):
        raise RequestError(f"{name} takes no shortlist; that is for translation")
    if output is None and not Path(model).is_dir():
        raise RequestError(f"{name} stays as its card lists it; name a folder for the one with a shortlist: -o FOLDER")
    target = folder.path if output is None else Path(output)
    if output is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"found {target} in use, wanted a new or empty folder; choose another")
    require_place(target / CARD)
    said, made = folder.entry.shortlist(folder, data)
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


def _readers() -> list[str]:
    return [name for name, entry in zoo.entries().items() if isinstance(entry, GraphImportable)]
