"""Scoring by many processes on any machines: inputs cut into parts (`parts`), a shard of them scored by one process,
with a manifest for each (`shards`), and a scorer of Arrow batches for engines that bring their own distribution
(`arrow`).

It imports `zoo` and `pipelines`; only the verbs and `zoo/distributed/ray` import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.distributed.arrow import arrow_scorer

__all__ = ["arrow_scorer"]


def __getattr__(name: str) -> Any:
    if name == "arrow_scorer":
        from zoo.distributed import arrow

        return arrow.arrow_scorer
    raise AttributeError(f"module 'zoo.distributed' has no attribute {name!r}")
