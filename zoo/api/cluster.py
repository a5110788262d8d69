"""The verbs on a Ray cluster, beside those of scoring: cluster_yaml, serve_on_ray, train_on_ray."""

from zoo.distributed.ray.manifests import cluster_yaml
from zoo.distributed.ray.serving import serve_on_ray
from zoo.distributed.ray.training import train_on_ray

__all__ = ["cluster_yaml", "serve_on_ray", "train_on_ray"]
