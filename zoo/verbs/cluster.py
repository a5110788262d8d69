"""The verbs on a Ray cluster, beside those of scoring: cluster_yaml, serve_on_ray, train_on_ray."""

from zoo.cluster.manifests import cluster_yaml
from zoo.cluster.serving import serve_on_ray
from zoo.cluster.training import train_on_ray

__all__ = ["cluster_yaml", "serve_on_ray", "train_on_ray"]
