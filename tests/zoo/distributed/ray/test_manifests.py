"""Files that bring clusters up: by Ray's own schema and check, and by what KubeRay's resources ask for."""

import json
from pathlib import Path

import jsonschema
import pytest

from pipelines.core.errors import RequestError
from zoo.distributed.ray.manifests import IMAGE, INSTANCES, RAY, cluster_yaml

yaml = pytest.importorskip("yaml", reason="needs pyyaml")
OWN = {"hosts": ("10.0.0.1", "10.0.0.2", "10.0.0.3"), "project": "my-project"}
LAUNCHER = ("aws", "gcp", "azure", "local")

# What KubeRay's custom resources ray.io/v1 require and name, of the parts that are written here; a field that they do
# not name is dropped by Kubernetes without a word. After the reference of KubeRay's API.
CLOSED = {"type": "object", "additionalProperties": False}
COUNTS = {key: {"type": "integer", "minimum": 0} for key in ("replicas", "minReplicas", "maxReplicas")}
PARAMETERS = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+(Gi)?$"}}
CONTAINER = {
    **CLOSED,
    "required": ["name", "image"],
    "properties": {
        "name": {"type": "string"},
        "image": {"type": "string"},
        "resources": {**CLOSED, "properties": {"requests": QUANTITIES, "limits": QUANTITIES}},
        "volumeMounts": {"type": "array", "items": {"type": "object", "required": ["name", "mountPath"]}},
    },
}
POD = {
    **CLOSED,
    "required": ["containers"],
    "properties": {
        "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
        "nodeSelector": PARAMETERS,
        "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
    },
}
TEMPLATE = {**CLOSED, "required": ["spec"], "properties": {"spec": POD}}
HEAD = {**CLOSED, "required": ["template"], "properties": {"rayStartParams": PARAMETERS, "template": TEMPLATE}}
GROUP = {
    **CLOSED,
    "required": ["groupName", "minReplicas", "maxReplicas", "template"],
    "properties": {"groupName": {"type": "string"}, **COUNTS, "rayStartParams": PARAMETERS, "template": TEMPLATE},
}
CLUSTER = {
    **CLOSED,
    "required": ["headGroupSpec"],
    "properties": {
        "rayVersion": {"type": "string"},
        "authOptions": {**CLOSED, "properties": {"mode": {"enum": ["disabled", "token"]}}},
        "headGroupSpec": HEAD,
        "workerGroupSpecs": {"type": "array", "items": GROUP},
    },
}
JOB = {
    **CLOSED,
    "required": ["entrypoint"],
    "properties": {
        "entrypoint": {"type": "string"},
        "runtimeEnvYAML": {"type": "string"},
        "shutdownAfterJobFinishes": {"type": "boolean"},
        "ttlSecondsAfterFinished": {"type": "integer"},
        "backoffLimit": {"type": "integer"},
        "rayClusterSpec": CLUSTER,
    },
}


def written(cloud: str, path: Path, **options) -> tuple[dict, dict]:
    """What the file holds, and what was told."""
    commands = cluster_yaml(cloud, path, **{**(OWN if cloud in LAUNCHER else {}), **options})
    return yaml.safe_load(path.read_text()), commands


@pytest.mark.parametrize("cloud", LAUNCHER)
@pytest.mark.parametrize("spot", [False, True])
def test_the_launcher_takes_what_is_written(cloud, spot, tmp_path):
    autoscaler = pytest.importorskip("ray.autoscaler", reason="needs ray, whose schema it is")
    manifest, commands = written(cloud, tmp_path / "cluster.yaml", spot=spot)
    jsonschema.validate(manifest, json.loads((Path(autoscaler.__file__).parent / "ray-schema.json").read_text()))
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(manifest))  # with the defaults, as `ray up` does
    assert commands["start"].startswith("ray get-auth-token --generate") and "RAY_AUTH_MODE=token" in commands["run"]
    assert commands["start"].endswith(f"ray up --yes {tmp_path / 'cluster.yaml'}")
    assert ("RAY_UP_enable_autoscaler_v2=0" in commands["start"]) == (cloud == "local")
    assert manifest["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    assert "export RAY_AUTH_MODE=token" in manifest["setup_commands"][-1]
    assert "--dashboard-host=127.0.0.1" in manifest["head_start_ray_commands"][-1]
    if cloud != "local":
        assert manifest["available_node_types"]["worker"]["min_workers"] == 2
        assert (
            INSTANCES[cloud][1] in json.dumps(manifest)
            and ("pot" in json.dumps(manifest) or "preempt" in json.dumps(manifest)) == spot
        )


def test_own_machines(tmp_path):
    manifest, _ = written("local", tmp_path / "cluster.yaml", user="me")
    assert manifest["provider"] == {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "10.0.0.3"]}
    assert manifest["auth"] == {"ssh_user": "me"} and "docker" not in manifest


def test_kuberay(tmp_path):
    manifest, commands = written("kuberay", tmp_path / "cluster.yaml", workers=5, cores=4)
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    jsonschema.validate(manifest["spec"], CLUSTER)
    group = manifest["spec"]["workerGroupSpecs"][0]
    assert group["replicas"] == 5 and group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "4"
    assert manifest["spec"]["rayVersion"] == RAY and RAY in IMAGE
    assert "kubectl port-forward" in commands["run"]

    command = "zoo run shop-clicks '/shared/*.parquet' -o /shared/out --on ray --address auto"
    manifest, commands = written(
        "kuberay", tmp_path / "job.yaml", command=command, claim="data", instance="c7i.8xlarge"
    )
    assert manifest["kind"] == "RayJob" and manifest["spec"]["entrypoint"] == command
    jsonschema.validate(manifest["spec"], JOB)
    pod = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "data"
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "c7i.8xlarge"}
    assert yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])["pip"][0].startswith("int8-zoo[ray,train]==")


def test_the_version_of_ray_is_the_one_that_this_project_is_tested_with():
    constraints = (Path(__file__).resolve().parents[4] / "scripts/constraints.txt").read_text().splitlines()
    assert f"ray=={RAY}" in constraints


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cloud": "moon"}, "found the cloud moon"),
        ({"cloud": "aws", "name": "My Cluster"}, "found the name My Cluster"),
        ({"cloud": "aws", "workers": 0}, "found 0 workers"),
        ({"cloud": "aws", "instance": "c7g.4xlarge"}, "is an ARM machine"),
        ({"cloud": "gcp", "instance": "t2a-standard-4", "project": "p"}, "is an ARM machine"),
        ({"cloud": "azure", "instance": "Standard_D16ps_v5"}, "is an ARM machine"),
        ({"cloud": "gcp"}, "needs a project id"),
        ({"cloud": "local", "hosts": ("10.0.0.1",)}, "found 1 hosts, expected 3"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(options, said, tmp_path):
    with pytest.raises(RequestError, match=said):
        cluster_yaml(options.pop("cloud"), tmp_path / "cluster.yaml", **options)
    assert not list(tmp_path.iterdir())
