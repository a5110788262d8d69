"""The verbs of scoring by many processes: run_shard, check."""

from zoo.scoring.shards import check, run_shard

__all__ = ["check", "run_shard"]
