"""Scoring, training and serving by several processes on any machines.

    parts         splitting of inputs into parts
    shards        scoring of every n-th part by one process, with a manifest for each part
    arrow         scorer of Arrow batches for Spark and Ray Data
    remote_files  files behind URLs
    ray           scoring, training and serving on Ray clusters

Only `zoo.api.distributed` imports this package.
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
