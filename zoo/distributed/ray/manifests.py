"""Configurations of Ray clusters: for the cluster launcher (`ray up`) and for KubeRay.

The launcher supports AWS, Google Cloud, Azure and existing machines. The files have no credentials: the launcher uses
those of the cloud's tools, KubeRay those of kubectl. The dashboard accepts jobs. It listens only on the loopback
address of the head node, from which `ray dashboard` forwards it through SSH. In Kubernetes the operator needs the
dashboard, which requires a token there.
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
VNNI_LABEL = "feature.node.kubernetes.io/cpu-cpuid.AVX512VNNI"  # of Node Feature Discovery
TOKEN_FILE = "~/.ray/auth_token"
# every command of the launcher reads ~/.bashrc
REQUIRE_TOKEN = f"grep -qs {AUTH} ~/.bashrc || echo 'export {AUTH}=token' >> ~/.bashrc"
GIB_PER_CORE = 4  # memory of a pod
BOOT_DISK_GB = 128


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
        raise RequestError(f"found the cloud {cloud}, expected {', '.join(CLOUDS)}")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise RequestError(f"found the name {name}, expected up to 40 lower-case letters, digits and hyphens")
    if workers < 1 or cores < 1:
        raise RequestError(f"found {workers} workers of {cores} cores, expected 1 or more")
    if instance and re.match(ARM.get(cloud, "$^"), instance):
        raise RequestError(f"{instance} is an ARM machine; the kernels are for x86-64, such as {INSTANCES[cloud][1]}")
    package = package or f"int8-zoo[ray,train]=={importlib.metadata.version('int8-zoo')}"
    if cloud == "kuberay":
        content = _kuberay(name, workers, instance, cores, claim, package, command)
    else:
        content = _launcher(cloud, name, workers, instance, package, spot)
        content["provider"] = {"type": cloud, **_provider(cloud, name, workers, region, project, hosts)}
        content["auth"] = {"ssh_user": user}
    commands = _commands(cloud, str(output), name, package, command)
    write_text(output, _to_yaml(content, commands))
    return {"path": str(output), "cloud": cloud, "workers": workers, **commands}


def _provider(
    cloud: str, name: str, workers: int, region: str | None, project: str | None, hosts: Sequence[str]
) -> dict[str, Any]:
    location = region or REGIONS.get(cloud, "")
    if cloud == "local":
        if len(hosts) != workers + 1:
            raise RequestError(f"found {len(hosts)} hosts, expected {workers + 1}: the head and {workers} workers")
        return {"head_ip": hosts[0], "worker_ips": list(hosts[1:])}
    if cloud == "azure":
        return {"location": location, "resource_group": name}
    if cloud == "aws":
        return {"region": location, "cache_stopped_nodes": False}
    if not project:
        raise RequestError("Google Cloud needs a project id; add --project ID")
    return {"region": location, "availability_zone": f"{location}-a", "project_id": project}


def _node(cloud: str, instance: str, spot: bool) -> dict[str, Any]:
    """Configuration of a node in the terms of the cloud."""
    if cloud == "aws":
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": BOOT_DISK_GB, "VolumeType": "gp3"}}
        market = {"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}
        return {"InstanceType": instance, "BlockDeviceMappings": [disk], **market}
    if cloud == "gcp":
        disk_parameters = {
            "diskSizeGb": BOOT_DISK_GB,
            "sourceImage": "projects/deeplearning-platform-release/global/images/family/common-cpu",
        }
        boot: dict[str, Any] = {
            "boot": True,
            "autoDelete": True,
            "type": "PERSISTENT",
            "initializeParams": disk_parameters,
        }
        return {"machineType": instance, "disks": [boot], **({"scheduling": [{"preemptible": True}]} if spot else {})}
    image = {"imagePublisher": "microsoft-dsvm", "imageOffer": "ubuntu-2204", "imageSku": "2204-gen2"}
    parameters = {"vmSize": instance, **image, "imageVersion": "latest", **({"priority": "Spot"} if spot else {})}
    return {"azure_arm_parameters": parameters}


def _launcher(cloud: str, name: str, workers: int, instance: str | None, package: str, spot: bool) -> dict[str, Any]:
    content: dict[str, Any] = {
        "cluster_name": name,
        "max_workers": workers,
        "provider": {},
        "auth": {},
        "docker": {"image": IMAGE, "container_name": "ray"},
        "file_mounts": {TOKEN_FILE: TOKEN_FILE},
        "setup_commands": [f"pip install '{package}' ray=={RAY}", REQUIRE_TOKEN],
        "head_start_ray_commands": [
            "ray stop",
            "ulimit -n 65536; ray start --head --port=6379 --dashboard-host=127.0.0.1 "
            "--autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": ["ray stop", "ulimit -n 65536; ray start --address=$RAY_HEAD_IP:6379"],
    }
    if cloud == "local":  # existing machines use their own Python
        del content["docker"]
        return content
    head, worker = INSTANCES[cloud]
    node_types = {
        "head": {"resources": {}, "node_config": _node(cloud, head, False)},
        "worker": {
            "min_workers": workers,
            "max_workers": workers,
            "resources": {},
            "node_config": _node(cloud, instance or worker, spot),
        },
    }
    return {**content, "available_node_types": node_types, "head_node_type": "head"}


def _kuberay(
    name: str, workers: int, instance: str | None, cores: int, claim: str | None, package: str, command: str | None
) -> dict[str, Any]:
    node_selector = {"node.kubernetes.io/instance-type": instance} if instance else {VNNI_LABEL: "true"}

    def pod(container_name: str, count: int) -> dict[str, Any]:
        resources = {"cpu": str(count), "memory": f"{GIB_PER_CORE * count}Gi"}
        container: dict[str, Any] = {
            "name": container_name,
            "image": IMAGE,
            "resources": {"requests": resources, "limits": dict(resources)},
        }
        spec: dict[str, Any] = {"containers": [container], "nodeSelector": dict(node_selector)}
        if claim:
            container["volumeMounts"] = [{"name": "shared", "mountPath": "/shared"}]
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
    """Shell commands that start, use and stop the cluster."""
    job = command or "zoo run MODEL INPUT -o OUTPUT --on ray --address auto"
    submit = "ray job submit --address http://127.0.0.1:8265"
    if cloud == "kuberay":
        kind = "raycluster" if command is None else "rayjob"
        forward = f"kubectl port-forward service/{name}-head-svc 8265"
        environment = json.dumps({"pip": [package]})
        run = f"kubectl logs --follow job/{name}"
        if command is None:
            run = f"{forward} & {submit} --runtime-env-json '{environment}' -- {job}"
        return {"start": f"kubectl apply -f {path}", "run": run, "stop": f"kubectl delete {kind} {name}"}
    run = f"ray dashboard {path} & {AUTH}=token {submit} -- {job}"
    # autoscaler v2 does not start the workers of existing machines
    environment = "RAY_UP_enable_autoscaler_v2=0 " if cloud == "local" else ""
    start = f"ray get-auth-token --generate > /dev/null; {environment}ray up --yes {path}"
    return {"start": start, "run": run, "stop": f"ray down --yes {path}"}


def _to_yaml(content: dict[str, Any], commands: dict[str, str]) -> str:
    """The file, with the commands in a comment. Raises RequestError if PyYAML is not installed."""
    with requires("writing a cluster's file", "int8-zoo[ray]"):
        import yaml  # type: ignore[import-untyped]
    head = "".join(f"# {name + ':':6} {line}\n" for name, line in commands.items())
    return f"{head}\n{yaml.safe_dump(content, sort_keys=False, width=110)}"
