"""Sharded scoring: every n-th part of the input per process, with a result file and a manifest for each part.

Finished parts are skipped; the results of all shards together equal the results of one process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zoo
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import read_json, require_place, sha256, write_json, write_text
from pipelines.models.pipeline import PRECISIONS
from pipelines.models.sharding import NoRow, ShardableRows
from zoo.api.paths import spare
from zoo.distributed import remote_files
from zoo.distributed.parts import Part, cut, reading

PLAN = "plan.json"
VERSION, OF_IMAGES = 1, 2  # plans of images say since 2 where names are relative to
FORMATS = (".txt", ".parquet", ".csv", ".csv.gz", ".jsonl")
SPEEDS = ("per_second", "split_")  # in the names of figures that are no sums


@dataclass(frozen=True)
class Shard:
    """The `index`-th (from 1) of `count` shards."""

    index: int = 1
    count: int = 1

    @staticmethod
    def parse(text: str) -> Shard:
        """ "2/8". Raises RequestError for what is none."""
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise RequestError(f"found the shard {text!r}, wanted i/n with i from 1 to n, such as 1/8")
        return Shard(int(index), int(count))

    def of(self, parts: int) -> range:
        """The numbers of its parts."""
        return range(self.index - 1, parts, self.count)


class Work:
    """A plan in its folder and a model open to carry it out. Attributes: plan, as `PLAN` holds it; parts; pipeline.

    The engine is part of the plan, since int8 is not the same to the last bit in all of them; "auto" is native where
    the model has such a form, else onnxruntime. Raises RequestError where the folder holds another plan.
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
        **more: Any,
    ) -> None:
        self.folder = Path(output)
        if str(output) == "-" or not inputs:
            raise RequestError("shards read files and write a folder; name the input, and the folder with -o")
        if self.folder.exists() and not self.folder.is_dir():
            raise RequestError(f"{output} is no folder; shards write a file a part: name a folder with -o")
        require_place(self.folder / PLAN)
        loaded = zoo.load(model)
        kind = loaded.entry.pipeline()
        if engine == "auto":
            engine = "native" if precision == "int8" and "native" in kind.engines(loaded) else "onnxruntime"
        known = {option.name for option in loaded.entry.run_options}
        if unknown := more.keys() - known:
            raise RequestError(f"{model} has no option {', '.join(sorted(unknown))}; that is for other models")
        known_formats = FORMATS if kind.PARTS == "lines" else FORMATS[1:]
        suffix = format or known_formats[0]
        if suffix not in known_formats:
            raise RequestError(f"found the format {format}, wanted {', '.join(known_formats)}")
        self.pipeline = zoo.pipeline(model, precision, engine, threads, batch_size)
        self.on_error = on_error or self.pipeline.ON_ERROR
        self.options = more
        asked = {
            "version": OF_IMAGES if kind.PARTS == "files" else VERSION,
            "model": loaded.card.name,
            "digest": sha256(loaded.ensure(PRECISIONS[precision])),
            "precision": precision,
            "engine": engine,
            "on_error": self.on_error,
            "options": more,
            "format": suffix,
            "inputs": [each if each == "-" else remote_files.absolute(each) for each in inputs],
        }
        self.pipeline.in_parts = True
        self.plan = self._planned(asked, inputs)
        self.parts = [Part(**each) for each in self.plan["parts"]]

    def _planned(self, asked: dict[str, Any], inputs: Sequence[str]) -> dict[str, Any]:
        """The plan in the folder, or a new one, which is written there. inputs: as they were given."""
        path = self.folder / PLAN
        images = self.pipeline.PARTS == "files"
        files = [] if images else remote_files.expand(asked["inputs"])
        asked = {**asked, "files": {each: remote_files.identity(each) for each in files}}
        if path.is_file():
            found = read_json(path)
            if wrong := [key for key in asked if not isinstance(found, dict) or found.get(key) != asked[key]]:
                raise RequestError(
                    f"{self.folder} holds a run with another {', '.join(wrong)}; choose another folder, or remove it"
                )
            return dict(found)
        parts = cut(self.pipeline, inputs if images else asked["inputs"], self.options)
        plan = {**asked, "parts": [each.to_json() for each in parts]}
        results = (each for number in range(len(parts)) for each in _paths(self.folder, plan, number))
        _spare_all(results, [*files, *(each for part in parts for each in part.opened())])
        write_text(path, json.dumps(plan, indent=2) + "\n")  # in ASCII: names need not be UTF-8
        return plan

    def done(self, number: int) -> bool:
        """Whether the results of a part lie there."""
        return _done(self.folder, self.plan, number) is not None

    def score(self, number: int) -> dict[str, Any]:
        """Score a part, unless its results lie there whole; returns its manifest."""
        result, manifest = _paths(self.folder, self.plan, number)
        if (found := _done(self.folder, self.plan, number)) is not None:
            return found
        part = self.parts[number]
        self.pipeline.first_row = part.first or 0
        if isinstance(self.pipeline, ShardableRows):
            self.pipeline.with_label = part.with_label
        try:
            with reading(self.pipeline, part) as inputs:
                summary = self.pipeline.run(inputs, result, self.on_error, **self.options)
        except NoRow as error:
            rows = self.pipeline
            if self.on_error != "skip" or not error.left_out or self.options or not isinstance(rows, ShardableRows):
                raise type(error)(f"part {number} ({part}): {error}") from error
            about = {"engine": self.plan["engine"], "precision": self.plan["precision"]}
            summary = {**rows.write_no_rows(result, error.left_out), **about}
        except ZooError as error:
            raise type(error)(f"part {number} ({part}): {error}") from error
        found = {"part": number, "plan": _digest(self.plan), "sha256": sha256(result), **summary}
        write_json(manifest, found)
        return found


