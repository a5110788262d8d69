"""Translation handler: sentences join the batch of the native decoder between two decoding steps (continuous batching).

Every request is answered as soon as its last sentence is translated; JSON lines are sent line by line.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.settings import BOOLEANS
from zoo.serving.handlers.base import (
    INFER,
    Handler,
    Overloaded,
    Send,
    error_result,
    json_options,
    require_count,
    text_lines,
)
from zoo.serving.protocol import limits, responses
from zoo.serving.workers.channel import Job, JobResult
from zoo.translation.data.lines import Line, score_text
from zoo.translation.data.vocabularies import in_languages
from zoo.translation.inference import TranslationPipeline, unmet_words
from zoo.translation.search import options
from zoo.translation.search.beam_search import Hypothesis
from zoo.translation.search.config import Demands

EXAMPLE_LINES = 3
MAX_LINES = 4096  # of one request
MAX_SENTENCES = 32768  # of one request
MAX_BEAM = 32
MAX_STREAMS = 4  # streams with different options that are open at once
OPTIONS = (*options.OPTIONS, "sentences")
JSON_OPTIONS = tuple(options.OPTIONS)  # "sentences" in a JSON body are the texts
POLL_SECONDS = 1.0  # interval at which an idle thread checks whether its stream was closed


class TranslationHandler(Handler):
    """Translates the lines of a text, or a JSON list of sentences.

    With the native engine, `submit` passes the sentences to streams, one per set of options; their threads send the
    results.
    """

    content_types: ClassVar[tuple[str, ...]] = (responses.TEXT, responses.JSON)
    response_types: tuple[str, ...] = (*responses.TABLE_TYPES, responses.TEXT)
    pipeline: TranslationPipeline

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._streams: dict[tuple[Any, ...], TranslationStream] = {}  # by options, the least recently used first

    @property
    def streams(self) -> bool:
        """Whether the engine is native; see `Handler.streams`."""
        return self.pipeline.engine == "native"

    def extra_description(self) -> dict[str, Any]:
        """Returns the names of the query parameters, and their schemas for OpenAPI."""
        schemas = {name: option.schema for name, option in options.OPTIONS.items()}
        schemas["sentences"] = {
            "description": "Translate the sentences of a line one by one.",
            "schema": {"type": "boolean"},
        }
        return {"options": list(OPTIONS), "option_schemas": schemas}

    def example_text(self) -> str:
        """Returns example sentences, one per line."""
        return "\n".join(self.pipeline.example(EXAMPLE_LINES))

    def warm_up(self) -> None:
        """See `Handler.warm_up`; a model whose languages requests choose translates into one of them."""
        pipeline, self.pipeline = self.pipeline, copy.copy(self.pipeline)
        self.pipeline.vocabulary = in_languages(pipeline.vocabulary, 1)[0]
        try:
            super().warm_up()
        finally:
            self.pipeline = pipeline

    def submit(self, jobs: Sequence[Job], send: Send) -> None:
        """See `Handler.submit`."""
        if tensor_jobs := [job for job in jobs if job.verb == INFER]:
            send(super().run(tensor_jobs))
        for job in jobs:
            if job.verb != INFER:
                try:
                    request = self._parse_request(job)
                    self._stream(request.pipeline).submit(request, send)
                except BaseException as error:  # a panic of a library, too
                    send([error_result(job, error)])

    def cancel(self, job_id: int) -> None:
        """See `Handler.cancel`."""
        for stream in list(self._streams.values()):
            stream.cancel(job_id)

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        """Runs jobs one after the other; see `Handler.run`.

        Args:
            jobs: The jobs.

        Returns:
            The results.
        """
        results = super().run([job for job in jobs if job.verb == INFER])
        for job in jobs:
            if job.verb != INFER:
                try:
                    request = self._parse_request(job)
                    hypotheses = request.pipeline.translate(request.tokens, request.demands)
                    request.hypotheses |= enumerate(hypotheses)
                    results.append(request.result(len(request.lines)))
                except BaseException as error:  # a panic of a library, too
                    results.append(error_result(job, error))
        return results

    def _parse_request(self, job: Job) -> TranslationRequest:
        """Raises RequestError for an invalid body or option."""
        begin = time.perf_counter()
        media_type = responses.negotiate(job.accept, self.response_types)
        texts, options = _texts(job)
        options = {**job.options, **options}
        pipeline = _with_options(self.pipeline, options) if options else self.pipeline
        require_count(len(texts), MAX_LINES, "lines")
        limits.TEXT.require(sum(map(len, texts)), job.received_bytes)
        lines, count = [], 0
        for i, text in enumerate(texts, 1):
            lines.append(pipeline.line(f"line {i}", text, split=True, max_sentences=MAX_SENTENCES))
            count += len(lines[-1].parts)
            require_count(max(count, 1), MAX_SENTENCES, "sentences")
        if not any(line.pieces and not line.fault for line in lines):
            invalid = next((line for line in lines if line.fault), None)
            raise RequestError(f"{invalid.where} {invalid.fault}" if invalid else "the body holds no sentence")
        lines = pipeline.prefixed(lines)
        tokens = [part for line in lines for part in line.parts]
        now = time.perf_counter()
        demands = pipeline.demands(lines)
        return TranslationRequest(job, media_type, pipeline, lines, tokens, demands, now - begin, now)

    def _stream(self, pipeline: TranslationPipeline) -> TranslationStream:
        """The stream with a pipeline's options; replaces an idle one if too many are open, or raises Overloaded."""
        rules = replace(pipeline.rules, most=0)  # a sentence has its own limit
        key = (pipeline.beam, pipeline.best, pipeline.length_penalty, rules)  # all languages share a stream
        stream = self._streams.pop(key, None)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                idle = next((open_key for open_key, other in self._streams.items() if not other.busy), None)
                if idle is None:
                    raise Overloaded(f"requests with {MAX_STREAMS} other sets of options are in progress; try again")
                self._streams.pop(idle).close()
            stream = TranslationStream(pipeline)
        self._streams[key] = stream
        return stream


