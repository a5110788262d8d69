"""The links between network namespaces that gradients are measured over."""

import itertools
import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")
from pipelines.core.errors import RequestError
from scripts.peers.distributed import communication

TALK = """
import json, socket, sys, time
address, port = sys.argv[2], 29509
if sys.argv[1] == "serve":
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        with server.accept()[0] as other:
            while data := other.recv(1 << 16):
                other.sendall(data[:1] if len(data) == 1 else b"")
else:
    with socket.create_connection((address, port)) as other:
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        turns = []
        for _ in range(20):
            start = time.perf_counter()
            other.sendall(b"x")
            other.recv(1)
            turns.append(time.perf_counter() - start)
        print(json.dumps(sorted(turns)[10]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("delay", "least"), [(0.0, 0.0), (2e-3, 4e-3)])
def test_a_link_between_namespaces_delays_as_told(delay, least):
    try:
        with communication.link(communication.GBIT, delay) as (one, other):
            command = ["ip", "netns", "exec"]
            serve = [*command, one, sys.executable, "-c", TALK, "serve", communication.HEAD]
            with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout.readline() == "ready\n"
                ask = [*command, other, sys.executable, "-c", TALK, "ask", communication.HEAD]
                said = subprocess.run(ask, capture_output=True, text=True, timeout=60)
                assert said.returncode == 0, said.stderr
                taken = json.loads(said.stdout)
    except RequestError as error:
        pytest.skip(str(error))
    assert least <= taken < least + 0.2
    assert not any(
        one in line for line in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()
    )


def test_more_machines_spend_more_on_the_exchange():
    measured = {"seconds": 1.0, "speedup": 1.25, "share": [0.4, 0.25]}
    lines = communication.scaled(measured)
    assert [line["machines"] for line in lines] == list(communication.MACHINES)
    assert all(one["default"] > other["default"] for one, other in itertools.pairwise(lines))
    assert lines[0]["default"] == pytest.approx(0.6 / (0.6 + 0.4 * 1.5), abs=1e-3)
    assert lines[0]["tuned"] == pytest.approx(0.75 / (0.75 + 0.25 * 1.5), abs=1e-3)