def run_shard(
    model: str | Path, inputs: Sequence[str], output: str | Path, shard: str = "1/1", **options: Any
) -> dict[str, Any]:
    """Scores one shard of the input. Writes output/part-NNNNN.* and a manifest for each part.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        inputs: Paths, glob patterns, folders or URLs.
        output: Folder of all shards, or copies of it that are merged afterwards.
        shard: "I/N", with I from 1 to N.
        **options: Options of `Work`.

    Returns:
        Totals of the summaries, "parts" and "kept" (parts scored before).

    Raises:
        RequestError: An option is invalid, or the folder holds another run.
    """
    own = Shard.parse(shard)
    work = Work(model, inputs, output, **options)
    numbers = own.of(len(work.parts))
    kept = sum(map(work.done, numbers))
    found = merged([work.score(each) for each in numbers])
    return {"model": work.plan["model"], "shard": shard, "parts": len(numbers), "kept": kept, **found}


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
    found = [_done(folder, plan, each, whole=True) for each in range(len(plan["parts"]))]
    if missing := [number for number, each in enumerate(found) if each is None]:
        some = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise ZooError(
            f"{output} lacks {len(missing)} of {len(found)} parts ({some}), or they are damaged; run the shards again: "
            "what is whole stays"
        )
    files = [str(_paths(folder, plan, each)[0]) for each in range(len(found))]
    return {
        "model": plan["model"],
        "parts": len(found),
        **merged([each for each in found if each is not None]),
        "files": files,
    }


def merged(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums of the counts in summaries; "seconds" added up; what all agree on, such as the engine."""
    found: dict[str, Any] = {}
    for name in summaries[0] if summaries else ():
        values = [each[name] for each in summaries if name in each]
        if name in ("part", "plan", "sha256") or any(word in name for word in SPEEDS):
            continue
        if all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
            found[name] = round(sum(values), 3) if any(isinstance(each, float) for each in values) else sum(values)
        elif all(each == values[0] for each in values):
            found[name] = values[0]
    return found


def _spare_all(results: Iterable[Path], inputs: Sequence[str]) -> None:
    """Raise RequestError where a result would replace an input. Looks once at each: there may be millions."""
    there = {_file(each): each for each in results if each.exists()}
    local = (each.removeprefix("file://") for each in inputs)
    for each in (each for each in local if there and not remote_files.is_url(each)):
        if (result := there.get(_file(each))) is not None:
            spare(result, each)


def _file(path: str | Path) -> tuple[int, int]:
    """What two names of one file have in common."""
    found = Path(path).stat()
    return found.st_dev, found.st_ino


def _digest(plan: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def _paths(folder: Path, plan: dict[str, Any], number: int) -> tuple[Path, Path]:
    """A part's results and its manifest."""
    name = f"part-{number:05d}"
    return folder / f"{name}{plan['format']}", folder / f"{name}.json"


def _done(folder: Path, plan: dict[str, Any], number: int, whole: bool = False) -> dict[str, Any] | None:
    """The manifest of a part that was scored by this plan and whose results are there. whole: their bytes are read."""
    result, manifest = _paths(folder, plan, number)
    if not (manifest.is_file() and result.is_file()):
        return None
    try:
        found = read_json(manifest)
    except RequestError:
        return None
    fits = isinstance(found, dict) and found.get("plan") == _digest(plan)
    return dict(found) if fits and (not whole or sha256(result) == found["sha256"]) else None
