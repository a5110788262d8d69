"""Gradients between two processes over links of 1 and 10 Gbit/s: samples/s, and the exchange's share of a step.

By torch's defaults and as `zoo train --tune-communication` chooses, and estimates for 4 to 128 machines. Each process
has one core and a network namespace of its own (Linux, as root); between them is a pair of virtual devices whose rate
`tc` shapes, or, for a delay, a relay that holds each packet back. Steps are a forward and a backward pass on noise.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import multiprocessing
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core import machine
from pipelines.core.errors import RequestError
from scripts.peers import harness
from scripts.peers.processes import ONE_THREAD

HEAD, OTHER, PORT = "10.99.7.1", "10.99.7.2", 29507
GBIT = 1e9 / 8
LINKS = {"10 Gbit/s": (10 * GBIT, 0.0), "1 Gbit/s": (GBIT, 0.0), "1 Gbit/s, 1 ms": (GBIT, 1e-3)}  # bytes/s, s each way
MODELS = {"resnet26d": "a batch of 8 images, 96 px, each", "transformer-base": "a batch of 12 sentences of 24 each"}
MACHINES = (4, 8, 16, 32, 64, 128)
SEARCH, LIMIT = 60.0, 900  # seconds of a search, and of a pair of processes


# ------------------------------------------------------------------------------------------------------------- a link


@contextlib.contextmanager
def link(rate: float, delay: float) -> Iterator[list[str]]:
    """Links two network namespaces meanwhile.

    Args:
        rate: Bytes/s, each way.
        delay: Seconds, each way.

    Yields:
        Names of the namespaces.

    Raises:
        RequestError: This user or system may not make them.
    """
    names = [f"zoo-{os.getpid()}-{i}" for i in (1, 2)]
    relay = None
    try:
        for name in names:
            _ip("netns", "add", name)
        if delay:
            relay = _relayed(names, rate, delay)
        else:
            _ip("link", "add", "zoo0", "netns", names[0], "type", "veth", "peer", "name", "zoo0", "netns", names[1])
        for name, address in zip(names, (HEAD, OTHER), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "zoo0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "zoo0", "mtu", "65000", "up")
            if not delay:
                shape = ["rate", f"{8 * rate:.0f}bit", "burst", "256k", "latency", "50ms"]
                _run(["tc", "-n", name, "qdisc", "add", "dev", "zoo0", "root", "tbf", *shape])
        yield names
    finally:
        if relay:
            relay.kill()
            relay.join()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        raise RequestError(f"cannot make network namespaces ({said}); needs Linux, root and iproute2") from error


def _relayed(names: list[str], rate: float, delay: float) -> multiprocessing.Process:
    """Makes a device in each namespace and starts a process that carries packets between them."""
    tun_set, flags = 0x400454CA, 0x0001 | 0x1000  # TUNSETIFF, IFF_TUN | IFF_NO_PI of linux/if_tun.h
    devices = []
    try:
        here = os.open("/proc/self/ns/net", os.O_RDONLY)
        for name in names:
            there = os.open(f"/run/netns/{name}", os.O_RDONLY)
            _setns(there)
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, tun_set, struct.pack("16sH22x", b"zoo0", flags))
            _setns(here)
            devices.append(device)
    except OSError as error:
        raise RequestError(f"cannot make a network device ({error})") from error
    process = multiprocessing.get_context("fork").Process(target=_carry, args=(devices, rate, delay), daemon=True)
    process.start()
    for device in devices:
        os.close(device)
    return process


def _setns(there: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).setns(there, 0):  # os.setns is of Python 3.12
        raise OSError(ctypes.get_errno(), "setns")


def _carry(devices: list[int], rate: float, delay: float) -> None:
    waiting: list[tuple[float, int, int, bytes]] = []  # when, a number, to which, the packet
    free, number = [0.0, 0.0], 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # full, or not up yet: lost, as on any link
                os.write(devices[to], packet)
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for ready in select.select(devices, [], [], left)[0]:
            to = 1 - devices.index(ready)
            with contextlib.suppress(BlockingIOError):
                while len(waiting) < 1024:
                    packet = os.read(ready, 65536)
                    free[to] = max(free[to], time.monotonic()) + len(packet) / rate
                    number += 1
                    heapq.heappush(waiting, (free[to] + delay, number, to, packet))


# ------------------------------------------------------------------------------------------------------- two processes


def work(name: str) -> None:
    """Trains on noise in one of two processes; the first prints one line of JSON."""
    import torch
    from torch import nn

    from zoo.training import communication
    from zoo.training.communication import Communication
    from zoo.training.runs import processes

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module
    with processes() as group:
        if name == "resnet26d":
            from zoo.vision.models.resnet import build

            model, inputs = build("resnet26d", 1000), (torch.randn(8, 3, 96, 96),)
            model, samples = model.to(memory_format=torch.channels_last), 8  # type: ignore[call-overload]
        else:
            from zoo.translation.models.transformer import Transformer

            tokens = torch.randint(4, 8000, (12, 24))
            model, inputs, samples = Transformer.of("base", 8000), (tokens, tokens), 12

        def step(wrapped: nn.Module) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=machine.has_bf16()):
                result = wrapped(*inputs)
            torch.autograd.backward(result.float().square().mean())
            wrapped.zero_grad(set_to_none=True)

        communication.SECONDS, start = SEARCH, Communication()
        report = communication.tuned(model, group, step, start, about=name)
        gain, noise = communication.compared(model, group, step, start, Communication("powersgd"), communication.ROUNDS)
        powersgd = {"speedup": round(gain, 3), "noise": round(noise, 3)}
        wrapped, times = start.wrap(model, group), []
        for turn in range(communication.WARM + communication.FINAL):
            times += [communication.step_seconds(group, step, wrapped)] * (turn >= communication.WARM)
        if group.rank == 0:
            weights = sum(weight.numel() for weight in model.parameters())
            report |= {"weights": weights, "samples": samples * group.count, "powersgd": powersgd}
            print(json.dumps(report | {"seconds": round(float(np.median(times)), 4)}), flush=True)


def pair(name: str, spaces: list[str], folder: Path) -> dict[str, Any]:
    """Runs two processes, one in each namespace, each on a core; returns the report of the first."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    processes = []
    for rank, space in enumerate(spaces):
        environment = ONE_THREAD | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": HEAD,
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "zoo0",
            "ZOO_HOME": str(folder),
        }
        command = ["ip", "netns", "exec", space, "taskset", "-c", str(cores[rank % len(cores)])]
        command += [sys.executable, str(harness.ROOT / "scripts" / "peers"), "communication", "--work", name]
        said: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=os.environ | environment, **said))
    try:
        results = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for child in processes:
            child.kill()
    if any(process.returncode for process in processes):
        said = [line for _, errors in results for line in errors.splitlines() if "Error" in line]
        raise RequestError(f"{name} failed: {said[0] if said else results[0][1].strip()[-300:]}")
    return dict(json.loads(results[0][0].splitlines()[-1]))