@dataclass
class TranslationRequest:
    """A translation request in progress.

    Attributes:
        job: The job.
        media_type: Media type of the response.
        pipeline: Pipeline with the options of the request.
        lines: Lines of the text.
        tokens: Token ids of all sentences.
        demands: Constraints on the translations of all sentences; None: no constraints.
        parse_seconds: Duration of parsing, in seconds.
        begin: Time when the model got the request (`time.perf_counter`).
        hypotheses: Translations so far, by index of the sentence in `tokens`.
        sentence_ids: Numbers of its sentences in the stream.
        lines_sent: Number of lines already sent.
    """

    job: Job
    media_type: str
    pipeline: TranslationPipeline
    lines: list[Line]
    tokens: list[Any]
    demands: list[Demands] | None
    parse_seconds: float
    begin: float
    hypotheses: dict[int, list[Hypothesis]] = field(default_factory=dict)
    sentence_ids: range = range(0)
    lines_sent: int = 0

    def columns(self, first: int, last: int, offset: int) -> dict[str, Any]:
        """Returns the table of translated lines.

        Args:
            first: Index of the first line.
            last: Index behind the last line.
            offset: Index of the first sentence of the first line.

        Returns:
            The columns line, translation and score; alignment and word_scores if asked for; untranslated if something
            was left out or copied, unmet if forced words are missing, error if a line is invalid; for text, translation
            alone.
        """
        lines = self.lines[first:last]
        parts = range(offset, offset + sum(len(line.parts) for line in lines))
        by_line = self.pipeline.results(lines, [self.hypotheses[i] for i in parts])
        rows = [translation for translations in by_line for translation in translations]
        if self.media_type == responses.TEXT:
            return {"translation": [translation.text for translation in rows]}
        counted = [(first + i, line) for i, (line, own) in enumerate(zip(lines, by_line, strict=True), 1) for _ in own]
        columns: dict[str, Any] = {"line": [number for number, _ in counted]}
        columns["translation"] = [translation.text for translation in rows]
        columns["score"] = np.array([translation.score for translation in rows], np.float32)
        if self.pipeline.alignments:
            columns["alignment"] = [translation.alignment for translation in rows]
        if self.pipeline.word_scores:
            scores = [translation.word_scores or [] for translation in rows]
            is_json = self.media_type in (responses.JSON, responses.JSON_LINES)
            columns["word_scores"] = scores if is_json else [score_text(row_scores) for row_scores in scores]
        asked = None if self.demands is None else self.demands[parts.start : parts.stop]
        missing = unmet_words(lines, asked, [self.hypotheses[i][0] for i in parts])
        unmet = [", ".join(words) or None for words, own in zip(missing, by_line, strict=True) for _ in own]
        notes, errors = ([getattr(line, name) or None for _, line in counted] for name in ("untranslated", "fault"))
        if any(notes):
            columns["untranslated"] = notes
        if any(unmet):
            columns["unmet"] = unmet
        if any(errors):
            columns["error"] = errors
        return columns

    def result(self, batch_size: int) -> JobResult:
        """Returns the complete response.

        Args:
            batch_size: Number of sentences computed together.
        """
        now = time.perf_counter()
        body = responses.encode(self.columns(0, len(self.lines), 0), self.media_type)
        stage_seconds = (self.parse_seconds, now - self.begin, time.perf_counter() - now)
        return JobResult(self.job.job_id, 200, self.media_type, body, stage_seconds, len(self.lines), batch_size)


