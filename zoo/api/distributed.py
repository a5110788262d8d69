"""Commands of several processes and of Ray clusters: sharded scoring, training, serving, cluster configuration."""

from zoo.distributed.ray.manifests import cluster_yaml
from zoo.distributed.ray.scoring import run_on_ray
from zoo.distributed.ray.serving import serve_on_ray
from zoo.distributed.ray.training import train_on_ray
from zoo.distributed.shards import check, run_shard

__all__ = ["check", "cluster_yaml", "run_on_ray", "run_shard", "serve_on_ray", "train_on_ray"]
