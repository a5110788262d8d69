"""Files that bring a Ray cluster up: for Ray's cluster launcher (`ray up`) on AWS, Google Cloud, Azure or own machines,
and for KubeRay.

They hold no credentials: the launcher takes those of the cloud's own tools, KubeRay those of kubectl. The dashboard, by
which jobs come, listens on the head's loopback alone (`ray dashboard` brings it here through SSH); in Kubernetes, where
the operator asks it, behind a token.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError, requires
from pipelines.core.files import write_text

RAY = "2.60.0"
PYTHON = "py312"
IMAGE = f"rayproject/ray:{RAY}-{PYTHON}-cpu"
CLOUDS = ("aws", "gcp", "azure", "kuberay", "local")
INSTANCES = {  # x86-64 with AVX512-VNNI: Sapphire Rapids, on Azure Ice Lake or newer
    "aws": ("c7i.xlarge", "c7i.4xlarge"),
    "gcp": ("c3-standard-4", "c3-standard-22"),
    "azure": ("Standard_D4s_v5", "Standard_D16s_v5"),
}
REGIONS = {"aws": "us-west-2", "gcp": "us-west1", "azure": "westus2"}
ARM = {"aws": r"[a-z]+\d+g[a-z]*\.|a1\.", "gcp": r"t2a-|c4a-|n4a-", "azure": r"Standard_[A-Z]+\d+p"}
AUTH = "RAY_AUTH_MODE"
VNNI = "feature.node.kubernetes.io/cpu-cpuid.AVX512VNNI"  # which node-feature-discovery sets
TOKEN = "~/.ray/auth_token"  # where Ray looks for one
ASK = (
    f"grep -qs {AUTH} ~/.bashrc || echo 'export {AUTH}=token' >> ~/.bashrc"  # which every command of the launcher reads
)
GIB = 4  # of memory for each core of a pod
BOOT_GB = 128


def cluster_yaml(
    cloud: str,
    output: str | Path,
    *,
    workers: int = 2,
    instance: str | None = None,
    name: str = "int8-zoo",
    region: str | None = None,
    project: str | None = None,
    hosts: Sequence[str] = (),
    user: str = "ubuntu",
    cores: int = 8,
    claim: str | None = None,
    package: str | None = None,
    command: str | None = None,
    spot: bool = False,
) -> dict[str, Any]:
    """Writes the configuration of a Ray cluster: a head node and worker nodes.

    Args:
        cloud: "aws", "gcp", "azure", "kuberay" or "local".
        output: Path of the YAML file.
        workers: Number of worker nodes.
        instance: Instance type of the workers; None for one with AVX512-VNNI.
        name: Cluster name.
        region: Cloud region; None for the default of the cloud.
        project: Google Cloud: project id.
        hosts: local: addresses of the machines, head node first.
        user: SSH user.
        cores: kuberay: cores per pod.
        claim: kuberay: persistent volume claim mounted at /shared on every pod.
        package: Package that pip installs on every node; None for this version with the extras ray and train.
        command: Command to run on the cluster. KubeRay runs it as a RayJob and then deletes the cluster.
        spot: Use spot (preemptible) workers.

    Returns:
        {"path", "cloud", "workers"} and the shell commands "start", "run" and "stop".

    Raises:
        RequestError: An option is invalid.
    """
    if cloud not in CLOUDS:
        raise RequestError(f"found the cloud {cloud}, wanted {', '.join(CLOUDS)}")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise RequestError(f"found the name {name}, wanted up to 40 lower-case letters, digits and hyphens")
    if workers < 1 or cores < 1:
        raise RequestError(f"found {workers} workers of {cores} cores, wanted 1 or more")
    if instance and re.match(ARM.get(cloud, "$^"), instance):
        raise RequestError(f"{instance} is an ARM machine; the kernels are for x86-64, such as {INSTANCES[cloud][1]}")
    package = package or f"int8-zoo[ray,train]=={importlib.metadata.version('int8-zoo')}"
    if cloud == "kuberay":
        found = _kuberay(name, workers, instance, cores, claim, package, command)
    else:
        found = _launcher(cloud, name, workers, instance, package, spot)
        found["provider"] = {"type": cloud, **_provider(cloud, name, workers, region, project, hosts)}
        found["auth"] = {"ssh_user": user}
    told = _commands(cloud, str(output), name, package, command)
    write_text(output, _text(found, told))
    return {"path": str(output), "cloud": cloud, "workers": workers, **told}


def _provider(
    cloud: str, name: str, workers: int, region: str | None, project: str | None, hosts: Sequence[str]
) -> dict[str, Any]:
    place = region or REGIONS.get(cloud, "")
    if cloud == "local":
        if len(hosts) != workers + 1:
            raise RequestError(f"found {len(hosts)} hosts, wanted {workers + 1}: the head and {workers} workers")
        return {"head_ip": hosts[0], "worker_ips": list(hosts[1:])}
    if cloud == "azure":
        return {"location": place, "resource_group": name}
    if cloud == "aws":
        return {"region": place, "cache_stopped_nodes": False}
    if not project:
        raise RequestError("Google Cloud wants the id of a project; add --project ID")
    return {"region": place, "availability_zone": f"{place}-a", "project_id": project}


def _node(cloud: str, instance: str, spot: bool) -> dict[str, Any]:
    """What the launcher asks a cloud for."""
    if cloud == "aws":
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": BOOT_GB, "VolumeType": "gp3"}}
        market = {"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}
        return {"InstanceType": instance, "BlockDeviceMappings": [disk], **market}
    if cloud == "gcp":
        started = {
            "diskSizeGb": BOOT_GB,
            "sourceImage": "projects/deeplearning-platform-release/global/images/family/common-cpu",
        }
        boot: dict[str, Any] = {"boot": True, "autoDelete": True, "type": "PERSISTENT", "initializeParams": started}
        return {"machineType": instance, "disks": [boot], **({"scheduling": [{"preemptible": True}]} if spot else {})}
    image = {"imagePublisher": "microsoft-dsvm", "imageOffer": "ubuntu-2204", "imageSku": "2204-gen2"}
    asked = {"vmSize": instance, **image, "imageVersion": "latest", **({"priority": "Spot"} if spot else {})}
    return {"azure_arm_parameters": asked}


def _launcher(cloud: str, name: str, workers: int, instance: str | None, package: str, spot: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cluster_name": name,
        "max_workers": workers,
        "provider": {},
        "auth": {},
        "docker": {"image": IMAGE, "container_name": "ray"},
        "file_mounts": {TOKEN: TOKEN},
        "setup_commands": [f"pip install '{package}' ray=={RAY}", ASK],
        "head_start_ray_commands": [
            "ray stop",
            "ulimit -n 65536; ray start --head --port=6379 --dashboard-host=127.0.0.1 "
            "--autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": ["ray stop", "ulimit -n 65536; ray start --address=$RAY_HEAD_IP:6379"],
    }
    if cloud == "local":  # which has a Python of its own
        del found["docker"]
        return found
    head, worker = INSTANCES[cloud]
    kinds = {
        "head": {"resources": {}, "node_config": _node(cloud, head, False)},
        "worker": {
            "min_workers": workers,
            "max_workers": workers,
            "resources": {},
            "node_config": _node(cloud, instance or worker, spot),
        },
    }
    return {**found, "available_node_types": kinds, "head_node_type": "head"}


def _kuberay(
    name: str, workers: int, instance: str | None, cores: int, claim: str | None, package: str, command: str | None
) -> dict[str, Any]:
    place = {"node.kubernetes.io/instance-type": instance} if instance else {VNNI: "true"}

    def pod(container: str, count: int) -> dict[str, Any]:
        asked = {"cpu": str(count), "memory": f"{GIB * count}Gi"}
        one: dict[str, Any] = {
            "name": container,
            "image": IMAGE,
            "resources": {"requests": asked, "limits": dict(asked)},
        }
        spec: dict[str, Any] = {"containers": [one], "nodeSelector": dict(place)}
        if claim:
            one["volumeMounts"] = [{"name": "shared", "mountPath": "/shared"}]
            spec["volumes"] = [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}]
        return {"spec": spec}

    cluster = {
        "rayVersion": RAY,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
            "template": pod("ray-head", 2),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": workers,
                "minReplicas": workers,
                "maxReplicas": workers,
                "rayStartParams": {},
                "template": pod("ray-worker", cores),
            }
        ],
    }
    head = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster" if command is None else "RayJob",
        "metadata": {"name": name},
    }
    if command is None:
        return {**head, "spec": cluster}
    job = {
        "entrypoint": command,
        "runtimeEnvYAML": json.dumps({"pip": [package]}),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 300,
        "backoffLimit": 1,
        "rayClusterSpec": cluster,
    }
    return {**head, "spec": job}


def _commands(cloud: str, path: str, name: str, package: str, command: str | None) -> dict[str, str]:
    """What to run to have the cluster, to use it and to be rid of it."""
    asked = command or "zoo run MODEL INPUT -o OUTPUT --on ray --address auto"
    submit = "ray job submit --address http://127.0.0.1:8265"
    if cloud == "kuberay":
        kind = "raycluster" if command is None else "rayjob"
        forward = f"kubectl port-forward service/{name}-head-svc 8265"
        environment = json.dumps({"pip": [package]})
        run = f"{forward} & {submit} --runtime-env-json '{environment}' -- {asked}" if command is None else ""
        run = run or f"kubectl logs --follow job/{name}"
        return {"start": f"kubectl apply -f {path}", "run": run, "stop": f"kubectl delete {kind} {name}"}
    run = f"ray dashboard {path} & {AUTH}=token {submit} -- {asked}"
    first = "RAY_UP_enable_autoscaler_v2=0 " if cloud == "local" else ""  # of own machines the new one starts no worker
    start = f"ray get-auth-token --generate > /dev/null; {first}ray up --yes {path}"
    return {"start": start, "run": run, "stop": f"ray down --yes {path}"}


def _text(found: dict[str, Any], told: dict[str, str]) -> str:
    """The file, with its commands above. Raises RequestError where PyYAML is missing."""
    with requires("writing a cluster's file", "int8-zoo[ray]"):
        import yaml  # type: ignore[import-untyped]
    head = "".join(f"# {name + ':':6} {line}\n" for name, line in told.items())
    return f"{head}\n{yaml.safe_dump(found, sort_keys=False, width=110)}"
