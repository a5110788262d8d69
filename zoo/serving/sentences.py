"""Sentences to translations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import orjson

from pipelines.core.errors import RequestError
from zoo.serving import answers
from zoo.serving.messages import Answer, Job
from zoo.serving.services import INFER, Service, failed
from zoo.transformer_mt.predict import Line, TranslationPipeline

MOST = 4096  # lines of one request


class Sentences(Service):
    """Translations of the lines of a text, or of a list of sentences in JSON."""

    kinds: ClassVar[tuple[str, ...]] = (answers.TEXT, answers.JSON)
    written: ClassVar[tuple[str, ...]] = (*answers.KINDS, answers.TEXT)
    pipeline: TranslationPipeline

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        """The answers to some requests, computed together."""
        found = super().answer([job for job in jobs if job.verb == INFER])
        for job in jobs:
            if job.verb != INFER:
                try:
                    found.append(self._run(job))
                except Exception as error:
                    found.append(failed(job, error))
        return found

    def _run(self, job: Job) -> Answer:
        begin = time.perf_counter()
        lines = self.lines(job)
        kind = answers.chosen(job.accept, self.written)
        tokens = self.pipeline.vocabulary.encode([part for line in lines for part in line.parts])
        parsed = time.perf_counter()
        translated = self.pipeline.translate(tokens)
        computed = time.perf_counter()
        rows, at = [], 0
        for line in lines:
            end = at + len(line.parts)
            rows.append(self.pipeline._joined([each[0] for each in translated[at:end]]))
            at = end
        columns: dict[str, Any] = {
            "translation": [text for text, _ in rows],
            "line": list(range(1, len(lines) + 1)),
            "score": np.array([score for _, score in rows], np.float32),
        }
        if any(line.fault for line in lines):
            columns["error"] = [line.fault or None for line in lines]
        if kind != answers.TEXT:
            columns = {name: columns[name] for name in ("line", "translation", "score", "error") if name in columns}
        body = answers.encoded(columns, kind)
        split = (parsed - begin, computed - parsed, time.perf_counter() - computed)
        return Answer(job.number, 200, kind, body, split, len(lines), len(lines))

    def lines(self, job: Job) -> list[Line]:
        """The lines of a body. Raises RequestError for none, and where not one can be translated."""
        texts = _texts(job)
        if not 1 <= len(texts) <= MOST:
            raise RequestError(f"the body has {len(texts)} sentences; wanted 1 to {MOST}")
        lines = [self.pipeline._line(f"line {i}", text, split=True) for i, text in enumerate(texts, 1)]
        if not any(line.parts for line in lines):
            fault = next((line for line in lines if line.fault), None)
            raise RequestError(f"{fault.where} {fault.fault}" if fault else "the body holds no sentence")
        return lines


def _texts(job: Job) -> list[str]:
    if job.kind == answers.JSON:
        try:
            found = orjson.loads(job.body)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"the body is no JSON: {error}") from error
        if isinstance(found, dict):
            found = found.get("sentences")
        found = [found] if isinstance(found, str) else found
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise RequestError('the body must be {"sentences": [text, ...]}')
        return found
    try:
        return job.body.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError("the body is not UTF-8") from error
