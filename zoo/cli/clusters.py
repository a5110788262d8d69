"""The commands about clusters."""

from __future__ import annotations

from typing import Any

import click

from zoo.cli.options import Words, as_json
from zoo.cli.output import show


@click.group()
def cluster() -> None:
    """Clusters of machines, which Ray runs."""


@cluster.command("yaml")
@click.option("--cloud", required=True, type=click.Choice(["aws", "gcp", "azure", "kuberay", "local"]))
@click.option("-o", "--output", required=True, help="The file.")
@click.option("--workers", default=2, show_default=True, help="Nodes beside the head.")
@click.option("--instance", default=None, help="Kind of machine of the workers. [default: one with AVX512-VNNI]")
@click.option("--name", default="int8-zoo", show_default=True, help="Of the cluster.")
@click.option("--region", default=None, help="[default: us-west-2, us-west1, westus2]")
@click.option("--project", default=None, help="Google Cloud: the project's id.")
@click.option("--hosts", type=Words(), default=(), help="local: addresses of own machines, the head first.")
@click.option("--user", default="ubuntu", show_default=True, help="Who comes in by SSH.")
@click.option("--cores", default=8, show_default=True, help="kuberay: of a worker.")
@click.option("--claim", default=None, help="kuberay: a volume claim that all have at /shared.")
@click.option("--package", default=None, help="What pip installs. [default: this version, with ray and train]")
@click.option("--command", default=None, help="What to run there; kuberay: as a RayJob, which ends the cluster.")
@click.option("--spot", is_flag=True, help="Workers that the cloud may take back.")
@as_json
def cluster_yaml(as_json: bool, **options: Any) -> None:
    """Write the file with which ray up or kubectl brings a cluster up."""
    from zoo import api

    show(api.cluster_yaml(options.pop("cloud"), options.pop("output"), **options), as_json)
