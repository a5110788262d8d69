"""Search for the quickest recipe whose int8 model loses no more than allowed; the best model so far is always on disk.

1. What helps most nets most: ranges chosen tensor by tensor ("auto"), then bias correction, then equalization. 2. Where
most layers are matrix products, their inputs' ranges taken at run time. 3. The other observers, from histograms
collected once, and symmetric activations. Each is kept where it lowers the error. 4. Where the goal is not met yet:
layers left in float, in the order of what each was measured to gain, twice as many at every step, and then by bisection
as few as do. A trial that fails is logged and passed over. The search is steered by the SQNR of the outputs, which is
less noisy than a share of samples (by the metric where there is none); the goal is held against the metric. Every trial
is a line of a log, and a second run with the same model and data repeats none of them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.analysis import report, report_html
from pipelines.analysis.metrics import auc
from pipelines.core import files, machine
from pipelines.core.batches import Batch, cut, joined, length
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.core.progress import progress
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.engines.openvino import OpenVinoSession
from pipelines.engines.session import Session
from pipelines.engines.stock import STOCK, available
from pipelines.engines.timing import measure, time_each
from pipelines.graph import io
from pipelines.quantization.calibrate import CalibrationTable, Observation, observe
from pipelines.quantization.correction import correct_layers
from pipelines.quantization.equalize_channels import EqualizeChannels, channel_statistics
from pipelines.quantization.quantize import QuantReport, quantize
from pipelines.quantization.recipe import OBSERVERS, QuantRecipe

logger = logging.getLogger(__name__)

TIE = 1.05  # latencies closer than this are the same: the better model is kept
MEASURED = ("drop", "sqnr_db", "metric", "metrics", "milliseconds", "error")
PROBES = 24  # layers that are tried in float one at a time
PROBED = 16  # samples that these are judged on
RECIPE = QuantRecipe()
LAYERS = ("Conv", "Gemm", "MatMul")
Samples = Callable[[], Iterable[Batch]]
Made = tuple[ir.Model, QuantReport, CalibrationTable]


@dataclass(frozen=True)
class Settings:
    """One recipe to try. dynamic: of all matrix products (`Maker.products`). keep_float: names of operators."""

    observer: str = "auto"
    symmetric: bool = False
    equalize: bool = False
    correct: bool = False
    dynamic: bool = False
    keep_float: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What a person reads."""
        words = [self.observer, *(key for key in ("symmetric", "equalize", "correct", "dynamic") if getattr(self, key))]
        return " + ".join([*words, *([f"{len(self.keep_float)} float"] if self.keep_float else [])])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**dataclasses.asdict(self), "keep_float": list(self.keep_float)}


@dataclass(frozen=True)
class Verdict:
    """What was lost against the float model: the drop of the metric (a share, 0.005 = half a point), SQNR of the
    outputs in dB if known.
    """

    drop: float
    sqnr_db: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Judge(Protocol):
    """What says how good an int8 model is."""

    digest: str  # names the evaluation data
    metric: str
    example: Batch  # the batch that latency is measured on

    def __call__(self, fp32: Session, int8: Session) -> Verdict:
        """Compare the two on all evaluation samples."""


class Unjudged(RequestError):
    """Evaluation samples or labels by which no model can be judged: the search ends, where a trial that fails is passed
    over.
    """


