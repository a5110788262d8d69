"""Search of the fastest recipe with an allowed quality drop; the best model so far is always on disk.

1. The default recipe: ranges chosen tensor by tensor ("auto"), GPTQ and bias correction.
2. The search of `zoo quantize --search`: equalized channels, clipped weights, ranges refined by the outputs.
3. If most layers are matrix products: dynamic quantization of their inputs.
4. The other observers, symmetric activations, and no correction; each is kept if it lowers the error.
5. If the goal is not met: float layers in the order of their measured gain, doubled at every step, then the fewest that
   suffice by bisection.

Failed trials are logged and skipped. The search follows the SQNR of the outputs, which is less noisy than a metric; the
goal applies to the metric. Models that differ only in constants are timed once. A log records all results, and a second
run with the same model and data repeats none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.analysis import report, report_html
from pipelines.analysis.quality_metric import MetricError, QualityMetric
from pipelines.analysis.tuning_log import log_path, read_log, samples_digest, structure
from pipelines.analysis.tuning_settings import PLAIN, Made, Maker, Settings, first_samples
from pipelines.core import deadline, files, machine
from pipelines.core.batches import Batch, length
from pipelines.core.deadline import TimeIsUp
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.core.progress import progress
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.engines.openvino.session import OpenVinoSession
from pipelines.engines.session import Runnable
from pipelines.engines.stock import available, require_installed
from pipelines.engines.timing import measure, time_each
from pipelines.graph import io
from pipelines.quantization.recipe import OBSERVERS, QuantRecipe

logger = logging.getLogger(__name__)

FORMAT = 3  # version of the log; increment it if the same settings give another model
LATENCY_TIE = 1.05  # ratio of latencies that count as equal; the better model is kept
FIGURES = ("drop", "sqnr_db", "metric", "metrics", "milliseconds", "error")
SEARCH_COST = 4  # estimated time of the first trial with search, in trials of the default recipe
PROBED_LAYERS = 24  # layers that are tried in float one by one
FIRST_SHARE = 0.8  # share of the budget for the first trial; the rest is for a plain trial
PLAIN_SAMPLES = 16  # calibration samples of the plain trial
PROBE_SAMPLES = 16  # samples to evaluate them on
RECIPE = QuantRecipe()
Trial = dict[str, Any]  # a line of the log
Opener = Callable[[Path, str, int], Runnable]  # (model file, engine, threads) -> what runs it


class _UncachedOpenVino(OpenVinoSession):
    """OpenVINO session without a cache on disk, for models that are opened once."""

    cached = False
    sizes = ()  # only those in use are checked


def open_stock(path: Path, engine: str, threads: int) -> Runnable:
    """Opens a model file in onnxruntime or OpenVINO.

    Args:
        path: Model file.
        engine: Name of the engine.
        threads: Intra-op threads.

    Returns:
        The session.
    """
    return _UncachedOpenVino(path, threads) if engine == "openvino" else OnnxRuntimeSession(path, threads)


def tune(
    model: ir.Model,
    samples: Iterable[Batch],
    metric: QualityMetric,
    output: str | Path,
    *,
    max_drop: float = 0.005,
    seconds: float = 1200.0,
    engine: str = "auto",
    threads: int = 1,
    recipe: QuantRecipe = RECIPE,
    total: int | None = None,
    report_path: str | Path | None = None,
    opener: Opener = open_stock,
    engines: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Writes the fastest int8 model whose metric drops by at most `max_drop`, or else the one of least drop.

    The log is in the folder of the output (`log_path`); Ctrl-C ends the search as the budget does.

    Args:
        model: Float model after the rewrites.
        samples: Calibration batches; iterated several times, so not an iterator.
        metric: Quality metric on evaluation data.
        output: ONNX file to write.
        max_drop: Allowed drop of the metric as a share.
        seconds: Time budget. No trial begins that would end later; a trial that exceeds it is abandoned. If that is the
            first, a plain model is calibrated on few samples instead.
        engine: Engine for evaluation and timing; "auto": the fastest of `engines` on the first int8 model.
        threads: Intra-op threads.
        recipe: Options that all trials share.
        total: Number of samples.
        report_path: Report of the best model to write, see `pipelines.analysis.report_html.save`.
        opener: Opens a model file in an engine.
        engines: Engines to choose from; None: the installed stock engines.

    Returns:
        {"path", "log", "met", "missed_by", "stopped": "done" | "time" | "interrupted", "metric", "max_drop", "engine",
        "fp32_ms" and "fp32_engine" (fastest float), "best": a trial, "trials": [{"name", "settings", "drop", "sqnr_db",
        "metrics", "milliseconds", "seconds", "sha256", "best"}]}.

    Raises:
        RequestError: The budget or threads are out of range, or the engine is unknown.
        ZooError: No trial made a model that runs.
    """
    machine.require_threads(threads)
    if not 0 <= seconds < math.inf:
        raise RequestError(f"the time budget is {seconds} seconds; give 0 (one trial) or more, such as 20m")
    require_installed(engine)
    engines = available() if engines is None else engines
    if engine != "auto" and engine not in engines:
        raise RequestError(f"unknown or missing engine {engine!r}; choose auto, {' or '.join(engines)}")
    maker = Maker(model, samples, recipe, total)
    with tempfile.TemporaryDirectory() as folder, progress("tuning, seconds", round(seconds)) as advance:
        search = _Search(maker, metric, Path(output), Path(folder), opener, threads, max_drop, seconds, advance)
        search.open(engines if engine == "auto" else [engine], recipe)
        try:
            search.run()
            stopped = "done"
        except TimeIsUp:
            stopped = "time"
            search.write_fallback()
        except KeyboardInterrupt:
            if not search.trials:
                raise
            stopped = "interrupted"
        return search.finish(stopped, report_path)


