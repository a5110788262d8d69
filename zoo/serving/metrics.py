"""Prometheus metrics of the server.

Requests are noted and counted later, many at once; metric objects are created when they are scraped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

STAGES = ("read", "wait", "parse", "model", "write")
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
RECENT_REQUESTS = 512  # counted at once
NO_SECONDS = (0.0,) * len(STAGES)  # of a request that failed
SAMPLES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)

__all__ = ["CONTENT_TYPE", "STAGES", "Metrics"]


class Histogram:
    """Counts of values per bucket, and their sum.

    Args:
        bounds: Upper bounds of the buckets, ascending, without infinity.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, np.zeros(len(bounds) + 1, np.int64), 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        """Counts values.

        Args:
            values: float64 [n].
        """
        self.counts += np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.total += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Returns the upper bounds and cumulative counts, as Prometheus expects them."""
        cumulative, total = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts.tolist(), strict=True):
            total += count
            cumulative.append((bound, float(total)))
        return cumulative


class Series:
    """Metrics of the requests for one model and verb."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.samples = 0
        self.seconds = Histogram(SECONDS)
        self.batch_size = Histogram(SAMPLES)
        self.stages = [Histogram(SECONDS) for _ in STAGES]
        self._recent: list[tuple[float, ...]] = []

    def add(self, status: int, seconds: float, stage_seconds: Iterable[float], samples: int, batch_size: int) -> None:
        """Notes a request.

        Args:
            status: HTTP status.
            seconds: Total latency, in seconds.
            stage_seconds: Seconds of every stage, in the order of `STAGES`.
            samples: Number of samples; 0 if the request failed.
            batch_size: Number of samples in its batch.
        """
        self._recent.append((status, samples, seconds, batch_size, *stage_seconds))
        if len(self._recent) >= RECENT_REQUESTS:
            self.count()

    def count(self) -> None:
        """Counts the requests noted since the last call."""
        if not self._recent:
            return
        rows, self._recent = np.array(self._recent), []
        self.statuses.update(rows[:, 0].astype(int).tolist())
        self.seconds.add(rows[:, 2])
        answered = rows[rows[:, 1] > 0]
        self.samples += int(answered[:, 1].sum())
        for histogram, values in zip((self.batch_size, *self.stages), answered[:, 3:].T, strict=True):
            histogram.add(values)


class Metrics:
    """Metrics of a server, a collector of `prometheus_client`.

    Args:
        models: Returns the descriptions of the models by public name (see `Handler.describe`).
        state: Returns the state of the dispatcher (see `Dispatcher.state`).

    Attributes:
        rejected: Number of requests that no model received, by HTTP status.
    """

    def __init__(
        self, models: Callable[[], Mapping[str, Mapping[str, Any]]], state: Callable[[], Mapping[str, int]]
    ) -> None:
        self._models, self._state = models, state
        self._series: dict[tuple[str, str], Series] = {}
        self.rejected: Counter[int] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def series(self, model: str, verb: str) -> Series:
        """Returns the metrics of a model and verb.

        Args:
            model: Public name of the model.
            verb: "run", "infer", "rank", or a verb of `zoo.serving.protocol.text_apis`.
        """
        series = self._series.get((model, verb))
        if series is None:
            series = self._series[model, verb] = Series()
        return series

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterable[Any]:
        """Yields the metric families; see `prometheus_client.registry.Collector`."""
        labels, models = ("model", "engine", "verb"), self._models()
        requests = CounterMetricFamily("zoo_requests", "Requests, by HTTP status.", labels=(*labels, "status"))
        samples = CounterMetricFamily("zoo_samples", "Samples (rows, images, lines) computed.", labels=labels)
        seconds = HistogramMetricFamily(
            "zoo_request_seconds", "Latency from the request headers to the response.", labels=labels
        )
        batch_size = HistogramMetricFamily(
            "zoo_batch_size", "Samples in the batch of a request, other requests included.", labels=labels
        )
        stages = HistogramMetricFamily(
            "zoo_stage_seconds",
            "Latency by stage: read (request body), wait (queue), parse, model, write (response body).",
            labels=(*labels, "stage"),
        )
        for (model, verb), series in self._series.items():
            series.count()
            if not series.statuses and not _has_route(models.get(model, {}), verb):
                continue
            values = (model, str(models.get(model, {}).get("engine", "")), verb)
            for status, count in series.statuses.items():
                requests.add_metric((*values, str(status)), count)
            samples.add_metric(values, series.samples)
            seconds.add_metric(values, series.seconds.buckets(), series.seconds.total)
            batch_size.add_metric(values, series.batch_size.buckets(), series.batch_size.total)
            for stage, histogram in zip(STAGES, series.stages, strict=True):
                stages.add_metric((*values, stage), histogram.buckets(), histogram.total)
        for status, count in self.rejected.items():
            requests.add_metric(("", "", "", str(status)), count)
        info = GaugeMetricFamily(
            "zoo_model_info", "Loaded models.", labels=("model", "version", "family", "engine", "precision")
        )
        for name, model_info in models.items():
            info.add_metric((name, *(str(model_info[key]) for key in ("version", "family", "engine", "precision"))), 1)
        state = self._state()
        yield from (requests, samples, seconds, batch_size, stages, info)
        yield GaugeMetricFamily("zoo_queue_requests", "Queued requests.", value=state["waiting"])
        yield GaugeMetricFamily("zoo_working_requests", "Requests sent to a worker.", value=state["working"])
        yield GaugeMetricFamily("zoo_workers", "Ready workers.", value=state["workers"])
        yield CounterMetricFamily("zoo_worker_restarts", "Restarts of workers that died.", value=state["restarts"])


def _has_route(model: Mapping[str, Any], verb: str) -> bool:
    """Whether requests for the verb can succeed, by the description of the model."""
    return bool({"run": model.get("run"), "rank": "items" in model}.get(verb, True))