def scaled(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Estimates the efficiency of more machines, each with the same batch.

    A machine's own step is the time without the exchange. In a ring of n machines, each sends and receives
    2 (n - 1) / n of the gradients, here at the rate of two machines; the same share overlaps with the backward pass.

    Returns:
        [{"machines", "default", "tuned"}].
    """
    lines = []
    ways = [(figures["seconds"], figures["share"][0]), (figures["seconds"] / figures["speedup"], figures["share"][1])]
    for count in MACHINES:
        line: dict[str, Any] = {"machines": count}
        for name, (seconds, part) in zip(("default", "tuned"), ways, strict=True):
            own, exchange = seconds * (1 - part), seconds * part
            line[name] = round(own / (own + exchange * 2 * (count - 1) / count), 3)
        lines.append(line)
    return lines


def compare(name: str) -> dict[str, Any]:
    """Measures one model over all links."""
    results = []
    for title, (rate, delay) in LINKS.items():
        with link(rate, delay) as spaces, tempfile.TemporaryDirectory() as folder:
            figures = pair(name, spaces, Path(folder))
        results.append({"link": title, "rate": rate, "delay": delay, **figures, "efficiency": scaled(figures)})
    return {"model": name, "step": MODELS[name], "links": results}


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.names("models", "model", MODELS)
    parser.add_argument("--work", help="run as one of the two processes, with this model")


def measure(args: Any) -> dict[str, Any] | None:
    """Returns {"models": [`compare`], "environment"}."""
    if args.work:
        work(args.work)
        return None
    environment = machine.environment(cores_used=2, bf16=machine.has_bf16())
    return harness.gather("models", args.models, compare, args.output, environment)
