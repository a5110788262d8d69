"""Request handler of one model: request bodies to arrays, the model, arrays to responses.

Raw input is read by the handler of the family (`pipelines.models.family.Servable`); other families are served by the
Open Inference Protocol alone.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import orjson

from pipelines.core.batches import Batch, joined
from pipelines.core.errors import RequestError, ZooError, one_line
from pipelines.data.text_files import decoded
from pipelines.models.pipeline import Pipeline
from zoo.serving.protocol import limits, open_inference, responses
from zoo.serving.workers.channel import Job, JobResult

INFER, RUN = "infer", "run"
MAX_MESSAGE = 800  # characters
MAX_UNTYPED_JSON = 1 << 20  # bytes of a body that is looked at
logger = logging.getLogger(__name__)

Send = Callable[[list[JobResult]], None]


class Overloaded(ZooError):
    """Too many requests are in progress; a valid request may be sent again later."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class Api(Protocol):
    """Requests and responses of another API than this server's own, for one model."""

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """Parses the body of a job.

        Args:
            job: The job.

        Returns:
            Model inputs, {} if the response needs no model; and the context of `encode`.

        Raises:
            RequestError: The body is invalid; the HTTP status is its attribute `status`, if any, else 400.
        """

    def encode(self, context: Any, outputs: Batch) -> bytes:
        """Encodes the response.

        Args:
            context: Context of `parse`.
            outputs: Outputs of the model.

        Returns:
            The response body, JSON.
        """


def text_lines(job: Job, max_lines: int, name: str) -> list[str]:
    """Splits a text body into lines, as files are: LF or CRLF ends a line, and a byte order mark is dropped.

    Args:
        job: The job.
        max_lines: Maximum number of lines.
        name: What a line holds, for messages.

    Returns:
        The lines, without their ends.

    Raises:
        RequestError: The body is not UTF-8, has more lines, or is JSON of another Content-Type than application/json.
        ContentTooLarge: The text is too long.
    """
    if job.content_type != responses.TEXT:
        _require_no_json(job)
    body = job.body.removesuffix(b"\n")
    require_count(body.count(b"\n") + 1, max_lines, name)
    limits.TEXT.require(len(body), job.received_bytes)
    lines = []
    for line in decoded(io.BytesIO(job.body)):
        if line is None:
            raise RequestError("the body is not UTF-8")
        lines.append(line)
    return lines or [""]


def _require_no_json(job: Job) -> None:
    """Refuses JSON whose Content-Type is missing, or the default of curl."""
    if len(job.body) > MAX_UNTYPED_JSON or job.body[:100].lstrip()[:1] not in (b"{", b"["):
        return
    with contextlib.suppress(orjson.JSONDecodeError):
        orjson.loads(job.body)
        kind = repr(job.content_type[:100]) if job.content_type else "without Content-Type"
        raise RequestError(f"found JSON {kind}; expected the Content-Type application/json, or text/plain for texts")


def require_count(count: int, maximum: int, name: str) -> None:
    """Checks the number of samples in a body.

    Args:
        count: The number.
        maximum: Maximum number.
        name: What is counted, for messages.

    Raises:
        RequestError: There are none, or more.
    """
    if not 1 <= count <= maximum:
        raise RequestError(f"the body has {count} {name}; expected 1 to {maximum}")


def json_value(job: Job, key: str) -> Any:
    """Parses a JSON body: an object with a key, or the value of the key alone.

    Args:
        job: The job.
        key: Key of the object.

    Returns:
        The value; None if the object has no such key.

    Raises:
        RequestError: The body is no JSON.
        ContentTooLarge: It holds too many values.
    """
    content = parse_json(job)
    return content.get(key) if isinstance(content, dict) else content


