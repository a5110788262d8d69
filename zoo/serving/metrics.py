"""Figures of a server for Prometheus: counted here in plain numbers, which costs a request microseconds, and made into
metrics where they are asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

STAGES = ("read", "wait", "parse", "model", "write")
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SAMPLES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)

__all__ = ["CONTENT_TYPE", "STAGES", "Metrics"]


class Histogram:
    """Counts of values up to each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Bounds and how many values are not beyond them, as Prometheus has them."""
        found, count = [], 0
        for bound, own in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            count += own
            found.append((bound, float(count)))
        return found


class Series:
    """The figures of one model and verb."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.samples = 0
        self.seconds = Histogram(SECONDS)
        self.together = Histogram(SAMPLES)
        self.stages = [Histogram(SECONDS) for _ in STAGES]

    def add(self, status: int, seconds: float, split: Iterable[float], samples: int, together: int) -> None:
        """Counts a request.

        Args:
            status: HTTP status.
            seconds: Total latency.
            split: Seconds of every stage, in the order of `STAGES`.
            samples: Number of samples; 0 if the request failed.
            together: Number of samples in its batch.
        """
        self.statuses[status] += 1
        self.seconds.add(seconds)
        if samples:
            self.samples += samples
            self.together.add(together)
            for histogram, stage in zip(self.stages, split, strict=True):
                histogram.add(stage)


class Metrics:
    """All figures of a server. models: name -> what its worker says of it; state: waiting, working, workers,
    restarts.
    """

    def __init__(
        self, models: Callable[[], Mapping[str, Mapping[str, Any]]], state: Callable[[], Mapping[str, int]]
    ) -> None:
        self._models, self._state = models, state
        self._series: dict[tuple[str, str], Series] = {}
        self.refused: Counter[int] = Counter()  # status of those that no model saw
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def series(self, model: str, verb: str) -> Series:
        """Returns the figures of a model and verb.

        Args:
            model: Public name of the model.
            verb: "run" or "infer".
        """
        found = self._series.get((model, verb))
        if found is None:
            found = self._series[model, verb] = Series()
        return found

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterable[Any]:
        """See prometheus_client."""
        labels, models = ("model", "engine", "verb"), self._models()
        requests = CounterMetricFamily("zoo_requests", "Requests answered, by status.", labels=(*labels, "status"))
        samples = CounterMetricFamily("zoo_samples", "Rows, images or lines answered.", labels=labels)
        seconds = HistogramMetricFamily(
            "zoo_request_seconds", "From the head of a request to its answer.", labels=labels
        )
        together = HistogramMetricFamily("zoo_batch_size", "Samples computed together with a request.", labels=labels)
        stages = HistogramMetricFamily(
            "zoo_stage_seconds",
            "Where the time of a request goes: its body is read, it waits, is parsed, computed, written.",
            labels=(*labels, "stage"),
        )
        for (model, verb), series in self._series.items():
            of = (model, str(models.get(model, {}).get("engine", "")), verb)
            for status, count in series.statuses.items():
                requests.add_metric((*of, str(status)), count)
            samples.add_metric(of, series.samples)
            seconds.add_metric(of, series.seconds.buckets(), series.seconds.total)
            together.add_metric(of, series.together.buckets(), series.together.total)
            for stage, histogram in zip(STAGES, series.stages, strict=True):
                stages.add_metric((*of, stage), histogram.buckets(), histogram.total)
        for status, count in self.refused.items():
            requests.add_metric(("", "", "", str(status)), count)
        info = GaugeMetricFamily(
            "zoo_model_info", "The models served.", labels=("model", "version", "family", "engine", "precision")
        )
        for name, about in models.items():
            info.add_metric((name, *(str(about[key]) for key in ("version", "family", "engine", "precision"))), 1)
        state = self._state()
        yield from (requests, samples, seconds, together, stages, info)
        yield GaugeMetricFamily("zoo_queue_requests", "Requests that wait for a worker.", value=state["waiting"])
        yield GaugeMetricFamily("zoo_working_requests", "Requests that a worker has.", value=state["working"])
        yield GaugeMetricFamily("zoo_workers", "Workers that are ready.", value=state["workers"])
        yield CounterMetricFamily(
            "zoo_worker_restarts", "Workers that died and were replaced.", value=state["restarts"]
        )