class ArrayJudge:
    """Evaluation samples as arrays {graph input: [n, ...]}, with or without labels [n, ...].

    The first output decides. With labels: "top1" for outputs [n, classes] and integer labels [n]; "auc" for one score a
    sample and labels of 0 / 1; "r2" for labels like the output. Without: "agreement", the share of samples with the
    float model's arg-max, for outputs [n, classes], and "closeness" = 1 - |y - x| / |x| (Euclidean norms) for others.
    Raises RequestError for labels that fit none of these.
    """

    def __init__(self, arrays: Batch, labels: NDArray[Any] | None = None, batch_size: int = 1) -> None:
        self._arrays, self._labels, self._size = arrays, labels, batch_size
        self._count = length(arrays)
        if labels is not None and len(labels) != self._count:
            raise RequestError(f"found {len(labels)} labels for {self._count} samples; wanted one each")
        self.example: Batch = {name: array[:batch_size] for name, array in arrays.items()}
        self.metric = "" if labels is not None else "agreement"
        sha = hashlib.sha256()
        for name, array in sorted({**arrays, **({} if labels is None else {"": labels})}.items()):
            sha.update(f"{name} {array.dtype} {array.shape}".encode())
            sha.update(
                np.ascontiguousarray(array).tobytes() if array.dtype != object else repr(array.tolist()).encode()
            )
        self.digest = sha.hexdigest()
        self._fp32: dict[str, NDArray[Any]] = {}

    def __call__(self, fp32: Session, int8: Session) -> Verdict:
        """See `Judge`. The float model runs once."""
        self._fp32 = self._fp32 or self._run(fp32)
        x, y = self._fp32, self._run(int8)
        first = next(iter(x))
        if not np.isfinite(x[first]).all():
            raise Unjudged(
                "the float model computes NaN or infinity on the evaluation samples; check the samples and the model"
            )
        if not np.isfinite(y[first]).all():
            return Verdict(float("inf"))
        self.metric, score = _metric(x[first], self._labels)
        scores = {"fp32": score(x[first]), "int8": score(y[first])}
        floats = [name for name in x if x[name].dtype.kind == "f"]
        return Verdict(
            scores["fp32"] - scores["int8"],
            report.sqnr([x[name] for name in floats], [y[name] for name in floats]),
            scores,
        )

    def _run(self, session: Session) -> dict[str, NDArray[Any]]:
        pieces = cut(self._arrays, self._size)
        return joined(
            [session.run({name: np.ascontiguousarray(array) for name, array in each.items()}) for each in pieces]
        )


def _metric(x: NDArray[Any], labels: NDArray[Any] | None) -> tuple[str, Callable[[NDArray[Any]], float]]:
    """The metric for a float model's output `x`, and what computes it of another output; 1 is best."""
    classes = x.ndim == 2 and x.shape[1] > 1
    if labels is None:
        if classes:
            return "agreement", lambda y: float((y.argmax(1) == x.argmax(1)).mean())
        size = max(float(np.linalg.norm(x.astype(np.float64))), 1e-30)
        return "closeness", lambda y: 1 - float(np.linalg.norm((y - x).astype(np.float64))) / size
    if classes and labels.dtype.kind in "iu" and labels.ndim == 1:
        if not 0 <= labels.min() <= labels.max() < x.shape[1]:
            raise Unjudged(
                f"found labels {labels.min()} to {labels.max()}; wanted 0 to {x.shape[1] - 1}, for outputs "
                f"{list(x.shape)}"
            )
        return "top1", lambda y: float((y.argmax(1) == labels).mean())
    found = f"labels {labels.dtype} {list(labels.shape)} for outputs {list(x.shape)}"
    wanted = "class numbers [n] for outputs [n, classes], or values like the output's"
    if labels.dtype.kind not in "biuf" or not np.isfinite(labels).all():
        raise Unjudged(f"found {found}, not all of them numbers; wanted {wanted}")
    if labels.size == x.size == len(x) and set(np.unique(labels)) == {0, 1}:
        return "auc", lambda y: auc(labels.ravel().astype(np.float64), y.ravel().astype(np.float64))
    if labels.shape == x.shape or labels.size == x.size:
        truth = labels.reshape(x.shape).astype(np.float64)
        spread = float(((truth - truth.mean()) ** 2).sum()) or 1.0
        return "r2", lambda y: 1 - float(((y - truth) ** 2).sum()) / spread
    raise Unjudged(f"found {found}; wanted {wanted}")


