"""Commands for Ray clusters."""

from __future__ import annotations

from typing import Any

import click

from zoo.cli.options import Words, as_json, refuse
from zoo.cli.output import show

CLOUDS = ("aws", "gcp", "azure")
OF_CLOUDS = {  # options that some clouds have
    "project": ("gcp",),
    "hosts": ("local",),
    "claim": ("kuberay",),
    "cores": ("kuberay",),
    "region": CLOUDS,
    "spot": CLOUDS,
    "instance": (*CLOUDS, "kuberay"),
    "user": (*CLOUDS, "local"),
}


@click.group()
def cluster() -> None:
    """Configure Ray clusters."""


@cluster.command("yaml")
@click.option("--cloud", required=True, type=click.Choice([*CLOUDS, "kuberay", "local"]))
@click.option("-o", "--output", required=True, help="Output file.")
@click.option("--workers", default=2, show_default=True, help="Number of worker nodes.")
@click.option("--instance", default=None, help="Instance type of the workers. [default: one with AVX512-VNNI]")
@click.option("--name", default="int8-zoo", show_default=True, help="Cluster name.")
@click.option("--region", default=None, help="Cloud region. [default: us-west-2, us-west1, westus2]")
@click.option("--project", default=None, help="Google Cloud: project id.")
@click.option("--hosts", type=Words(), default=(), help="local: addresses of the machines, head node first.")
@click.option("--user", default="ubuntu", show_default=True, help="SSH user.")
@click.option("--cores", default=8, show_default=True, help="kuberay: cores per worker.")
@click.option("--claim", default=None, help="kuberay: persistent volume claim mounted at /shared on every pod.")
@click.option(
    "--package", default=None, help="Package that pip installs. [default: this version, with the extras ray and train]"
)
@click.option(
    "--command",
    default=None,
    help="Command to run on the cluster; kuberay: as a RayJob, which then deletes the cluster.",
)
@click.option("--spot", is_flag=True, help="Use spot (preemptible) workers.")
@as_json
def cluster_yaml(as_json: bool, **options: Any) -> None:
    """Write a cluster configuration for `ray up` or kubectl."""
    from zoo import api

    cloud = options.pop("cloud")
    for name, clouds in OF_CLOUDS.items():
        if cloud not in clouds:
            refuse(f"requires --cloud {' or '.join(clouds)}, found {cloud}", name)
    show(api.cluster_yaml(cloud, options.pop("output"), **options), as_json)
