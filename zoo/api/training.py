"""Commands that train or import a model: schema, train, finetune, freeze."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import require_free, require_place, write_bytes
from pipelines.deltas.scales import keep_scales
from pipelines.graph import io, query
from pipelines.models import stages
from pipelines.models.family import Family, OnnxImportable, SchemaInferring, Shortlistable, Trainable
from pipelines.models.folder import ModelFolder
from pipelines.models.hub import CARD, CardFile
from pipelines.models.protocols import Draftable, GraphImportable
from pipelines.quantization.recipe import matching
from zoo.api import exporting
from zoo.api.models import run_stage
from zoo.api.paths import Model, as_list, output_path, require_data, require_distinct
from zoo.api.training_settings import configured, finetuned, require_trainable, write_card, write_trained_card
from zoo.training.runs import is_first, require_free_run

NOT_COPIED = ("checkpoint", "reports", ".*")  # files of a model folder that its copy with a shortlist lacks


def schema(
    log: Model | Sequence[Model],
    output: Model | None = None,
    *,
    label: str | Sequence[str] | None = None,
    delimiter: str | None = None,
    on_error: str = "raise",
    category: Sequence[str] = (),
    number: Sequence[str] = (),
    vector: Sequence[str] = (),
    ignore: Sequence[str] = (),
    family: str | None = None,
) -> dict[str, Any]:
    """Infers the schema of a click log from all its rows.

    Args:
        log: CSV or TSV with a header, JSON lines (plain or .gz), or Parquet: a file, a folder, a pattern, or a list of
            them, whose rows are one log. Folders named column=value add the column (Hive partitions).
        output: Path of the schema as JSON; None to write no file.
        label: Columns to predict, one or several, of 0 and 1 or with the values that are 1 ("rating>=4",
            "event=buy,cart"); None for a column named label, click, clicked, target or y.
        delimiter: Delimiter of CSV; None to detect it.
        on_error: "raise" to stop at an invalid row, "skip" to leave it out, as in training.
        category: Columns that are categories, in place of the inferred kind.
        number: Columns that are numbers.
        vector: Columns that are vectors: lists of numbers of one length.
        ignore: Columns that are not used.
        family: Family to be trained, such as din, which reads lists as sequences; None for families that pool
            lists.

    Returns:
        {"schema": JSON of `zoo.recommenders.data.schema.JSON_SCHEMA`, "columns": header of the table, "table": rows of
        text, "path": path of the file or None}.

    Raises:
        RequestError: The log cannot be read, or has no such label or column.
    """
    if delimiter is not None and len(delimiter) != 1:
        raise RequestError(f"found the delimiter {delimiter!r}, expected one character")
    require_distinct(output, *as_list(log))
    kinds: dict[str, str] = {}
    for kind, names in (("category", category), ("number", number), ("vector", vector), ("ignored", ignore)):
        for name in [names] if isinstance(names, str) else names:
            if kinds.setdefault(name, kind) != kind:
                raise RequestError(f"found the column {name} as {kinds[name]} and as {kind}, expected one of them")
    entries = zoo.entries()
    names_of = [name for name, entry in entries.items() if isinstance(entry, SchemaInferring)]
    if family is not None and family not in names_of:
        raise RequestError(f"found the family {family!r}, expected one that has a schema: {', '.join(names_of)}")
    entry = entries[family or names_of[0]]
    assert isinstance(entry, SchemaInferring)
    inferred, columns, table = entry.infer_schema(log, label=label, delimiter=delimiter, on_error=on_error, kinds=kinds)
    path = None if output is None else str(inferred.save(output))
    return {"schema": inferred.to_json(), "columns": columns, "table": table, "path": path}


def train(
    family: str,
    data: Any,
    output: Model,
    *,
    settings: Mapping[str, str] | None = None,
    resume: bool = False,
    on_error: str = "raise",
    schema: Model | None = None,
    label: str | Sequence[str] | None = None,
    preset: str | None = None,
) -> dict[str, Any]:
    """Trains a model family on your data and writes a model folder.

    Args:
        family: Name of the family, e.g. "deepfm".
        data: Files, folders or hub ids of training data: one, or a list.
        output: Folder of the new model.
        settings: Training settings {name: value as text}.
        resume: Continue from the last checkpoint in `output`.
        on_error: "raise" to stop at an invalid row, "skip" to leave it out and count it.
        schema: Schema of a click log (see `zoo.schema`); None to infer it.
        label: Columns of a click log to predict, as in `zoo.schema`: one or, for families of several labels, several.
        preset: "draft" for a small draft of the model that the setting `teacher` names (speculative decoding). `output`
            becomes that model with its draft; it may be the model's own folder.

    Returns:
        Metrics on the held-out data, and counts; with a preset {"path", "bytes": {file: size}}.

    Raises:
        RequestError: A setting is unknown, the data are unusable, or `output` holds something else.
    """
    entry = zoo.entry(family)
    if preset is not None:
        if wrong := [name for name, value in {"schema": schema, "label": label, "resume": resume}.items() if value]:
            raise RequestError(f"--{wrong[0]} has no effect with --preset {preset}; leave it out")
        return _with_draft(entry, data, output, preset, settings or {})
    trainer = require_trainable(entry)
    options: dict[str, Any] = {name: option for name, option in (("schema", schema), ("label", label)) if option}
    if options and not trainer.takes_schema:
        able = [name for name, entry in zoo.entries().items() if isinstance(entry, Trainable) and entry.takes_schema]
        raise RequestError(f"{entry.name} takes no --{next(iter(options))}; these families do: {', '.join(able)}")
    if not resume and is_first():
        require_free_run(Path(output), allow_targets=True)  # checked before the slow import of a framework
    trainer = trainer.for_data(data, **options)
    config = configured(entry.name, trainer.train_config(), settings or {})
    result = trainer.train(data, Path(output), config=config, resume=resume, on_error=on_error, **options)
    write_trained_card(Path(output), entry.name, f"{entry.title}; trained by its user")
    return result


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
    delta: Model | None = None,
) -> dict[str, Any]:
    """Fine-tunes a model on your data and writes a model folder.

    With `prune` or `strategy`, the model is also pruned (see `zoo.api.compression.compress`). The setting `qat` enables
    quantization-aware training (`pipelines.quantization.training.qat`); `build` then uses the trained ranges.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        data: Files, folders or hub ids of training data: one, or a list.
        output: Folder of the new model.
        settings: Training settings {name: value as text}.
        resume: Continue from the last checkpoint in `output`.
        on_error: "raise" to stop at an invalid row, "skip" to leave it out and count it.
        prune: Pruning goal: "1.5x" (speedup), "ratio=.3" (share of channels) or "rows=5" (minimum frequency of
            embedding rows); see `pipelines.compression.strategy.goal`.
        strategy: JSON file with the schedule of distillation, pruning and quantization-aware training.
        drop: Maximum drop of the int8 metric, with `prune` or `strategy`; None for the default of the family.
        delta: File, folder or URL for the delta from `model`, see `zoo.api.exporting.delta`. The new model keeps the
            scales of `model` as long as its values fit.

    Returns:
        Metrics on the held-out data, and counts; with `prune` or `strategy`, the log of the steps.

    Raises:
        RequestError: A setting or goal is invalid, the model cannot be trained, the data are unusable, or `output`
            holds something else.
    """
    require_data(data)
    folder = zoo.load(model)
    if folder.imported:
        raise RequestError(
            f"{folder.card.name} is an imported graph (zoo freeze --from-onnx), which cannot be trained; run: zoo train"
        )
    if prune is not None or strategy is not None:
        from zoo.api import compression

        if delta is not None:
            raise RequestError("--delta takes neither --prune nor --strategy")
        own = dict(settings or {})
        planned = compression.plan(folder, prune, strategy, drop, own)
        return compression.compress(folder, data, Path(output), planned, settings=own, resume=resume, on_error=on_error)
    if drop is not None:
        raise RequestError("--drop requires --prune or --strategy")
    if not resume and is_first():
        require_free_run(Path(output), allow_targets=True)
    entry = folder.entry
    config = finetuned(folder, settings or {})
    folder.ensure("fp32.onnx")
    result = require_trainable(entry).train(
        data, Path(output), config=config, resume=resume, start_from=folder.path, on_error=on_error
    )
    write_trained_card(Path(output), entry.name, f"{folder.card.name} fine-tuned by its user")
    stages.remove_intermediate_files(folder)  # the float graph, where it was made for this training
    if delta is not None and is_first():
        widened = keep_scales(zoo.load(output), folder)
        result = {**result, "delta": {**exporting.delta(folder.path, output, delta), "widened": widened}}
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
    """Exports a checkpoint as a frozen inference graph, fp32.onnx, or imports a graph as an int8 model.

    Without `from_pb`, `from_onnx` and `shortlist`, the checkpoint of `model` is exported.

    Args:
        model: Zoo model; with `from_pb` or `from_onnx`: name of the family.
        from_pb: Frozen TensorFlow graph (GraphDef) or SavedModel folder. `output` becomes its model folder, built up to
            int8.
        from_onnx: ONNX export of a third-party ranker (see `zoo.recommenders.importers.rankers.read`). `output` becomes
            its model folder, built up to int8.
        schema: With `from_onnx`: schema of the log (see `zoo.schema`).
        data: With `from_pb` or `from_onnx`: rows of the log; the first rows calibrate.
        output: Folder of the new model.
        columns: With `from_pb`: column names of a row, if not in natural order. With `from_onnx`: columns of the
            inputs, in order.
        output_node: With `from_pb` or `from_onnx`: name of the probability output, if the graph has several outputs.
        shortlist: For translation models: parallel text, or a Marian text shortlist, that limits the target vocabulary
            of a sentence (see `zoo.translation.search.shortlist.load_shortlist`). A model given by name needs `output`.
        on_error: "raise" to stop at an invalid row, "skip" to leave it out.

    Returns:
        "model", "path", and node counts and sizes; for an imported graph also "stages" and the details of the import.

    Raises:
        RequestError: Options are invalid, or the family cannot read the graph; lists all unsupported parts.
    """
    if shortlist is not None:
        if any(option is not None for option in (from_pb, from_onnx, schema, data, columns, output_node)):
            raise RequestError("--shortlist takes a translation model and -o, no other options")
        return run_stage(_with_shortlist(model, shortlist, output), "fp32.onnx")
    if from_onnx is not None:
        if from_pb is not None:
            raise RequestError("found --from-pb and --from-onnx, expected one of them")
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
        raise RequestError("--schema requires --from-onnx RANKER.onnx")
    if from_pb is None:
        if any(option is not None for option in (data, output, columns, output_node)):
            raise RequestError(
                "--data, -o, --columns and --output-node require an imported graph; give it with --from-pb GRAPH.pb"
            )
        return run_stage(model, "fp32.onnx")
    if Path(model).is_dir():
        raise RequestError(f"found the folder {model}, expected the family of the graph: {', '.join(_readers())}")
    entry = zoo.entry(str(model))
    if not isinstance(entry, GraphImportable):
        raise RequestError(f"{entry.name} cannot be imported from a graph; these families can: {', '.join(_readers())}")
    if data is None or not as_list(data):
        raise RequestError("calibration needs rows; give some thousand rows of the log with --data FILE")
    require_place((target := output_path(output, "a graph")) / CARD)
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
    """Imports an ONNX export of a third-party ranker as a model folder, up to fp32.onnx; see `freeze`.

    Args:
        path: ONNX file.
        data: Rows of the log.
        output: Folder of the new model.
        schema: Schema of the log.
        family: Name of the family; None to detect it from the structure of the graph.
        columns: Columns of the inputs, in order; None to match by name.
        output_node: Name of the probability output, if the graph has several outputs.
        on_error: "raise" to stop at an invalid row, "skip" to leave it out.

    Returns:
        The model folder.

    Raises:
        RequestError: Options are invalid, or the family cannot read the graph.
    """
    able = {name: entry for name, entry in zoo.entries().items() if isinstance(entry, OnnxImportable)}
    if family is not None:
        family = zoo.entry(family).name
        if family not in able:
            raise RequestError(f"{family} cannot be imported from an ONNX graph; these families can: {', '.join(able)}")
    if schema is None or data is None or not as_list(data):
        missing = "--schema schema.json (zoo schema LOG -o schema.json)" if schema is None else "--data LOG"
        raise RequestError(f"an imported ranker needs its log and the schema of the log; add {missing}")
    require_place((target := output_path(output, "a ranker")) / CARD)
    read = able[family or next(iter(able))].from_onnx
    options: dict[str, Any] = {"columns": columns, "output_node": output_node, "on_error": on_error}
    detected, details, files = read(path, data, target, schema=schema, family=family, **options)
    recipe, operators = zoo.entry(detected).recipe, [query.label(node) for node in io.load(target / "fp32.onnx").graph]
    kept = tuple(pattern for pattern in recipe.keep_float if matching((pattern,), operators))
    # without patterns of operators that the graph lacks
    details["recipe"] = dataclasses.replace(recipe, keep_float=kept).to_json()
    write_card(target, detected, f"{zoo.entry(detected).title}; from the graph {Path(path).name}", details, files)
    return zoo.load(target)


def _with_shortlist(model: Model, data: str, output: Model | None) -> Path:
    """Adds a shortlist to a model folder, or to its copy `output`; returns the folder."""
    folder = zoo.load(model)
    name = folder.card.name
    if not isinstance(folder.entry, Shortlistable):
        raise RequestError(f"{name} takes no shortlist; translation models do")
    if output is None and not Path(model).is_dir():
        raise RequestError(f"{name} is read-only; give a folder for its copy with the shortlist: -o FOLDER")
    target = _free_target(folder, output)
    return _with_files(folder, target, *folder.entry.shortlist(folder, data))


def _with_draft(entry: Family, data: Any, output: Model, preset: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Adds a draft to the teacher's folder, or to its copy `output`."""
    if preset != "draft" or not isinstance(entry, Draftable):
        able = ", ".join(name for name, entry in zoo.entries().items() if isinstance(entry, Draftable))
        raise RequestError(f"found the preset {preset!r} of {entry.name}, expected draft of {able}")
    config = configured(f"{entry.name} --preset draft", entry.draft_config(), settings)
    if not config.teacher:
        raise RequestError("found no model to train a draft for, expected --teacher FOLDER")
    folder = zoo.load(config.teacher)
    target = _free_target(folder, output)
    preprocessing, made = entry.train_draft(folder, data, config)
    path = _with_files(folder, target, preprocessing, made)
    return {"path": str(path), "bytes": {name: len(content) for name, content in made.items()}}


def _free_target(folder: ModelFolder, output: Model | None) -> Path:
    """Returns where a model gets more files: its own folder, or one that is free."""
    target = folder.path if output is None else Path(output)
    if target.resolve() != folder.path.resolve():
        require_free(target)
    require_place(target / CARD)
    return target


def _with_files(folder: ModelFolder, target: Path, preprocessing: Mapping[str, Any], made: Mapping[str, bytes]) -> Path:
    """Adds files to a model folder, or to its copy `target`; returns the folder."""
    if target.resolve() != folder.path.resolve():
        shutil.copytree(folder.path, target, ignore=shutil.ignore_patterns(CARD, *NOT_COPIED), dirs_exist_ok=True)
    for name, content in made.items():
        write_bytes(target / name, content)
    files = {file.name: file for file in folder.card.files}
    files |= {file: CardFile.of(target / file) for file in made}
    details = {**folder.card.details, "preprocessing": {**folder.preprocessing, **preprocessing}}
    write_card(target, folder.entry.name, folder.card.description, details, [*files.values()])
    return target


def _readers() -> list[str]:
    return [name for name, entry in zoo.entries().items() if isinstance(entry, GraphImportable)]