class Maker:
    """Makes the int8 model of any `Settings`; each graph (as it is, and equalized) is observed once, at its first
    use.
    """

    def __init__(self, model: ir.Model, samples: Samples, recipe: QuantRecipe, total: int | None = None) -> None:
        self.samples, self._recipe, self._total = samples, recipe, total
        self._models: dict[bool, ir.Model | None] = {False: model}
        self._observed: dict[bool, Observation] = {}
        self._tables: dict[tuple[bool, str, bool], CalibrationTable] = {}

    def floating(self, equalize: bool) -> ir.Model | None:
        """The float model that is quantized; None where equalizing changes nothing."""
        if equalize not in self._models:
            model = self._models[False]
            assert model is not None
            found = model.clone()
            changed = EqualizeChannels(channel_statistics(found, self.samples(), self._total))(found).modified
            self._models[equalize] = found if changed else None
        return self._models[equalize]

    def products(self, settings: Settings) -> list[str]:
        """The int8 Gemm and MatMul, where they are most of the int8 layers; else none."""
        _, said, _ = self.make(dataclasses.replace(settings, correct=False, dynamic=False, keep_float=()))
        layers = {each.name: each.type for each in said.operators if each.precision == "int8" and each.type in LAYERS}
        found = [name for name, kind in layers.items() if kind != "Conv"]
        return found if 2 * len(found) > len(layers) else []

    def make(self, settings: Settings) -> Made:
        """(int8 model, report, table)."""
        model = self.floating(settings.equalize)
        assert model is not None
        if settings.equalize not in self._observed:
            self._observed[settings.equalize] = observe(model, self.samples(), self._total)
        key = settings.equalize, settings.observer, settings.symmetric
        if key not in self._tables:
            self._tables[key] = self._observed[settings.equalize].table(settings.observer, symmetric=settings.symmetric)
        table = self._tables[key]
        keep = (*self._recipe.keep_float, *map(re.escape, settings.keep_float))
        dynamic = (*self._recipe.dynamic, *(map(re.escape, self.products(settings)) if settings.dynamic else ()))
        options: dict[str, Any] = {
            "observer": settings.observer,
            "symmetric": settings.symmetric,
            "keep_float": keep,
            "dynamic": dynamic,
        }
        int8, said = quantize(model, dataclasses.replace(self._recipe, **options), table)
        if settings.correct:
            int8, _ = correct_layers(model, int8, self.samples())
        return int8, said, table


class _Enough(Exception):
    """The time budget is spent."""


def tune(
    model: ir.Model,
    samples: Samples,
    judge: Judge,
    output: str | Path,
    *,
    max_drop: float = 0.005,
    seconds: float = 1200.0,
    engine: str = "auto",
    threads: int = 1,
    recipe: QuantRecipe = RECIPE,
    total: int | None = None,
    report_path: str | Path | None = None,
) -> dict[str, Any]:
    """Write to `output` the quickest int8 model whose metric drops by no more than `max_drop`, else the one that loses
    least.

    model: float, rewritten. samples() starts the calibration batches anew; total: how many samples they are. seconds:
    no trial begins that would end later, but the first. engine: the one that models are judged and timed in; "auto":
    the quickest on the first int8 model.
    recipe: what all trials share. report_path: where a report of the model found goes, see
    `pipelines.analysis.report_html.save`. The log lies beside the output (`log_path`); Ctrl-C ends the search like the
    budget does. Returns {"path", "log", "met", "missed_by", "stopped": "done" | "time" | "interrupted", "metric",
    "max_drop", "engine", "fp32_ms", "best": a trial, "trials": [{"name", "settings", "drop", "sqnr_db", "metrics",
    "milliseconds", "seconds", "sha256", "best"}]}. Raises RequestError for a budget or threads out of range, or where
    not even the first model could be made.
    """
    machine.require_threads(threads)
    if not 0 <= seconds < math.inf:
        raise RequestError(f"the time budget is {seconds} seconds; give 0 (one trial) or more, such as 20m")
    search = _Search(Maker(model, samples, recipe, total), judge, Path(output), max_drop, seconds, threads)
    with tempfile.TemporaryDirectory() as folder, progress("tuning, seconds", round(seconds)) as advance:
        search.open(Path(folder), engine, recipe, advance)
        try:
            search.run()
            stopped = "done"
        except _Enough:
            stopped = "time"
        except KeyboardInterrupt:
            if not search.trials:
                raise
            stopped = "interrupted"
        return search.finish(stopped, report_path)


def log_path(output: str | Path) -> Path:
    """Where the trials for a model at `output` are logged."""
    return Path(output).with_suffix(".trials.jsonl")


class _Passing(OpenVinoSession):
    """OpenVINO for a model that is opened once: nothing is cached on disk."""

    cached = False


