"""The files for containers: they say what the command takes, and no more than it does.

KServe's schema is not copied here: $KSERVE_CRD names a serving.kserve.io_servingruntimes.yaml of KServe's config/crd.
"""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from zoo.cli.app import cli

yaml = pytest.importorskip("yaml", reason="the runtime is YAML")
DEPLOY = Path(__file__).parents[3] / "deploy"


def words(text: str, instruction: str) -> list[str]:
    """The last JSON list of an instruction."""
    command: list[str] = json.loads(re.findall(rf"^{instruction} (\[.*\])$", text, re.M)[-1])
    return command


@pytest.fixture
def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


@pytest.fixture
def runtime() -> Any:
    return yaml.safe_load((DEPLOY / "kserve.yaml").read_text())


def told(arguments: list[str]) -> dict[str, Any]:
    """What `zoo` makes of the words of a command."""
    assert arguments[:2] == ["zoo", "serve"]
    return cli.commands["serve"].make_context("serve", arguments[2:]).params


def test_the_image_starts_a_server_that_its_health_check_asks(dockerfile: str) -> None:
    options = told([*words(dockerfile, "ENTRYPOINT"), *words(dockerfile, "CMD")])
    assert options["host"] == "0.0.0.0"
    port = re.search(r"http://127\.0\.0\.1:(\d+)(\S+?)'", dockerfile)
    assert port is not None
    assert int(port[1]) == options["port"] == int(re.search(r"^EXPOSE (\d+)$", dockerfile, re.M)[1])
    from zoo.serving.http.router import Router  # its routes hold the path

    assert port[2] in Path(Router.__init__.__code__.co_filename).read_text()


def test_the_image_runs_as_nobody_in_particular(dockerfile: str) -> None:
    last = dockerfile.rpartition("FROM ")[2]
    user = re.findall(r"^USER (\S+)$", last, re.M)
    assert user and user[-1].isdecimal() and int(user[-1]) > 0
    assert last.rindex("\nUSER") > last.rindex("\nRUN")  # nothing is installed by the user that serves
    # OpenShift runs it as any user of group 0
    assert "chmod g=u /home/zoo && install -d -o zoo -g 0 -m 775 /home/zoo/cache" in last


def test_everything_that_is_copied_is_there_and_not_ignored(dockerfile: str) -> None:
    root = DEPLOY.parent
    kept = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.M):
        for source in shlex.split(line)[:-1]:
            assert (root / source).exists()
            assert source in kept


def test_the_runtime_starts_the_image_with_words_it_takes(runtime: Any, dockerfile: str) -> None:
    container = runtime["spec"]["containers"][0]
    options = told([*words(dockerfile, "ENTRYPOINT"), *container["args"]])
    assert options["port"] == container["ports"][0]["containerPort"] == container["readinessProbe"]["httpGet"]["port"]
    assert options["models"] == ("/mnt/models",)
    assert f"-t {container['image']} " in dockerfile
    user = container["securityContext"]["runAsUser"]
    assert f"\nUSER {user}\n" in dockerfile
    assert runtime["spec"]["protocolVersions"] == ["v2"]


def test_the_runtime_is_one_by_kserves_schema(runtime: Any) -> None:
    if "KSERVE_CRD" not in os.environ:
        pytest.skip("$KSERVE_CRD names no serving.kserve.io_servingruntimes.yaml of KServe's config/crd")
    import jsonschema

    (version,) = yaml.safe_load(Path(os.environ["KSERVE_CRD"]).read_text())["spec"]["versions"]
    schema = _closed(version["schema"]["openAPIV3Schema"])
    jsonschema.validate(runtime, schema)
    broken = json.loads(json.dumps(runtime))
    broken["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


def _closed(schema: Any) -> Any:
    """The schema, in which unknown keys are faults, as `kubectl apply` has it; metadata is Kubernetes' own."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if closed.pop("x-kubernetes-int-or-string", False):
        closed.pop("type", None)
    if isinstance(closed.get("properties"), dict) and "type" in closed:
        closed.setdefault("additionalProperties", False)
    if isinstance(closed.get("properties"), dict) and isinstance(closed["properties"].get("metadata"), dict):
        closed["properties"]["metadata"] = {"type": "object"}
    return closed
