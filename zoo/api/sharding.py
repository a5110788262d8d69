"""The verbs of scoring by many processes: run_shard, run_on_ray, check."""

from zoo.distributed.ray.scoring import run_on_ray
from zoo.distributed.shards import check, run_shard

__all__ = ["check", "run_on_ray", "run_shard"]
