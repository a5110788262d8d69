"""The verbs on a Ray cluster, beside those of scoring: cluster_yaml, train_on_ray."""

from zoo.cluster.manifests import cluster_yaml
from zoo.cluster.training import train_on_ray

__all__ = ["cluster_yaml", "train_on_ray"]
