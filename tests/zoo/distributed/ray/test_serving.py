"""Models behind Ray Serve: the answers of `zoo serve`, models opened as they are asked for."""

import gzip
import json
import socket
import urllib.error
import urllib.request

import pytest

import zoo
from pipelines.core.errors import RequestError
from zoo.distributed.ray.connection import connect
from zoo.distributed.ray.serving import app

pytest.importorskip("ray.serve", reason="needs ray[serve]: pip install 'int8-zoo[ray]'")
pytest.importorskip("orjson", reason="needs the serve extra")
CLICKS, CRITEO = "shop-clicks", "wide-deep-criteo"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "found no model to serve"),
        ({"models": CLICKS, "min_replicas": "3", "max_replicas": "2"}, None),
        ({"models": CLICKS, "min_replicas": 0}, "found 0 to 0 replicas"),
        ({"models": CLICKS, "certfile": "a.pem"}, "found certfile: TLS is that of Ray Serve"),
        ({"models": CLICKS, "threads": "0"}, "threads"),
    ],
)
def test_arguments(arguments, said):
    if said is None:
        assert app(arguments)
    else:
        with pytest.raises(RequestError, match=said):
            app(arguments)


def asked(port: int, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "text/csv"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture(scope="module")
def port(unused_port):
    from ray import serve

    connect(None, 2)
    serve.start(http_options={"host": "127.0.0.1", "port": unused_port}, logging_config={"log_level": "ERROR"})
    yield unused_port
    serve.shutdown()
    import ray

    ray.shutdown()


@pytest.fixture(scope="module")
def unused_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [0, 1])
def test_replicas_answer_as_the_pipeline_does(port, at_once, tmp_path):
    from ray import serve

    serve.run(app({"models": [CLICKS, CRITEO], "max_replicas": 2, "max_models": at_once}), route_prefix="/")
    pipeline = zoo.pipeline(CLICKS, engine="native")
    text = gzip.decompress((zoo.load(CLICKS).path / "sample.csv.gz").read_bytes())
    sample = b"".join(text.splitlines(keepends=True)[:9])
    (tmp_path / "rows.csv").write_bytes(sample)
    for _ in range(2):  # where one is open at a time, the other takes its place
        status, answer = asked(port, f"/v2/models/{CRITEO}/ready")
        assert status == 200
        status, answer = asked(port, f"/v1/models/{CLICKS}:run", sample)
        assert status == 200, answer
        expected = [float(p) for rows in pipeline.rows(str(tmp_path / "rows.csv")) for p in pipeline.score(rows)]
        assert [row["probability"] for row in json.loads(answer)["results"]] == pytest.approx(expected, abs=1e-6)
    assert asked(port, "/v2/models/nothing/ready")[0] == 404