def json_options(job: Job, key: str, options: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Parses a JSON body: an object with a key and options, or the value of the key alone.

    Args:
        job: The job.
        key: Key of the object.
        options: Keys of the options.

    Returns:
        The value, None if the object has no such key; and the options of the object.

    Raises:
        RequestError: The body is no JSON, or the object has another key.
        ContentTooLarge: It holds too many values.
    """
    content = parse_json(job)
    if not isinstance(content, dict):
        return content, {}
    if unknown := next((name for name in content if name not in (key, *options)), None):
        raise RequestError(f"the body has the key {unknown[:40]!r}; expected {', '.join((key, *options))}")
    return content.pop(key, None), content


def parse_json(job: Job) -> Any:
    """Parses a JSON body.

    Args:
        job: The job.

    Returns:
        The value.

    Raises:
        RequestError: The body is no JSON.
        ContentTooLarge: It holds too many values.
    """
    limits.require_json(job.body, job.received_bytes)
    try:
        return orjson.loads(job.body.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is no JSON: {error}") from error


class ParsedJob(NamedTuple):
    """A job after parsing.

    Attributes:
        job: The job.
        batch: Model inputs.
        samples: Number of samples.
        context: Context of `Handler.parse`, which its response needs; for "infer", the parsed request.
        error: Response of a job that cannot be parsed.
    """

    job: Job
    batch: Batch
    samples: int
    context: Any
    error: JobResult | None = None


class Handler:
    """Handles the requests for one model; tasks derive their own handlers.

    Args:
        name: Public name of the model.
        version: Served version.
        pipeline: Pipeline of the model.

    Attributes:
        content_types: Content-Types that `run` accepts; empty if the model supports "infer" alone.
        response_types: Media types of the responses of `run`.
        max_batch_samples: Number of samples up to which requests are computed together; 1 if results could depend on
            the other samples of the batch.
        apis: Other APIs that the model answers, by verb (see `zoo.serving.protocol.text_apis`).
    """

    content_types: ClassVar[tuple[str, ...]] = ()
    response_types: tuple[str, ...] = responses.TABLE_TYPES

    def __init__(self, name: str, version: str, pipeline: Pipeline) -> None:
        self.name, self.version, self.pipeline = name, version, pipeline
        self._outputs: dict[str, tuple[np.dtype[Any], Sequence[int | None]]] = {}
        self.max_batch_samples = 1
        self.apis: dict[str, Api] = {}

    # ---------------------------------------------------------------------------------------------- overridden by tasks

    @property
    def streams(self) -> bool:
        """Whether `submit` accepts jobs while others are in progress (continuous batching)."""
        return False

    def submit(self, jobs: Sequence[Job], send: Send) -> None:
        """Starts jobs; their results are sent as soon as they are available, from any thread.

        Args:
            jobs: The jobs.
            send: Sends results.
        """
        send(self.run(jobs))

    def cancel(self, job_id: int) -> None:
        """Cancels a job of `submit` whose client disconnected.

        Args:
            job_id: Number of the job.
        """

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """Parses the body of a "run" job.

        Args:
            job: The job.

        Returns:
            Model inputs, and the context that `table` needs.

        Raises:
            RequestError: The body is invalid.
        """
        raise RequestError(f"{self.name} supports {INFER} alone")

    def table(self, parsed: ParsedJob, outputs: Batch) -> responses.Columns:
        """Converts model outputs to the table of a "run" response.

        Args:
            parsed: The parsed job.
            outputs: Outputs of the model for its samples.

        Returns:
            The columns.
        """
        raise NotImplementedError

    def compute(self, batches: Sequence[Batch]) -> Batch:
        """Computes the inputs of several jobs in one call.

        Args:
            batches: Inputs of every job, with the same names.

        Returns:
            Outputs of the model for the samples of all jobs.
        """
        return self.pipeline.predict(batches[0] if len(batches) == 1 else joined(batches))

    def sample_batch(self) -> Batch:
        """Returns model inputs of one sample, for the warm-up."""
        return self.pipeline.preprocess(self.pipeline.example(1))

    def run_joined(self, jobs: Sequence[Job]) -> list[JobResult] | None:
        """Runs jobs whose bodies are parsed faster as one body.

        Args:
            jobs: The jobs, more than one.

        Returns:
            The results; None if the jobs must be parsed one by one, for instance because one may be invalid.
        """
        return None

    def example_text(self) -> str:
        """Returns raw input to paste into a text field; "" if the model takes no text or has no example."""
        return ""

    def extra_description(self) -> dict[str, Any]:
        """Returns additional entries of `describe`."""
        return {}

    def load_items(self, items: Path | None) -> None:
        """Reads the catalogue of a recommender.

        Args:
            items: File of the items; None for none.

        Raises:
            RequestError: The model ranks no items, or the file cannot be read.
        """
        if items is not None:
            raise RequestError(f"{self.name} ranks no items; leave --items out")

    def connect(self, handlers: Mapping[str, Handler]) -> None:
        """Passes the handlers of all models of the worker, for models that call others.

        Args:
            handlers: Handlers of the worker by public name.
        """

    # ------------------------------------------------------------------------------------------------------ all models

    def warm_up(self) -> None:
        """Runs the model once, so that the first request is not slower."""
        outputs = self.pipeline.predict(self.sample_batch())
        self._outputs = {name: (array.dtype, (None, *array.shape[1:])) for name, array in outputs.items()}
        session = getattr(self.pipeline, "session", None)
        self.max_batch_samples = getattr(session, "alike", 1) if self.pipeline.engine == "native" else 1

    def describe(self) -> dict[str, Any]:
        """Describes the model in plain values, for clients (/v1/models) and the dispatcher."""
        folder = self.pipeline.folder
        return {
            "name": self.name,
            "version": self.version,
            "description": folder.card.description,
            "family": folder.entry.name,
            "task": folder.entry.task,
            "engine": self.pipeline.engine,
            "precision": self.pipeline.precision,
            "inputs": open_inference.tensor_metadata(self.pipeline.input_ports),
            "outputs": open_inference.tensor_metadata(self._outputs),
            "run": list(self.content_types),
            "answers": list(self.response_types),
            "example": self.example_text(),
            "gathers": self.max_batch_samples,
            "streams": self.streams,
            "apis": list(self.apis),
            **self.extra_description(),
        }

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        """Runs jobs, in one batch if possible.

        Args:
            jobs: The jobs.

        Returns:
            The results, in any order.
        """
        begin = time.perf_counter()
        if len(jobs) > 1 and (joined_results := self.run_joined(jobs)) is not None:
            return joined_results
        parsed_jobs = [self._parse(job) for job in jobs]
        valid = [parsed for parsed in parsed_jobs if parsed.error is None]
        parse_seconds = time.perf_counter() - begin
        results = [parsed.error for parsed in parsed_jobs if parsed.error is not None]
        for group in self._groups(valid):
            results += self._compute(group, parse_seconds)
        return results

    def _groups(self, parsed_jobs: list[ParsedJob]) -> list[list[ParsedJob]]:
        """Jobs that are computed in one call."""
        groups: list[list[ParsedJob]] = []
        free = 0
        for parsed in parsed_jobs:
            if groups and parsed.samples <= free and groups[-1][0].batch.keys() == parsed.batch.keys():
                groups[-1].append(parsed)
                free -= parsed.samples
            else:
                groups.append([parsed])
                free = self.max_batch_samples - parsed.samples
        return groups

    def _compute(self, group: list[ParsedJob], parse_seconds: float) -> list[JobResult]:
        begin = time.perf_counter()
        try:
            outputs = self.compute([parsed.batch for parsed in group]) if group[0].batch else {}
        except BaseException as error:  # a panic of a library, too
            if len(group) > 1:  # one by one, so that only the faulty job fails
                return [result for parsed in group for result in self._compute([parsed], parse_seconds)]
            return [error_result(group[0].job, error)]
        model_seconds = time.perf_counter() - begin
        batch_size, offset, results = sum(parsed.samples for parsed in group), 0, []
        for parsed in group:
            end = offset + parsed.samples
            own = outputs if len(group) == 1 else {name: array[offset:end] for name, array in outputs.items()}
            results.append(self._encode(parsed, own, parse_seconds, model_seconds, batch_size))
            offset = end
        return results

    def _parse(self, job: Job) -> ParsedJob:
        try:
            if (api := self.apis.get(job.verb)) is not None:
                batch, context = api.parse(job)
                return ParsedJob(job, batch, len(next(iter(batch.values()))) if batch else 0, context)
            if job.verb not in (INFER, RUN):
                raise RequestError(f"{self.name} supports {RUN} and {INFER}, not {job.verb}")
            if job.options:
                raise RequestError(f"there is no option {next(iter(job.options))[:40]!r}; {self.name} takes none")
            if job.verb == INFER:
                request = open_inference.parse_request(job.body, job.json_length, job.received_bytes)
                batch = request.inputs
                open_inference.require_finite(batch)
                return ParsedJob(job, batch, self.pipeline.check(batch), request)
            responses.negotiate(job.accept, self.response_types)  # fails before anything is computed
            batch, context = self.parse(job)
            return ParsedJob(job, batch, len(next(iter(batch.values()))), context)
        except BaseException as error:  # a panic of a library, too
            return ParsedJob(job, {}, 0, None, error_result(job, error))

    def _encode(
        self, parsed: ParsedJob, outputs: Batch, parse_seconds: float, model_seconds: float, batch_size: int
    ) -> JobResult:
        begin, json_length = time.perf_counter(), -1
        try:
            if (api := self.apis.get(parsed.job.verb)) is not None:
                media_type, body = responses.JSON, api.encode(parsed.context, outputs)
            elif parsed.job.verb == INFER:
                body, json_length = open_inference.encode_response(parsed.context, self.name, self.version, outputs)
                media_type = responses.JSON if json_length < 0 else responses.BINARY
            else:
                media_type = responses.negotiate(parsed.job.accept, self.response_types)
                body = responses.encode(self.table(parsed, outputs), media_type)
        except BaseException as error:  # a panic of a library, too
            return error_result(parsed.job, error)
        stage_seconds = (parse_seconds, model_seconds, time.perf_counter() - begin)
        return JobResult(
            parsed.job.job_id, 200, media_type, body, stage_seconds, parsed.samples, batch_size, json_length
        )


def error_result(job: Job, error: BaseException) -> JobResult:
    """Converts an exception to the response of a job; unexpected exceptions are logged and not described to clients.

    Args:
        job: The job.
        error: The exception.

    Returns:
        Status of the error's attribute `status`, as of `ContentTooLarge`; 400 for another RequestError, else 500. The
        body has the message in one line.
    """
    failed = HTTPStatus.BAD_REQUEST if isinstance(error, RequestError) else HTTPStatus.INTERNAL_SERVER_ERROR
    status = getattr(error, "status", failed) if isinstance(error, ZooError) else failed
    if isinstance(error, ZooError):
        message = re.sub(r" \(--[^()]*\)$", "", one_line(error))  # without a hint at command-line options
    else:
        logger.error("a request failed", exc_info=error)
        message = f"the server failed ({type(error).__name__})"
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ..."
    return JobResult(job.job_id, int(status), responses.JSON, responses.error_body(message))