class TranslationStream:
    """A native decoder with one set of options, the requests in progress, and the thread that sends their results.

    Args:
        pipeline: Pipeline with the options.
    """

    def __init__(self, pipeline: TranslationPipeline) -> None:
        self._decoder = pipeline.stream()
        # by number of the sentence: the request, and the index of the sentence in it
        self._sentences: dict[int, tuple[TranslationRequest, Send, int]] = {}
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._collect, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a sentence is in progress."""
        return bool(self._sentences)

    def submit(self, request: TranslationRequest, send: Send) -> None:
        """Adds the sentences of a request to the decoder's batch.

        Args:
            request: The request.
            send: Sends results, from the thread of the stream.
        """
        frame = request.pipeline.vocabulary.frame
        nonempty = [i for i, tokens in enumerate(request.tokens) if len(tokens) > frame]
        for i in set(range(len(request.tokens))) - set(nonempty):
            request.hypotheses[i] = [Hypothesis([], 0.0)] * request.pipeline.best
        if not nonempty:
            send([request.result(0)])
            return
        demands = request.demands
        with self._lock:  # results must not be collected before their request is registered
            request.sentence_ids = request.pipeline.submit(
                self._decoder,
                [request.tokens[i] for i in nonempty],
                None if demands is None else [demands[i] for i in nonempty],
            )
            for sentence_id, i in zip(request.sentence_ids, nonempty, strict=True):
                self._sentences[sentence_id] = (request, send, i)

    def cancel(self, job_id: int) -> None:
        """Removes the sentences of a job from the batch.

        Args:
            job_id: Number of the job.
        """
        with self._lock:
            for sentence_id, (request, _, _) in list(self._sentences.items()):
                if request.job.job_id == job_id:
                    self._decoder.cancel(sentence_id)
                    del self._sentences[sentence_id]

    def close(self) -> None:
        """Ends the threads of the stream."""
        self._closed = True
        self._decoder.close()

    def _collect(self) -> None:
        while not self._closed:
            ready: dict[int, tuple[Send, list[JobResult]]] = {}
            finished = self._decoder.finished(POLL_SECONDS)
            with self._lock:
                for sentence_id, translations, error in finished:
                    if sentence_id in self._sentences:
                        request, send, index = self._sentences.pop(sentence_id)
                        results = ready.setdefault(id(send), (send, []))[1]
                        results += self._finish_sentence(request, index, translations, error)
            try:
                for send, results in ready.values():
                    if results:
                        send(results)
            except OSError:  # the HTTP server is gone, and this process ends
                return

    def _finish_sentence(
        self, request: TranslationRequest, index: int, translations: list[Any], error: str
    ) -> list[JobResult]:
        """The results that can be sent after a sentence is translated."""
        if error:
            for sentence_id in request.sentence_ids:
                if self._sentences.pop(sentence_id, None) is not None:
                    self._decoder.cancel(sentence_id)
            return [error_result(request.job, ZooError(error))]
        request.hypotheses[index] = [Hypothesis(tokens, score) for tokens, score in translations]
        complete = len(request.hypotheses) == len(request.tokens)
        try:
            if complete and not request.lines_sent:
                return [request.result(len(self._sentences) + 1)]
            if request.media_type != responses.JSON_LINES:
                return []
            return self._next_lines(request, complete)
        except BaseException as problem:  # a panic of a library, too
            return [error_result(request.job, problem)]

    def _next_lines(self, request: TranslationRequest, complete: bool) -> list[JobResult]:
        """A chunk of the response: the complete lines from the first line that was not sent."""
        first = last = request.lines_sent
        offset = end = sum(len(line.parts) for line in request.lines[:first])
        while last < len(request.lines) and all(
            i in request.hypotheses for i in range(end, end + len(request.lines[last].parts))
        ):
            end += len(request.lines[last].parts)
            last += 1
        if first == last:
            return []
        request.lines_sent = last
        body = responses.encode(request.columns(first, last, offset), request.media_type)
        stage_seconds = (request.parse_seconds, time.perf_counter() - request.begin, 0.0)
        return [
            JobResult(
                request.job.job_id,
                200,
                request.media_type,
                body,
                stage_seconds,
                last - first,
                len(self._sentences) + 1,
                last=complete,
            )
        ]


def _with_options(pipeline: TranslationPipeline, options: Mapping[str, Any]) -> TranslationPipeline:
    """The pipeline with the options of a request. Raises RequestError for an invalid option."""
    values = dict(options)
    sentences = str(values.pop("sentences", "false")).lower() or "true"
    if sentences not in BOOLEANS:
        raise RequestError(f"sentences is {sentences[:40]!r}; expected true or false")
    values = {name: _value(name, value) for name, value in values.items()}
    largest = max(MAX_BEAM, pipeline.beam)
    for name in ("beam", "n_best"):
        if name in values and values[name] > largest:
            raise RequestError(f"found {name} {values[name]}; expected at most {largest} in a request")
    changed = pipeline.with_options(**values)
    changed.split_lines = BOOLEANS[sentences]
    return changed


def _value(name: str, value: Any) -> Any:
    """Returns the checked value of an option; numbers may be text, as in a query."""
    if name not in options.OPTIONS:
        raise RequestError(f"there is no option {name[:40]!r}; expected {', '.join(OPTIONS)}")
    option = options.OPTIONS[name]
    return option.checked(option.parsed(value) if isinstance(value, str) else value)


def _texts(job: Job) -> tuple[list[str], dict[str, Any]]:
    """The texts of a body, and the options beside them; null is an option that is not set."""
    if job.content_type.lower().startswith("multipart/"):
        types = ", ".join(TranslationHandler.content_types)
        raise RequestError(f"Content-Type is {job.content_type[:100]!r}; expected one of {types}")
    if job.content_type != responses.JSON:
        return text_lines(job, MAX_LINES, "lines"), {}
    content, options = json_options(job, "sentences", JSON_OPTIONS)
    texts = [content] if isinstance(content, str) else content
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError('the body must be {"sentences": [text, ...]}')
    return texts, {name: value for name, value in options.items() if value is not None}
