"""Sentences to translations: they join the batch of the native decoder between two of its steps, whatever else is
there, and each is answered as soon as it is done.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from pipelines.core.batches import whole_number
from pipelines.core.errors import RequestError, ZooError
from zoo.serving.handlers.base import INFER, Busy, Service, failed, json_of, lines_of
from zoo.serving.protocol import responses
from zoo.serving.workers.channel import Answer, Job
from zoo.translation.data.lines import Line
from zoo.translation.inference import TranslationPipeline
from zoo.translation.search.beam_search import Hypothesis

EXAMPLES = 3  # sentences that are shown to users
MOST = 4096  # lines of one request
WIDEST = 32  # beam
VARIANTS = 4  # streams of different options that are open at once
OPTIONS = ("beam", "n_best", "source_language", "target_language", "max_tokens", "sentences")
POLL = 1.0  # seconds after which a thread without work looks whether it should end

Send = Callable[[list[Answer]], None]


class Sentences(Service):
    """Translations of the lines of a text, or of a list of sentences in JSON.

    Where the engine is native, `begin` gives the sentences to streams, whose threads answer through `send`; answers as
    JSON lines come line by line.
    """

    kinds: ClassVar[tuple[str, ...]] = (responses.TEXT, responses.JSON)
    written: tuple[str, ...] = (*responses.KINDS, responses.TEXT)
    pipeline: TranslationPipeline

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._variants: dict[tuple[Any, ...], Variant] = {}

    @property
    def streams(self) -> bool:
        """See `Service`."""
        return self.pipeline.engine == "native"

    def more(self) -> dict[str, Any]:
        """The options of the query."""
        return {"options": list(OPTIONS)}

    def begin(self, jobs: Sequence[Job], send: Send) -> None:
        """Answer some requests by and by."""
        if tensors := [job for job in jobs if job.verb == INFER]:
            send(super().answer(tensors))
        for job in jobs:
            if job.verb != INFER:
                try:
                    asked = self._asked(job)
                    self._variant(asked.pipeline).begin(asked, send)
                except Exception as error:
                    send([failed(job, error)])

    def cancel(self, number: int) -> None:
        """See `Service`."""
        for each in list(self._variants.values()):
            each.cancel(number)

    def text(self) -> str:
        """A sentence a line."""
        return "\n".join(self.pipeline.example(EXAMPLES))

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        """The answers to some requests, one after the other."""
        found = super().answer([job for job in jobs if job.verb == INFER])
        for job in jobs:
            if job.verb != INFER:
                try:
                    asked = self._asked(job)
                    for i, each in enumerate(asked.pipeline.translate(asked.tokens)):
                        asked.found[i] = each
                    found.append(asked.answer(len(asked.lines)))
                except Exception as error:
                    found.append(failed(job, error))
        return found

    def _asked(self, job: Job) -> Asked:
        """A request with its body read. Raises RequestError for another one."""
        begin = time.perf_counter()
        pipeline = _with(self.pipeline, job.options) if job.options else self.pipeline
        kind = responses.chosen(job.accept, self.written)
        texts = _texts(job)
        if not 1 <= len(texts) <= MOST:
            raise RequestError(f"the body has {len(texts)} lines; wanted 1 to {MOST}")
        lines = [pipeline.line(f"line {i}", text, split=True) for i, text in enumerate(texts, 1)]
        if not any(line.parts for line in lines):
            fault = next((line for line in lines if line.fault), None)
            raise RequestError(f"{fault.where} {fault.fault}" if fault else "the body holds no sentence")
        tokens = [part for line in lines for part in line.parts]
        now = time.perf_counter()
        return Asked(job, kind, pipeline, lines, tokens, now - begin, now)

    def _variant(self, pipeline: TranslationPipeline) -> Variant:
        """The stream for a pipeline's options; one that has no work gives way to it. Raises Busy where all have."""
        key = (pipeline.beam, pipeline.best, pipeline.vocabulary.prefix)
        found = self._variants.pop(key, None)
        if found is None:
            if len(self._variants) >= VARIANTS:
                idle = next((key for key, each in self._variants.items() if not each.busy), None)
                if idle is None:
                    raise Busy(f"requests with {VARIANTS} other sets of options are under way; try again")
                self._variants.pop(idle).close()
            found = Variant(pipeline)
        self._variants[key] = found  # the last used one last
        return found


@dataclass
class Asked:
    """A request for translations. tokens: of every sentence; found: the translations so far, by its place there.

    parsing: seconds; begun: when it was given to the model.
    """

    job: Job
    kind: str
    pipeline: TranslationPipeline
    lines: list[Line]
    tokens: list[Any]
    parsing: float
    begun: float
    found: dict[int, list[Hypothesis]] = field(default_factory=dict)
    numbers: range = range(0)  # of its sentences in the stream
    told: int = 0  # sentences whose line was answered

    def columns(self, first: int, last: int, at: int) -> tuple[dict[str, Any], int]:
        """The results of some lines, whose sentences begin at a place; and where those of the next begin."""
        best = self.pipeline.best
        numbers: list[int] = []
        rows: list[tuple[str, float]] = []
        faults: list[str | None] = []
        for number, line in enumerate(self.lines[first:last], first + 1):
            end = at + len(line.parts)
            for k in range(best):
                rows.append(self.pipeline.joined([self.found[i][k] for i in range(at, end)]))
                numbers.append(number)
                faults.append(line.fault or None)
            at = end
        scores = np.array([score for _, score in rows], np.float32)
        columns: dict[str, Any] = {"line": numbers, "translation": [text for text, _ in rows], "score": scores}
        if any(faults):
            columns["error"] = faults
        if self.kind == responses.TEXT:
            columns = {"translation": columns["translation"]}
        return columns, at

    def answer(self, together: int) -> Answer:
        """All of it."""
        now = time.perf_counter()
        body = responses.encoded(self.columns(0, len(self.lines), 0)[0], self.kind)
        split = (self.parsing, now - self.begun, time.perf_counter() - now)
        return Answer(self.job.number, 200, self.kind, body, split, len(self.lines), together)