def _open(path: Path, engine: str, threads: int) -> Session:
    return _Passing(path, threads) if engine == "openvino" else OnnxRuntimeSession(path, threads)


class _Search:
    """State of one search; the log is its memory."""

    def __init__(self, maker: Maker, judge: Judge, output: Path, max_drop: float, seconds: float, threads: int) -> None:
        self.maker, self.judge, self.output, self.max_drop, self.threads = maker, judge, output, max_drop, threads
        self.start, self.seconds, self.log = time.monotonic(), seconds, log_path(output)
        self.trials: dict[Settings, dict[str, Any]] = {}
        self.probes: dict[str, float | None] = {}
        self.orders: dict[str, list[str]] = {}
        self.kept: tuple[Settings, Made] | None = None  # what lies in the output, if it was made in this run
        self.shown = 0.0

    def open(self, folder: Path, engine: str, recipe: QuantRecipe, advance: Callable[[float], None]) -> None:
        """Open the float model, take over the trials of a run before this one, choose the engine."""
        if engine != "auto" and engine not in available():
            raise RequestError(f"unknown or missing engine {engine!r}; choose auto, {' or '.join(STOCK)}")
        self.folder, self.advance = folder, advance
        fp32 = self.maker.floating(False)
        assert fp32 is not None
        self.float_path = io.save(fp32.clone(), folder / "fp32.onnx")
        what = {
            "model": io.digest(fp32),
            "evaluation": self.judge.digest,
            "calibration": _digest(self.maker.samples()),
            "recipe": recipe.to_json(),
            "machine": machine.fingerprint(),
            "threads": self.threads,
            "batch_size": length(self.judge.example),
        }
        head, lines = _read_log(self.log)
        if (
            head
            and {key: head.get(key) for key in what} == json.loads(json.dumps(what))
            and engine in ("auto", head.get("engine"))
        ):
            self.engine, self.fp32_ms = head["engine"], head["fp32_ms"]
            for line in lines:
                if "order" in line:
                    self.orders[line["on"]] = line["order"]
                elif "layer" in line:
                    self.probes[f"{line['on']} {line['layer']}"] = line["sqnr_db"]
                else:
                    settings = Settings(**{**line["settings"], "keep_float": tuple(line["settings"]["keep_float"])})
                    self.trials[settings] = line
            self.fp32 = _open(self.float_path, self.engine, self.threads)
            files.write_text(
                self.log, "".join(json.dumps(line) + "\n" for line in (head, *lines))
            )  # the last line may have been cut off
            return
        if head:
            logger.warning("%s is of another model, data or machine; the search begins anew", self.log)
        self.engine = engine if engine != "auto" else self._quickest()
        self.fp32 = _open(self.float_path, self.engine, self.threads)
        (self.fp32_ms,) = measure([self.fp32], self.judge.example)
        files.write_text(self.log, json.dumps({**what, "engine": self.engine, "fp32_ms": self.fp32_ms}) + "\n")

    def _quickest(self) -> str:
        path = io.save(self.maker.make(Settings())[0], self.folder / "first.onnx")
        times = time_each(
            {name: functools.partial(_open, path, name, self.threads) for name in available()}, self.judge.example
        )
        return min(times, key=times.__getitem__)

    def run(self) -> None:
        """The search of the module's docstring."""
        for observer in OBSERVERS:
            base = self._try(Settings(observer=observer))
            if self.trials[base]["drop"] is not None:
                break
        else:
            return
        base = self._better(base, correct=True)
        if self.maker.floating(True) is not None:
            base = self._better(base, equalize=True)
        if self.maker.products(base):
            dynamic = self._better(base, dynamic=True)
            if self.trials[dynamic].get("milliseconds", 0) < self.fp32_ms:  # an engine may have no kernels for it
                base = dynamic
        for observer in OBSERVERS:
            base = self._better(base, observer=observer)
        base = self._better(base, symmetric=True)
        if any(map(self._meets, self.trials.values())):
            return
        order = self._fallbacks(dataclasses.replace(base, dynamic=False))
        few, many = 0, 0
        while not many and few < len(order):
            count = min(max(2 * few, 1), len(order))
            if self._meets(self.trials[self._try(dataclasses.replace(base, keep_float=tuple(sorted(order[:count]))))]):
                many = count
            else:
                few = count
        while many - few > 1:
            count = (few + many) // 2
            if self._meets(self.trials[self._try(dataclasses.replace(base, keep_float=tuple(sorted(order[:count]))))]):
                many = count
            else:
                few = count

    def _try(self, settings: Settings) -> Settings:
        """Make, judge and time one model, unless the log has it; it is written to the output where it is the best so
        far.
        """
        if settings not in self.trials:
            self._in_time()
            before = time.monotonic()
            line: dict[str, Any] = {
                "name": settings.name,
                "settings": settings.to_json(),
                "drop": None,
                "sqnr_db": None,
            }
            try:
                made = self.maker.make(settings)
                path = io.save(made[0], self.folder / "trial.onnx")
                line["sha256"] = files.sha256(path)
                line |= self._same(line["sha256"]) or self._measured(path)
            except Unjudged:
                raise
            except Exception as error:  # of whatever kind: the search goes on with what works
                line["error"] = one_line(error)
                logger.warning("%s fails: %s", settings.name, line["error"])
            line["seconds"] = round(time.monotonic() - before, 2)
            self.trials[settings] = line
            self._note(line)
            if line["drop"] is not None and self._winner() == settings:
                with files.replacing(self.output) as temporary:
                    shutil.copyfile(path, temporary)
                self.kept = settings, made
        return settings

    def _same(self, sha256: str) -> dict[str, Any]:
        """What was measured of the very same file, for another recipe; {} where there is none."""
        lines = (line for line in self.trials.values() if line.get("sha256") == sha256)
        return {key: value for line in itertools.islice(lines, 1) for key, value in line.items() if key in MEASURED}

    def _measured(self, path: Path) -> dict[str, Any]:
        session = _open(path, self.engine, self.threads)
        verdict = self.judge(self.fp32, session)
        if not np.isfinite(verdict.drop):
            return {"error": "computes NaN or infinity"}
        fp32_ms, int8_ms = measure(
            [self.fp32, session], self.judge.example
        )  # in turn, so that trials hours apart compare
        milliseconds = round(int8_ms / fp32_ms * self.fp32_ms, 4)
        scores = {"metric": self.judge.metric, "metrics": dict(verdict.metrics)}
        return {"drop": verdict.drop, "sqnr_db": verdict.sqnr_db, **scores, "milliseconds": milliseconds}

    def _in_time(self) -> None:
        """Raise _Enough where the next trial would end after the budget."""
        spent = time.monotonic() - self.start
        self.advance(spent - self.shown)
        self.shown = spent
        taken = [line["seconds"] for line in self.trials.values()]
        if taken and spent + float(np.median(taken)) > self.seconds:
            raise _Enough

    def _note(self, line: Mapping[str, Any]) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _meets(self, line: Mapping[str, Any]) -> bool:
        return line["drop"] is not None and line["drop"] <= self.max_drop + 1e-12

    def _better(self, base: Settings, **changes: Any) -> Settings:
        """`base`, or where that has less error, it with `changes`, which is tried."""
        tried = self._try(dataclasses.replace(base, **changes))
        return min((base, tried), key=lambda each: self._error(self.trials[each]))

    @staticmethod
    def _error(line: Mapping[str, Any]) -> tuple[float, float]:
        drop = float("inf") if line["drop"] is None else line["drop"]
        return (drop, 0.0) if line["sqnr_db"] is None else (-line["sqnr_db"] if np.isfinite(drop) else drop, drop)

    def _winner(self) -> Settings | None:
        """The trial whose model is to be kept."""
        usable = {settings: line for settings, line in self.trials.items() if line["drop"] is not None}
        meeting = {settings: line for settings, line in usable.items() if self._meets(line)}
        if meeting:
            least = min(line["milliseconds"] for line in meeting.values()) * TIE
            usable = {settings: line for settings, line in meeting.items() if line["milliseconds"] <= least}
        return min(usable, key=lambda each: (usable[each]["drop"], *self._error(usable[each])), default=None)

    def _fallbacks(self, base: Settings) -> list[str]:
        """The int8 layers of the base's model, those first that gain the outputs most SQNR where they stay float.

        All are ordered by the error that they add themselves; the first `PROBES` of them are then tried one at a time.
        """
        if base.name in self.orders:
            return self.orders[base.name]
        model = self.maker.floating(base.equalize)
        assert model is not None
        few = _first(self.maker.samples(), PROBED)
        own = report.noise_of_layers(model, *self.maker.make(base), [few])
        order = sorted(own, key=lambda name: own[name])
        float_session = OnnxRuntimeSession(self.float_path, self.threads)
        wanted = float_session.run(few)
        gains = {}
        names = [each for each in wanted if wanted[each].dtype.kind == "f"]
        for name in order[:PROBES]:
            key = f"{base.name} {name}"
            if key not in self.probes:
                self._in_time()
                try:
                    without = self.maker.make(dataclasses.replace(base, correct=False, keep_float=(name,)))[0]
                    found = OnnxRuntimeSession(io.save(without, self.folder / "probe.onnx"), self.threads).run(few)
                except ZooError as error:
                    logger.warning("%s cannot be tried in float: %s", name, error)
                    continue
                self.probes[key] = report.sqnr([wanted[each] for each in names], [found[each] for each in names])
                self._note({"layer": name, "on": base.name, "sqnr_db": self.probes[key]})
            gains[name] = self.probes[key]
        exact = float("inf")
        best = sorted(gains, key=lambda name: -(exact if (gain := gains[name]) is None else gain))
        order = [*best, *(name for name in order if name not in gains)]
        self.orders[base.name] = order
        self._note({"order": order, "on": base.name})
        return order

    def finish(self, stopped: str, report_path: str | Path | None) -> dict[str, Any]:
        """Put the winner where it belongs, if it is not there, and say what was found; in a report of the winner, too,
        if asked.
        """
        settings = self._winner()
        if settings is None:
            problems = "; ".join(sorted({str(line.get("error")) for line in self.trials.values()}))
            raise ZooError(f"no recipe gave a model that runs: {problems}")
        best = self.trials[settings]
        lost = not self.output.is_file() or files.sha256(self.output) != best["sha256"]
        if (lost or report_path is not None) and (
            self.kept is None or self.kept[0] != settings
        ):  # of a run before this one
            self.kept = settings, self.maker.make(settings)
        if lost and self.kept is not None:
            io.save(self.kept[1][0], self.output)
        met = self._meets(best)
        shared = {"max_drop": self.max_drop, "fp32_ms": self.fp32_ms}
        trials = [{**line, **shared, "best": line is best} for line in self.trials.values()]
        if report_path is not None and self.kept is not None:
            model = self.maker.floating(settings.equalize)
            assert model is not None
            report_html.save(report.explain(model, *self.kept[1], self.maker.samples(), trials=trials), report_path)
        return {
            "path": str(self.output),
            "log": str(self.log),
            "met": met,
            "missed_by": 0.0 if met else best["drop"] - self.max_drop,
            "stopped": stopped,
            "metric": best.get("metric", self.judge.metric),
            "max_drop": self.max_drop,
            "engine": self.engine,
            "fp32_ms": self.fp32_ms,
            "best": best,
            "trials": trials,
        }


def _first(samples: Iterable[Batch], count: int) -> dict[str, NDArray[Any]]:
    """The first `count` samples as one batch."""
    parts: list[Batch] = []
    for batch in samples:
        parts.append(batch)
        if sum(map(length, parts)) >= count:
            break
    return next(cut(joined(parts), count))


def _digest(samples: Iterable[Batch]) -> str:
    """What names the calibration samples, however they are batched."""
    digests: dict[str, Any] = {}
    for batch in samples:
        for name, array in batch.items():
            sha = digests.setdefault(name, hashlib.sha256(f"{array.dtype} {array.shape[1:]}".encode()))
            sha.update(np.ascontiguousarray(array).tobytes())
    return hashlib.sha256(
        "".join(f"{name} {each.hexdigest()}" for name, each in sorted(digests.items())).encode()
    ).hexdigest()


def _read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(what the log is of, its lines); a last line that was cut off is left out."""
    found = []
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            found.append(json.loads(text))
    except (OSError, ValueError):
        pass
    return (found[0], found[1:]) if found and isinstance(found[0], dict) else ({}, [])
