"""Bodies and responses of `:rank`: one user and many items of a recommender."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.core.batches import whole_number
from pipelines.core.errors import RequestError
from pipelines.models.protocols import RanksItems, RetrievesItems
from zoo.serving.handlers.base import error_result, json_options
from zoo.serving.protocol import limits, responses
from zoo.serving.workers.channel import Job, JobResult

RANK = "rank"
OPTIONS = ("items", "top", "exclude", "by", "from", "candidates")
CANDIDATES = 1000  # that a model retrieves for another one


class ItemRanker:
    """Ranks items for the users of requests.

    Args:
        name: Public name of the model.
        pipeline: Pipeline of the model.
        items: File of the catalogue; None for none.

    Attributes:
        catalogue: The catalogue, if there is one.
        retrieves: Whether the model finds candidates for other models.
        retrievers: Models of the same worker that do, by public name.

    Raises:
        RequestError: The items cannot be read, or the model ranks none.
    """

    def __init__(self, name: str, pipeline: RanksItems, items: Path | None) -> None:
        self.name, self.pipeline = name, pipeline
        self.catalogue = None if items is None else pipeline.catalogue(items)
        self.retrieves = self.catalogue is not None and isinstance(pipeline, RetrievesItems)
        self.retrievers: Mapping[str, ItemRanker] = {}
        if self.retrieves:
            pipeline.indexed(self.catalogue)  # type: ignore[attr-defined]  # now, not in the first request

    def run(self, job: Job) -> JobResult:
        """Answers one request.

        Args:
            job: The job; its body is {"user": {column: value}, "items": ids, or [{column: value}, ...], "top": number,
                "exclude": ids, "by": label or weighted sum of labels, "from": name of a model that retrieves the
                items, "candidates": how many of them}.

        Returns:
            The ranked items, or an error.
        """
        try:
            begin = time.perf_counter()
            if job.options:
                raise RequestError(f"there is no option {next(iter(job.options))[:40]!r}; expected it in the body")
            media_type = responses.negotiate(job.accept, responses.TABLE_TYPES)
            request = self._parse(job)
            parsed = time.perf_counter()
            columns = self.pipeline.rank_columns(**request)
            if not len(columns["row"]):
                raise RequestError("exclude leaves no item to rank, expected at least one item that is not in exclude")
            ranked = time.perf_counter()
            body = responses.encode(columns, media_type)
            seconds = (parsed - begin, ranked - parsed, time.perf_counter() - ranked)
            count = len(columns["row"])
            return JobResult(job.job_id, 200, media_type, body, seconds, count, count)
        except BaseException as error:  # a panic of a library, too
            return error_result(job, error)

    def _parse(self, job: Job) -> dict[str, Any]:
        """Arguments of `rank_columns`."""
        if job.content_type not in (responses.JSON, ""):
            raise RequestError(f"Content-Type is {job.content_type[:100]!r}; expected {responses.JSON}")
        user, options = json_options(job, "user", OPTIONS)
        items, top, exclude, by, source, candidates = (options.get(key) for key in OPTIONS)
        if not isinstance(user, dict):
            raise RequestError('the body must be {"user": {column: value, ...}, "items": [...]}')
        request: dict[str, Any] = {"user": user, "exclude": ()}
        if exclude is not None:
            request["exclude"] = _ids("exclude", exclude, _kinds(exclude))
        if by is not None and not isinstance(by, str):
            raise RequestError(f"by is {str(by)[:40]}, expected a label or a weighted sum of labels as text")
        request["by"] = by
        request["top"] = None if top is None else whole_number("top", top)
        plain = self.catalogue is not None and bool(items) and source is None and candidates is None
        if plain and (numbers := self.catalogue.find_texts(items)) is not None:  # type: ignore[union-attr]
            return {**request, "items": self.catalogue, "ids": numbers}  # nothing else is to be checked
        kinds = _kinds(items)
        if isinstance(items, list) and kinds == {dict}:
            limits.ITEMS.require(len(items), job.received_bytes)
            limits.VALUES.require(len(items) * max(map(len, items)), job.received_bytes)
            return {**request, "items": items}
        if self.catalogue is None:
            raise RequestError(
                f"{self.name} has no catalogue (zoo serve --items FILE); expected items as objects of their columns"
            )
        ids: Iterable[Any] | None = None if items is None else _ids("items", items, kinds)
        if source is not None or candidates is not None:
            ids = self._retrieved(request, ids, source, candidates)
        return {**request, "items": self.catalogue, "ids": ids}

    def _retrieved(self, request: Mapping[str, Any], items: Any, source: Any, candidates: Any) -> Iterable[Any]:
        """The items that another model retrieves for the user."""
        if items is not None:
            raise RequestError("found from and items, expected one of both")
        if source is None:
            raise RequestError("found candidates without from, expected the name of a model that retrieves items in it")
        retriever = self.retrievers.get(str(source))
        if retriever is None:
            names = ", ".join(self.retrievers) or "none here (zoo serve MODEL RETRIEVER --items RETRIEVER=FILE)"
            raise RequestError(f"found from {str(source)[:100]!r}, expected a model that retrieves items: {names}")
        count = CANDIDATES if candidates is None else whole_number("candidates", candidates)
        pipeline: Any = retriever.pipeline
        ids: Iterable[Any] = pipeline.retrieved(request["user"], retriever.catalogue, count, request["exclude"])
        return ids


def _kinds(values: Any) -> set[type]:
    """Types of the values of a list."""
    return set(map(type, values)) if isinstance(values, list) else set()


def _ids(key: str, values: Any, kinds: set[type]) -> Sequence[str | int]:
    """Ids of a body, of these types. Raises RequestError for other types, or if an item to rank is named twice."""
    if not isinstance(values, list) or not kinds <= {str, int}:
        rows = ", or all of them objects of their columns" if key == "items" else ""
        raise RequestError(f"{key} must be a list of ids, texts or whole numbers{rows}")
    if key == "items" and not values:
        raise RequestError("items is empty; expected at least one item, or no items for the whole catalogue")
    if key == "items" and len(set(values if len(kinds) == 1 else map(str, values))) < len(values):
        twice, _ = Counter(map(str, values)).most_common(1)[0]
        raise RequestError(f"items has the id {twice[:100]!r} more than once, expected every id once")
    return values
