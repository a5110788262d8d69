"""What a worker does with the requests for one model: bodies to arrays, the model, arrays to answers.

Raw input is read by the handler that a family names (`pipelines.models.family.Servable`); other families are served by
the Open Inference Protocol alone.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from pipelines.core.batches import Batch, joined
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.models.pipeline import Pipeline
from zoo.serving.protocol import open_inference, responses
from zoo.serving.workers.channel import Answer, Job

INFER, RUN = "infer", "run"
logger = logging.getLogger(__name__)
WRONG, FAILED, BUSY = 400, 500, 503


class Busy(ZooError):
    """A request that is right finds too much under way; it may be tried again."""


def lines_of(body: bytes) -> list[str]:
    """The lines of a body of text. Raises RequestError for another one."""
    try:
        return body.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError("the body is not UTF-8") from error


def json_of(body: bytes, key: str) -> Any:
    """A body of JSON, or of an object what it has under `key`. Raises RequestError for another one."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    return found.get(key) if isinstance(found, dict) else found


class Parsed(NamedTuple):
    """A request with its body read: a batch, or a fault. about: what its answer must know."""

    job: Job
    batch: Batch
    samples: int
    about: Any
    fault: Answer | None = None


class Service:
    """Answers requests for one model with a pipeline.

    gathers: samples that requests may be computed together up to; 1 where results could depend on who is in the batch.
    """

    kinds: ClassVar[tuple[str, ...]] = ()  # of bodies that `run` takes, by Content-Type; none: infer alone
    written: tuple[str, ...] = responses.KINDS  # kinds of its answers

    def __init__(self, name: str, version: str, pipeline: Pipeline) -> None:
        self.name, self.version, self.pipeline = name, version, pipeline
        self.outputs: dict[str, tuple[np.dtype[Any], Sequence[int | None]]] = {}
        self.gathers = 1

    # ---------------------------------------------------------------------------------------------- of a kind of model

    @property
    def streams(self) -> bool:
        """Whether requests join those under way: `begin` takes them at any time."""
        return False

    def begin(self, jobs: Sequence[Job], send: Callable[[list[Answer]], None]) -> None:
        """Answer some requests by and by, through `send`, from any thread."""
        send(self.answer(jobs))

    def cancel(self, number: int) -> None:
        """Nobody waits for a request of `begin` any more."""

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """The batch of a `run` request, and what its answer must know. Raises RequestError for another body."""
        raise RequestError(f"{self.name} answers {INFER} alone")

    def table(self, parsed: Parsed, out: Batch) -> responses.Columns:
        """The results of a `run` request as a table."""
        raise NotImplementedError

    def example(self) -> Batch:
        """A batch of one sample."""
        return self.pipeline.preprocess(self.pipeline.example(1))

    def together(self, jobs: Sequence[Job]) -> list[Answer] | None:
        """The answers to requests that are quicker read and written together; None where they are not such, or one of
        them may have a fault: then each is parsed for itself.
        """
        return None

    # ------------------------------------------------------------------------------------------------------ all models

    def warm(self) -> None:
        """Run the model once, so that the first request finds all that it needs."""
        out = self.pipeline.predict(self.example())
        self.outputs = {name: (array.dtype, (None, *array.shape[1:])) for name, array in out.items()}
        session = getattr(self.pipeline, "session", None)
        self.gathers = getattr(session, "alike", 1) if self.pipeline.engine == "native" else 1

    def describe(self) -> dict[str, Any]:
        """What clients and the front must know of the model, plain values."""
        folder = self.pipeline.folder
        return {
            "name": self.name,
            "version": self.version,
            "description": folder.card.description,
            "family": folder.entry.name,
            "task": folder.entry.task,
            "engine": self.pipeline.engine,
            "precision": self.pipeline.precision,
            "inputs": open_inference.metadata(self.pipeline.input_ports),
            "outputs": open_inference.metadata(self.outputs),
            "run": list(self.kinds),
            "answers": list(self.written),
            "example": self.text(),
            "gathers": self.gathers,
            "streams": self.streams,
            **self.more(),
        }

    def text(self) -> str:
        """Raw input as a person would paste it; "" where a kind of model takes no text, or has no example."""
        return ""

    def more(self) -> dict[str, Any]:
        """What else a kind of model says of itself."""
        return {}

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        """The answers to some requests, computed together where they can be."""
        begin = time.perf_counter()
        if len(jobs) > 1 and (found := self.together(jobs)) is not None:
            return found
        parsed = [self._parsed(job) for job in jobs]
        well = [each for each in parsed if each.fault is None]
        parsing = time.perf_counter() - begin
        found = [each.fault for each in parsed if each.fault is not None]
        for group in self._groups(well):
            found += self._computed(group, parsing)
        return found

    def _groups(self, parsed: list[Parsed]) -> list[list[Parsed]]:
        """Requests that are computed in one call."""
        groups: list[list[Parsed]] = []
        room = 0
        for each in parsed:
            if each.samples <= room and _alike(groups[-1][0].batch, each.batch):
                groups[-1].append(each)
                room -= each.samples
            else:
                groups.append([each])
                room = self.gathers - each.samples
        return groups

    def _computed(self, group: list[Parsed], parsing: float) -> list[Answer]:
        begin = time.perf_counter()
        try:
            out = self.pipeline.predict(group[0].batch if len(group) == 1 else joined([each.batch for each in group]))
        except Exception as error:
            if len(group) > 1:  # whose it is shows alone
                return [answer for each in group for answer in self._computed([each], parsing)]
            return [failed(group[0].job, error)]
        model = time.perf_counter() - begin
        together, at, found = sum(each.samples for each in group), 0, []
        for each in group:
            end = at + each.samples
            own = out if len(group) == 1 else {name: array[at:end] for name, array in out.items()}
            found.append(self._written(each, own, parsing, model, together))
            at = end
        return found

    def _parsed(self, job: Job) -> Parsed:
        try:
            if job.verb == INFER:
                request = open_inference.parse(job.body, job.header)
                batch: Batch = request.inputs
                return Parsed(job, batch, self.pipeline._check(batch), request)
            if job.options:
                raise RequestError(f"there is no option {next(iter(job.options))[:40]!r}; {self.name} takes none")
            responses.chosen(job.accept, self.written)  # before anything is computed for it
            batch, about = self.parse(job)
            return Parsed(job, batch, len(next(iter(batch.values()))), about)
        except Exception as error:
            return Parsed(job, {}, 0, None, failed(job, error))

    def _written(self, parsed: Parsed, out: Batch, parsing: float, model: float, together: int) -> Answer:
        begin, header = time.perf_counter(), -1
        try:
            if parsed.job.verb == INFER:
                body, header = open_inference.encode(parsed.about, self.name, self.version, out)
                kind = responses.JSON if header < 0 else responses.BINARY
            else:
                kind = responses.chosen(parsed.job.accept, self.written)
                body = responses.encoded(self.table(parsed, out), kind)
        except Exception as error:
            return failed(parsed.job, error)
        split = (parsing, model, time.perf_counter() - begin)
        return Answer(parsed.job.number, 200, kind, body, split, parsed.samples, together, header)


def failed(job: Job, error: Exception) -> Answer:
    """What went wrong with a request, in one line; nothing of the server's own where it is the server's fault."""
    status = WRONG if isinstance(error, RequestError) else BUSY if isinstance(error, Busy) else FAILED
    if not isinstance(error, ZooError):
        logger.error("a request failed", exc_info=error)
    text = f"the server failed ({type(error).__name__})"
    if isinstance(error, ZooError):
        text = re.sub(r" \(--[^()]*\)$", "", one_line(error))  # options of the command are no client's
    return Answer(job.number, status, responses.JSON, responses.fault(text))


def _alike(one: Mapping[str, NDArray[Any]], other: Mapping[str, NDArray[Any]]) -> bool:
    return one.keys() == other.keys()
