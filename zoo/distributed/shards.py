"""Sharded scoring: every n-th part of the input per process, with a result file and a manifest for each part.

Finished parts are skipped; the results of all shards together equal the results of one process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zoo
from pipelines.core.errors import RequestError, ZooError, require_options
from pipelines.core.files import read_json, require_place, sha256, write_first, write_json
from pipelines.engines import catalog
from pipelines.models.folder import ModelFolder
from pipelines.models.pipeline import PRECISIONS, graph_file
from pipelines.models.protocols import NoRow, ShardableRows
from zoo.api.paths import require_distinct
from zoo.distributed import remote_files
from zoo.distributed.parts import Part, open_part, split_inputs

PLAN = "plan.json"
VERSION, IMAGES_VERSION = 1, 2  # version 2 of plans of images has the folder of relative names
FORMATS = (".txt", ".parquet", ".csv", ".csv.gz", ".jsonl")
RATES = ("per_second", "split_")  # in names of figures that cannot be summed


@dataclass(frozen=True)
class Shard:
    """One of several shards of the parts.

    Attributes:
        index: Number of the shard, from 1.
        count: Number of shards.
    """

    index: int = 1
    count: int = 1

    @staticmethod
    def parse(text: str) -> Shard:
        """Parses a shard.

        Args:
            text: "I/N", with I from 1 to N.

        Returns:
            The shard.

        Raises:
            RequestError: The text is no shard.
        """
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise RequestError(f"found the shard {text!r}, expected i/n with i from 1 to n, such as 1/8")
        return Shard(int(index), int(count))

    def part_numbers(self, parts: int) -> range:
        """Returns the numbers of its parts.

        Args:
            parts: Number of all parts.
        """
        return range(self.index - 1, parts, self.count)


class ShardedRun:
    """A plan in a folder, and the model that scores its parts.

    The engine and the digest of the graph that it runs ("form") are part of the plan and of manifests, because int8
    results of engines, and of native forms for other caches, differ in the last bits. "auto" is native if the model has
    a native form, else onnxruntime. The first process writes its form of the graph into the plan ("native:FORM"), which
    the others run, on all machines.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        inputs: Paths, glob patterns, folders or URLs.
        output: Folder of the results.
        format: Suffix of the result files, one of `FORMATS`; "" for the default of the task.
        precision: "int8", "fp32" or "bf16".
        engine: Inference engine, or "auto".
        threads: Number of intra-op threads.
        batch_size: Batch size; None for the default of the task.
        on_error: Handling of invalid rows, see `zoo.run`; None for the default of the task.
        **run_options: Options of `Pipeline.run` for the family.

    Attributes:
        plan: Content of the plan file.
        parts: Parts of the plan.
        pipeline: Pipeline of the model.

    Raises:
        RequestError: An option is invalid, or the folder holds another plan.
    """

    def __init__(
        self,
        model: str | Path,
        inputs: Sequence[str],
        output: str | Path,
        format: str = "",
        *,
        precision: str = "int8",
        engine: str = "auto",
        threads: int = 1,
        batch_size: int | None = None,
        on_error: str | None = None,
        **run_options: Any,
    ) -> None:
        self.folder = Path(output)
        if str(output) == "-" or not inputs:
            raise RequestError("shards read files and write a folder; name the input, and the folder with -o")
        if self.folder.exists() and not self.folder.is_dir():
            raise RequestError(f"{output} is no folder; shards write one file per part: name a folder with -o")
        require_place(self.folder / PLAN)
        loaded = zoo.load(model)
        pipeline_type = loaded.entry.pipeline()
        require_options(str(model), run_options, (option.name for option in loaded.entry.run_options))
        formats = FORMATS if pipeline_type.PARTS == "lines" else FORMATS[1:]
        suffix = format or formats[0]
        if suffix not in formats:
            raise RequestError(f"found the format {format}, expected {', '.join(formats)}")
        free = engine in (catalog.AUTO, "native") and precision == "int8"
        engine = (_planned_form(_plan(self.folder)) if free else "") or shared_engine(loaded, precision, engine)
        self.on_error = on_error or pipeline_type.ON_ERROR
        self.options = run_options
        self._is_images = pipeline_type.PARTS == "files"
        places = [name if name == "-" else remote_files.absolute(name) for name in inputs]
        files = [] if self._is_images else remote_files.expand(places)
        settings: dict[str, Any] = {
            "version": IMAGES_VERSION if self._is_images else VERSION,
            "model": loaded.card.name,
            "digest": sha256(loaded.ensure(PRECISIONS[precision])),
            "precision": precision,
            "engine": engine,
            "form": sha256(graph_file(loaded, precision, engine)),
            "on_error": self.on_error,
            "options": run_options,
            "format": suffix,
            "inputs": places,
            "files": {file: remote_files.file_version(file) for file in files},
        }
        plan = self._kept_plan(settings, free)
        self.pipeline = pipeline_type(loaded, precision, engine, threads, batch_size)
        self.plan = plan or self._new_plan(settings, inputs, free)
        if self.plan["engine"] != engine:  # another process was first, with its form
            self.pipeline = pipeline_type(loaded, precision, self.plan["engine"], threads, batch_size)
        self.pipeline.in_parts = True
        self.parts = [Part(**part) for part in self.plan["parts"]]

    def _kept_plan(self, settings: dict[str, Any], free: bool) -> dict[str, Any] | None:
        """Returns the plan in the folder, None without one.

        Args:
            settings: Settings of this process.
            free: Whether this process runs any native form.

        Raises:
            RequestError: It is of another run.
        """
        plan = _plan(self.folder)
        if not plan:
            return None
        if free and (planned := _planned_form(plan)):
            settings = {**settings, "engine": planned}
        # runs of 0.2 name no form
        wrong = [key for key in settings if plan.get(key) != settings[key] and (key != "form" or key in plan)]
        if wrong == ["form"]:
            raise RequestError(
                f"{self.folder} holds a run whose native form of the model ({plan['form'][:12]}) is not the one of "
                f"this machine ({settings['form'][:12]}), which depends on its caches: results would differ in the "
                "last digits; choose another folder, or --engine onnxruntime on all machines"
            )
        if wrong:
            raise RequestError(
                f"{self.folder} holds a run that differs in {', '.join(wrong)}; choose another folder, or remove it"
            )
        return plan

    def _new_plan(self, settings: dict[str, Any], inputs: Sequence[str], free: bool) -> dict[str, Any]:
        """Writes a plan and returns it, or that of another process that wrote one first."""
        parts = split_inputs(self.pipeline, inputs if self._is_images else settings["inputs"], self.options)
        plan = {**settings, "parts": [part.to_json() for part in parts]}
        results = (file for number in range(len(parts)) for file in _result_and_manifest(self.folder, plan, number))
        _require_inputs_kept(results, [*settings["files"], *(image for part in parts for image in part.image_paths())])
        text = json.dumps(plan, indent=2) + "\n"  # in ASCII: file names need not be UTF-8
        return plan if write_first(self.folder / PLAN, text) else self._kept_plan(settings, free) or plan

    def is_done(self, number: int) -> bool:
        """Returns whether a part is scored.

        Args:
            number: Number of the part.
        """
        return _finished(self.folder, self.plan, number) is not None

    def score(self, number: int) -> dict[str, Any]:
        """Scores a part, unless it is scored already.

        Args:
            number: Number of the part.

        Returns:
            Its manifest.

        Raises:
            ZooError: The part cannot be scored.
        """
        result, manifest = _result_and_manifest(self.folder, self.plan, number)
        if (finished := _finished(self.folder, self.plan, number)) is not None:
            return finished
        part = self.parts[number]
        self.pipeline.first_row = part.first or 0
        if isinstance(self.pipeline, ShardableRows):
            self.pipeline.with_label = part.with_label
        try:
            with open_part(self.pipeline, part) as inputs:
                summary = self.pipeline.run(inputs, result, self.on_error, **self.options)
        except NoRow as error:
            pipeline = self.pipeline
            empty = self.on_error == "skip" and error.left_out
            if not empty or not isinstance(pipeline, ShardableRows):
                raise type(error)(f"part {number} ({part}): {error}") from error
            engine = {"engine": self.plan["engine"], "precision": self.plan["precision"]}
            summary = {**pipeline.write_no_rows(result, error.left_out, **self.options), **engine}
        except ZooError as error:
            raise type(error)(f"part {number} ({part}): {error}") from error
        content = {"part": number, "plan": _digest(self.plan), "sha256": sha256(result), **summary}
        content |= {key: self.plan[key] for key in ("engine", "form") if key in self.plan}
        write_json(manifest, content)
        return content


def shared_engine(folder: ModelFolder, precision: str, engine: str) -> str:
    """Returns the engine for all processes of a run: a fixed native form instead of "auto", so that results agree.

    Args:
        folder: Model folder.
        precision: Name of the precision.
        engine: Inference engine; "auto" is native if the model has a native form, else onnxruntime.
    """
    if engine == catalog.AUTO:
        has_native = precision == "int8" and "native" in folder.entry.pipeline().engines(folder)
        engine = "native" if has_native else "onnxruntime"
    return catalog.chosen_form(graph_file(folder, precision, engine)) if engine == "native" else engine


def run_shard(
    model: str | Path, inputs: Sequence[str], output: str | Path, shard: str = "1/1", **options: Any
) -> dict[str, Any]:
    """Scores one shard of the input. Writes output/part-NNNNN.* and a manifest for each part.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        inputs: Paths, glob patterns, folders or URLs.
        output: Folder of all shards, or copies of it that are merged afterwards.
        shard: "I/N", with I from 1 to N.
        **options: Options of `ShardedRun`.

    Returns:
        Totals of the summaries, "parts" and "kept" (parts scored before).

    Raises:
        RequestError: An option is invalid, or the folder holds another run.
    """
    parsed = Shard.parse(shard)
    run = ShardedRun(model, inputs, output, **options)
    numbers = parsed.part_numbers(len(run.parts))
    kept = sum(map(run.is_done, numbers))
    totals = merge_summaries([run.score(number) for number in numbers])
    return {"model": run.plan["model"], "shard": shard, "parts": len(numbers), "kept": kept, **totals}


def check(output: str | Path) -> dict[str, Any]:
    """Checks that all parts of a sharded run are complete.

    Args:
        output: Folder of the shards.

    Returns:
        Totals of the summaries, "parts", and "files" in input order.

    Raises:
        RequestError: The folder holds no sharded run.
        ZooError: Parts are missing or damaged.
    """
    folder = Path(output)
    if not (folder / PLAN).is_file():
        raise RequestError(f"{output} holds no {PLAN}; name the folder that zoo run --shard wrote")
    plan = read_json(folder / PLAN)
    manifests = [_finished(folder, plan, number, check_bytes=True) for number in range(len(plan["parts"]))]
    if missing := [number for number, manifest in enumerate(manifests) if manifest is None]:
        examples = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise ZooError(
            f"{output} lacks {len(missing)} of {len(manifests)} parts ({examples}), or they are damaged; run the "
            "shards again: complete parts are kept"
        )
    files = [str(_result_and_manifest(folder, plan, number)[0]) for number in range(len(manifests))]
    return {
        "model": plan["model"],
        "parts": len(manifests),
        **merge_summaries([manifest for manifest in manifests if manifest is not None]),
        "files": files,
    }


def merge_summaries(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the summaries of parts.

    Args:
        summaries: Summaries or manifests of the parts.

    Returns:
        Sums of counts and seconds, and other values that are the same in all summaries; without rates.
    """
    merged: dict[str, Any] = {}
    for name in summaries[0] if summaries else ():
        values = [summary[name] for summary in summaries if name in summary]
        if name in ("part", "plan", "sha256", "form") or any(word in name for word in RATES):
            continue
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            total = sum(values)
            merged[name] = round(total, 3) if any(isinstance(value, float) for value in values) else total
        elif all(value == values[0] for value in values):
            merged[name] = values[0]
    return merged