class Variant:
    """A stream of one set of options, the thread that takes from it what is done, and the requests under way."""

    def __init__(self, pipeline: TranslationPipeline) -> None:
        self._stream = pipeline.stream()
        self._asked: dict[int, tuple[Asked, Send, int]] = {}  # by the number of a sentence: its place in the request
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._collect, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a sentence is under way."""
        return bool(self._asked)

    def begin(self, asked: Asked, send: Send) -> None:
        """Give the stream the sentences of a request."""
        frame = asked.pipeline.vocabulary.frame
        full = [i for i, each in enumerate(asked.tokens) if len(each) > frame]
        for i in set(range(len(asked.tokens))) - set(full):
            asked.found[i] = [Hypothesis([], 0.0)] * asked.pipeline.best
        if not full:
            send([asked.answer(0)])
            return
        with self._lock:  # nothing is told before it is known whose it is
            asked.numbers = asked.pipeline.submit(self._stream, [asked.tokens[i] for i in full])
            for number, i in zip(asked.numbers, full, strict=True):
                self._asked[number] = (asked, send, i)

    def cancel(self, number: int) -> None:
        """Compute a request's sentences no further."""
        with self._lock:
            for sentence in [each for each, (asked, _, _) in self._asked.items() if asked.job.number == number]:
                self._stream.cancel(sentence)
                del self._asked[sentence]

    def close(self) -> None:
        """End its threads."""
        self._closed = True
        self._stream.close()

    def _collect(self) -> None:
        while not self._closed:
            done: dict[int, tuple[Send, list[Answer]]] = {}
            finished = self._stream.finished(POLL)
            with self._lock:
                for number, translations, error in finished:
                    if number in self._asked:
                        asked, send, place = self._asked.pop(number)
                        ready = done.setdefault(id(send), (send, []))[1]
                        ready += self._finished(asked, place, translations, error)
            try:
                for send, ready in done.values():
                    if ready:
                        send(ready)
            except OSError:  # the front is gone, and so will be this process
                return

    def _finished(self, asked: Asked, place: int, translations: list[Any], error: str) -> list[Answer]:
        """What can be answered now that a sentence is done."""
        if error:
            for number in asked.numbers:
                if self._asked.pop(number, None) is not None:
                    self._stream.cancel(number)
            return [failed(asked.job, ZooError(error))]
        asked.found[place] = [Hypothesis(tokens, score) for tokens, score in translations]
        whole = len(asked.found) == len(asked.tokens)
        try:
            if whole and not asked.told:
                return [asked.answer(len(self._asked) + 1)]
            if asked.kind != responses.LINES:
                return []
            return self._piece(asked, whole)
        except Exception as problem:
            return [failed(asked.job, problem)]

    def _piece(self, asked: Asked, whole: bool) -> list[Answer]:
        """The lines from the first untold one on that are done, as a piece of the answer."""
        first = last = asked.told
        begin = end = sum(len(line.parts) for line in asked.lines[:first])
        while last < len(asked.lines) and all(i in asked.found for i in range(end, end + len(asked.lines[last].parts))):
            end += len(asked.lines[last].parts)
            last += 1
        if first == last:
            return []
        asked.told = last
        body = responses.encoded(asked.columns(first, last, begin)[0], asked.kind)
        split = (asked.parsing, time.perf_counter() - asked.begun, 0.0)
        return [Answer(asked.job.number, 200, asked.kind, body, split, last - first, len(self._asked) + 1, last=whole)]


def _with(pipeline: TranslationPipeline, options: Mapping[str, str]) -> TranslationPipeline:
    """The pipeline with the options of a query. Raises RequestError for others."""
    chosen = copy.copy(pipeline)
    if unknown := [name for name in options if name not in OPTIONS]:
        raise RequestError(f"there is no option {unknown[0][:40]!r}; wanted {', '.join(OPTIONS)}")
    chosen.beam = _number(options, "beam", WIDEST, pipeline.beam)
    chosen.best = _number(options, "n_best", WIDEST, 1)
    chosen.vocabulary = pipeline.vocabulary.choose(
        options.get("source_language", ""), options.get("target_language", "")
    )
    if "max_tokens" in options:
        chosen.rules = replace(pipeline.rules, most=_number(options, "max_tokens", 1 << 20, 1))
    chosen.apart = options.get("sentences", "false").lower() in ("", "1", "true", "yes")
    return chosen


def _number(options: Mapping[str, str], name: str, most: int, default: int) -> int:
    text = options.get(name, str(default))
    return whole_number(name, int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text, most)


def _texts(job: Job) -> list[str]:
    if job.kind.lower().startswith("multipart/"):
        raise RequestError(f"Content-Type is {job.kind[:100]!r}; wanted one of {', '.join(Sentences.kinds)}")
    if job.kind == responses.JSON:
        found = json_of(job.body, "sentences")
        found = [found] if isinstance(found, str) else found
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise RequestError('the body must be {"sentences": [text, ...]}')
        return found
    return lines_of(job.body)