@dataclass
class _Search:
    """State of one search; the log stores it."""

    maker: Maker
    metric: QualityMetric
    output: Path
    folder: Path  # for models that are only tried
    opener: Opener
    threads: int
    max_drop: float
    seconds: float
    advance: Callable[[float], None]

    def __post_init__(self) -> None:
        self.start, self.log = time.monotonic(), log_path(self.output)
        self.trials: dict[Settings, Trial] = {}
        self.probes: dict[str, float | None] = {}  # SQNR with one layer in float, by base and layer
        self.orders: dict[str, list[str]] = {}  # layers to leave in float, by base
        self.latencies: dict[str, float] = {}  # milliseconds, by `structure`
        self.written: tuple[Settings, Made] | None = None  # the content of the output, if this run made it
        self.float_ms: dict[str, float] = {}  # milliseconds of the float model, by engine
        self.shown = 0.0  # seconds, on the progress bar

    def open(self, engines: Sequence[str], recipe: QuantRecipe) -> None:
        """Opens the float model, reads the trials of an earlier run, and selects the engine."""
        self.float_path = io.save(self.maker.model.clone(), self.folder / "fp32.onnx")
        subject = {
            "format": FORMAT,
            "model": io.digest(self.maker.model),
            "evaluation": self.metric.digest,
            "calibration": samples_digest(self.maker.samples),
            "recipe": recipe.to_json(),
            "machine": machine.fingerprint(),
            "threads": self.threads,
            "batch_size": length(self.metric.example),
        }
        head, lines = read_log(self.log)
        if all(head.get(key) == value for key, value in subject.items()) and head.get("engine") in engines:
            self.engine = head["engine"]
            self.float_ms = head["float_ms"]
            for line in lines:
                self._restore(line)
            self.fp32 = self._open(self.float_path, self.engine)
            text = "".join(json.dumps(line) + "\n" for line in (head, *lines))  # the last line may have been cut off
            files.write_text(self.log, text)
            return
        if head:
            logger.warning("%s is of another model, data or machine; the search starts again", self.log)
        openers = {name: functools.partial(self._open, self.float_path, name) for name in engines}
        self.float_ms = time_each(openers, self.metric.example)
        self.engine = engines[0] if len(engines) == 1 else self._quickest(engines)
        self.fp32 = self._open(self.float_path, self.engine)
        if self.engine not in self.float_ms:
            (self.float_ms[self.engine],) = measure([self.fp32], self.metric.example)
        files.write_text(self.log, json.dumps({**subject, "engine": self.engine, "float_ms": self.float_ms}) + "\n")

    def _restore(self, line: dict[str, Any]) -> None:
        """Takes over a line of the log of an earlier run."""
        if "order" in line:
            self.orders[line["on"]] = line["order"]
        elif "layer" in line:
            self.probes[f"{line['on']} {line['layer']}"] = line["sqnr_db"]
        elif "structure" in line:
            self.latencies[line["structure"]] = line["milliseconds"]
        elif "equalization" in line:
            factors = {name: tuple(values) for name, values in line["equalization"].items()}
            self.maker.searched = line["clip"], factors
        else:
            self.trials[Settings.from_json(line["settings"])] = line

    def _open(self, path: Path, engine: str) -> Runnable:
        return self.opener(path, engine, self.threads)

    def _quickest(self, engines: Sequence[str]) -> str:
        """Returns the fastest engine of the first int8 model; of the float model if the time ends before."""
        try:
            with deadline.limit(self.start + FIRST_SHARE * self.seconds):
                made = self.maker.make(Settings(correct=False))[0]
        except TimeIsUp:
            return min(self.float_ms, key=self.float_ms.__getitem__)
        path = io.save(made, self.folder / "first.onnx")
        times = time_each({name: functools.partial(self._open, path, name) for name in engines}, self.metric.example)
        return min(times, key=times.__getitem__)

    def run(self) -> None:
        """Runs the search described in the module docstring."""
        for observer, correct in itertools.product(OBSERVERS, (True, False)):
            base = self._try(Settings(observer, correct=correct))
            if self.trials[base]["drop"] is not None:
                break
        else:
            return
        if self._has_time(dataclasses.replace(base, search=True)):
            base = self._better(base, search=True)
        if self.maker.products(base):
            dynamic = self._better(base, dynamic=True)
            # an engine without kernels for dynamic quantization is slower with it
            if self.trials[dynamic].get("milliseconds", 0) < self.float_ms[self.engine]:
                base = dynamic
        for observer in OBSERVERS:
            base = self._better(base, observer=observer)
        base = self._better(base, symmetric=True)
        base = self._better(base, correct=False)
        if not any(map(self._meets, self.trials.values())):
            self._leave_float(base)

    def _leave_float(self, base: Settings) -> None:
        """Tries `base` with 1, 2, 4, ... float layers until the goal is met, then bisects to the smallest number."""
        order = self._fallbacks(dataclasses.replace(base, dynamic=False))

        def enough(count: int) -> bool:
            tried = self._try(dataclasses.replace(base, keep_float=tuple(sorted(order[:count]))))
            return self._meets(self.trials[tried])

        few, many = 0, 0
        while not many and few < len(order):
            count = min(max(2 * few, 1), len(order))
            few, many = (few, count) if enough(count) else (count, 0)
        while many - few > 1:
            count = (few + many) // 2
            few, many = (few, count) if enough(count) else (count, many)

    def _try(self, settings: Settings) -> Settings:
        """Makes, evaluates and times one model unless the log has it; writes the best model so far to the output."""
        if settings not in self.trials:
            self._require_time()
            start = time.monotonic()
            trial: Trial = {"name": settings.name, "settings": settings.to_json(), "drop": None, "sqnr_db": None}
            try:
                with deadline.limit(self.start + (1 if self.trials else FIRST_SHARE) * self.seconds):
                    made = self._make(settings)
                    path = self._evaluated(trial, made)
            except (MetricError, TimeIsUp):
                raise
            except Exception as error:  # of whatever kind: the search goes on with what works
                trial["error"] = one_line(error)
                logger.warning("%s fails: %s", settings.name, trial["error"])
            trial["seconds"] = round(time.monotonic() - start, 2)
            self.trials[settings] = trial
            self._note(trial)
            if trial["drop"] is not None and self._winner() == settings:
                self._write(path, settings, made)
        return settings

    def _evaluated(self, trial: Trial, made: Made) -> Path:
        """Evaluates and times the file of a trial; the figures are added to `trial`."""
        path = io.save(made[0], self.folder / "trial.onnx")
        trial["sha256"] = files.sha256(path)
        graph = structure(made[0], trial["settings"]["symmetric"])
        trial |= self._same(trial["sha256"]) or self._measured(path, graph)
        return path

    def _write(self, path: Path, settings: Settings, made: Made) -> None:
        files.copy_file(path, self.output)
        self.written = settings, made

    def write_fallback(self) -> None:
        """Writes a model with the settings `PLAIN` if no trial ended in time.

        It is not logged as a trial, because another run may have the time.
        """
        if self._winner() is not None:
            return
        logger.warning("the time budget is too short for one trial; the model gets min-max ranges (--time-budget)")
        start = time.monotonic()
        trial: Trial = {"name": f"{PLAIN.name}, few samples", "settings": PLAIN.to_json(), "drop": None}
        trial["sqnr_db"] = None
        made = self.maker.plain(max(PLAIN_SAMPLES, length(self.metric.example)))
        path = self._evaluated(trial, made)
        trial["seconds"] = round(time.monotonic() - start, 2)
        self.trials[PLAIN] = trial
        self._write(path, PLAIN, made)

    def _make(self, settings: Settings) -> Made:
        """Makes the model of a trial; the result of its search is added to the log."""
        before = self.maker.searched
        made = self.maker.make(settings)
        if self.maker.searched is not None and before is None:
            clip, factors = self.maker.searched
            self._note({"clip": clip, "equalization": factors})
        return made

    def _same(self, sha256: str) -> Trial:
        """Returns the figures of an earlier trial with the same file, or {}."""
        for trial in self.trials.values():
            if trial.get("sha256") == sha256:
                return {key: value for key, value in trial.items() if key in FIGURES}
        return {}

    def _measured(self, path: Path, structure: str) -> Trial:
        session = self._open(path, self.engine)
        verdict = self.metric(self.fp32, session)
        if not np.isfinite(verdict.drop):
            return {"error": "computes NaN or infinity"}
        if structure not in self.latencies:  # in turn, so that trials hours apart compare
            fp32_ms, int8_ms = measure([self.fp32, session], self.metric.example)
            self.latencies[structure] = round(int8_ms / fp32_ms * self.float_ms[self.engine], 4)
            self._note({"structure": structure, "milliseconds": self.latencies[structure]})
        scores = {"metric": self.metric.name, "metrics": dict(verdict.metrics)}
        latency = {"milliseconds": self.latencies[structure]}
        return {"drop": verdict.drop, "sqnr_db": verdict.sqnr_db, **scores, **latency}

    def _expected(self) -> float:
        """Returns the estimated seconds of the next trial; 0 before the first."""
        return float(np.median([trial["seconds"] for trial in self.trials.values()] or [0.0]))

    def _require_time(self) -> None:
        """Raises TimeIsUp if the next trial would exceed the budget."""
        spent = time.monotonic() - self.start
        self.advance(spent - self.shown)
        self.shown = spent
        if self.trials and spent + self._expected() > self.seconds:
            raise TimeIsUp

    def _has_time(self, searched: Settings) -> bool:
        """Whether the first trial of the search for equalization ends within the budget, where a plain trial does."""
        if searched in self.trials:
            return True
        self._require_time()
        if time.monotonic() - self.start + SEARCH_COST * self._expected() <= self.seconds:
            return True
        logger.warning("the time left is too short for the search for equalized channels, which is skipped")
        return False

    def _note(self, line: Mapping[str, Any]) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _meets(self, trial: Trial) -> bool:
        return trial["drop"] is not None and trial["drop"] <= self.max_drop + 1e-12

    def _better(self, base: Settings, **changes: Any) -> Settings:
        """Returns `base`, or `base` with `changes` if its error is lower."""
        tried = self._try(dataclasses.replace(base, **changes))
        return min((base, tried), key=lambda settings: self._error(self.trials[settings]))

    @staticmethod
    def _error(trial: Trial) -> tuple[float, float]:
        drop = float("inf") if trial["drop"] is None else trial["drop"]
        return (drop, 0.0) if trial["sqnr_db"] is None else (-trial["sqnr_db"] if np.isfinite(drop) else drop, drop)

    def _winner(self) -> Settings | None:
        """Returns the trial of least error among the fastest that meet the goal; else the trial of least drop."""
        meeting = {settings: trial for settings, trial in self.trials.items() if self._meets(trial)}
        if meeting:
            most = LATENCY_TIE * min(trial["milliseconds"] for trial in meeting.values())
            quick = {settings: trial for settings, trial in meeting.items() if trial["milliseconds"] <= most}
            return min(quick, key=lambda settings: self._error(quick[settings]))
        usable = {settings: trial for settings, trial in self.trials.items() if trial["drop"] is not None}
        return min(usable, key=lambda settings: (usable[settings]["drop"], self._error(usable[settings])), default=None)

    def _fallbacks(self, base: Settings) -> list[str]:
        """Returns the int8 layers of the base's model, sorted by the gain of output SQNR in float.

        All are ordered by the error that they add themselves; the first `PROBED_LAYERS` are then tried one at a time.
        """
        if base.name in self.orders:
            return self.orders[base.name]
        few = first_samples(self.maker.samples, PROBE_SAMPLES)
        noise = report.noise_of_layers(self.maker.model, *self.maker.make(base), [few])
        order = sorted(noise, key=noise.__getitem__)
        x = OnnxRuntimeSession(self.float_path, self.threads).run(few)
        names = [name for name in x if x[name].dtype.kind == "f"]
        gains: dict[str, float] = {}
        for layer in order[:PROBED_LAYERS]:
            key = f"{base.name} {layer}"
            if key not in self.probes:
                self._require_time()
                try:
                    probe = self.maker.make(dataclasses.replace(base, correct=False, keep_float=(layer,)))[0]
                    y = OnnxRuntimeSession(io.save(probe, self.folder / "probe.onnx"), self.threads).run(few)
                except ZooError as error:
                    logger.warning("%s cannot be tried in float: %s", layer, error)
                    continue
                self.probes[key] = report.sqnr([x[name] for name in names], [y[name] for name in names])
                self._note({"layer": layer, "on": base.name, "sqnr_db": self.probes[key]})
            sqnr = self.probes[key]
            gains[layer] = math.inf if sqnr is None else sqnr
        order = [*sorted(gains, key=lambda layer: -gains[layer]), *(layer for layer in order if layer not in gains)]
        self.orders[base.name] = order
        self._note({"order": order, "on": base.name})
        return order

    def finish(self, stopped: str, report_path: str | Path | None) -> dict[str, Any]:
        """Writes the winner and its report if they are missing; returns the result of `tune`."""
        winner = self._winner()
        if winner is None:
            problems = "; ".join(sorted({str(trial.get("error")) for trial in self.trials.values()}))
            raise ZooError(f"no recipe gave a model that runs: {problems}")
        best = self.trials[winner]
        lost = not self.output.is_file() or files.sha256(self.output) != best["sha256"]
        fp32_engine = min(self.float_ms, key=self.float_ms.__getitem__)
        shared = {"max_drop": self.max_drop, "fp32_ms": self.float_ms[fp32_engine]}
        trials = [{**trial, **shared, "best": trial is best} for trial in self.trials.values()]
        if lost or report_path is not None:
            made = self.written[1] if self.written and self.written[0] == winner else self.maker.make(winner)
            if lost:
                io.save(made[0], self.output)
            if report_path is not None:
                explained = report.explain(self.maker.model, *made, self.maker.samples, trials=trials)
                report_html.save(explained, report_path)
        met = self._meets(best)
        return {
            "path": str(self.output),
            "log": str(self.log),
            "met": met,
            "missed_by": 0.0 if met else best["drop"] - self.max_drop,
            "stopped": stopped,
            "metric": best.get("metric", self.metric.name),
            "max_drop": self.max_drop,
            "engine": self.engine,
            "fp32_ms": self.float_ms[fp32_engine],
            "fp32_engine": fp32_engine,
            "best": best,
            "trials": trials,
        }