def _require_inputs_kept(results: Iterable[Path], inputs: Sequence[str]) -> None:
    """Raises RequestError if a result would replace an input; checks each file once, since there may be millions."""
    existing = {_inode(result): result for result in results if result.exists()}
    if not existing:
        return
    for path in (name.removeprefix("file://") for name in inputs):
        if not remote_files.is_url(path) and (result := existing.get(_inode(path))) is not None:
            require_distinct(result, path)


def _inode(path: str | Path) -> tuple[int, int]:
    status = Path(path).stat()
    return status.st_dev, status.st_ino


def _plan(folder: Path) -> dict[str, Any]:
    """Returns the plan in a folder; {} if there is none."""
    if not (folder / PLAN).is_file():
        return {}
    plan = read_json(folder / PLAN)
    return plan if isinstance(plan, dict) and plan else {"version": None}


def _planned_form(plan: Mapping[str, Any]) -> str:
    """Returns the engine of a plan if it is a native form; "" for others."""
    engine = str(plan.get("engine", ""))
    return engine if catalog.base_engine(engine) != engine else ""


def _digest(plan: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def _result_and_manifest(folder: Path, plan: dict[str, Any], number: int) -> tuple[Path, Path]:
    name = f"part-{number:05d}"
    return folder / f"{name}{plan['format']}", folder / f"{name}.json"


def _finished(folder: Path, plan: dict[str, Any], number: int, check_bytes: bool = False) -> dict[str, Any] | None:
    """The manifest of a part that this plan scored, or None. check_bytes: whether to verify the result's digest."""
    result, manifest = _result_and_manifest(folder, plan, number)
    if not (manifest.is_file() and result.is_file()):
        return None
    try:
        content = read_json(manifest)
    except RequestError:
        return None
    fits = isinstance(content, dict) and content.get("plan") == _digest(plan)
    return dict(content) if fits and (not check_bytes or sha256(result) == content["sha256"]) else None
