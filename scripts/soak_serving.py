"""Minutes under load with what goes wrong in production: `soak_serving.py [--minutes 10] [-o report.json]`.

A server of wide-deep-criteo is first asked as quickly as it answers, then at 90% of that rate. Every 20 s one of its
workers is killed; slow, broken and oversized clients come and go. Counts answers that are wrong, requests that were
accepted and got none, and the slopes of memory (PSS) and open descriptors of all its processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core import files
from pipelines.core.machine import environment

MODEL, PATH = "wide-deep-criteo", "/v1/models/wide-deep-criteo:run"
CONNECTIONS, BODY_LIMIT = 64, 1_000_000
KILL_EVERY, SAMPLE_EVERY = 20.0, 5.0
SETTLE = 60.0  # seconds before slopes count


def request(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: text/tab-separated-values\r\nContent-Length: {size}\r\n\r\n"
    )
    return head.encode() + body


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> tuple[int, bytes]:
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    at = head.index(b"content-length:") + 15
    return int(head[9:12]), await reader.readexactly(int(head[at : head.index(b"\r\n", at)]))


class Soak:
    """One run. rows: bodies and the answers that they must get."""

    def __init__(self, port: int, pid: int, rows: list[tuple[bytes, list[float]]]) -> None:
        self.port, self.pid, self.rows = port, pid, rows
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.samples: list[tuple[float, float, int]] = []
        self.killed: list[float] = []
        self.random = random.Random(3)
        self.end = 0.0

    def open(self) -> Any:
        return asyncio.open_connection("127.0.0.1", self.port)

    # ------------------------------------------------------------------------------------------------- who asks rightly

    async def client(self, tickets: asyncio.Queue[int] | None, end: float) -> None:
        """Asks; at the pace of the tickets, if any. A connection that breaks is opened anew."""
        reader, writer = await self.open()
        while time.monotonic() < end:
            if tickets is not None:
                try:
                    await asyncio.wait_for(tickets.get(), 1.0)
                except TimeoutError:
                    continue
            body, wanted = self.rows[self.random.randrange(len(self.rows))]
            begin = time.monotonic()
            try:
                status, found = await asyncio.wait_for(exchange(reader, writer, request(body)), 30)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.counts["lost"] += 1
                self.faults.append(f"{begin:.3f} {error!r}")
                writer.close()
                reader, writer = await self.open()
                continue
            self.counts[str(status)] += 1
            if status == 200:
                right = [each["probability"] for each in json.loads(found)["results"]] == wanted
                self.counts["right" if right else "wrong"] += 1
            elif status == 503 and not any(-0.1 <= begin - each <= 10 for each in self.killed):
                self.counts["503 without a killed worker"] += 1
        writer.close()

    # ------------------------------------------------------------------------------------------------- who asks wrongly

    async def stranger(self) -> None:
        """Slow, broken and oversized clients, one after the other."""
        ways = [self.slow, self.gone, self.broken, self.oversized, self.lying, self.leaving]
        while time.monotonic() < self.end:
            way = self.random.choice(ways)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
                await asyncio.wait_for(way(), 15)
            self.counts[f"client: {way.__name__}"] += 1

    async def slow(self) -> None:
        _, writer = await self.open()
        for byte in request(self.rows[0][0])[:100]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        writer.close()

    async def gone(self) -> None:
        _, writer = await self.open()
        writer.write(request(self.rows[0][0])[:-10])
        await asyncio.sleep(0.05)
        writer.close()

    async def broken(self) -> None:
        reader, writer = await self.open()
        writer.write(self.random.randbytes(500))
        await reader.read(1000)
        writer.close()

    async def oversized(self) -> None:
        reader, writer = await self.open()
        status, _ = await exchange(reader, writer, request(b"x" * 100, BODY_LIMIT * 100))
        self.counts["413" if status == 413 else "oversized, accepted"] += 1
        writer.close()

    async def lying(self) -> None:
        reader, writer = await self.open()
        status, _ = await exchange(reader, writer, request(b"1\t2\t3\n"))
        self.counts["400" if status == 400 else "broken, accepted"] += 1
        writer.close()

    async def leaving(self) -> None:
        _, writer = await self.open()
        writer.write(request(self.rows[0][0]))
        writer.transport.abort()

    # ------------------------------------------------------------------------------------------------------- the server

    def processes(self) -> list[int]:
        found, todo = [], [self.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    todo += map(int, path.read_text().split())
        return found

    async def killer(self) -> None:
        while time.monotonic() < self.end - KILL_EVERY:
            await asyncio.sleep(KILL_EVERY)
            keeper = next(each for each in self.processes() if each != self.pid and self._children(each))
            self.killed.append(time.monotonic())
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.random.choice(self._children(keeper)), signal.SIGKILL)

    @staticmethod
    def _children(pid: int) -> list[int]:
        return [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]

    async def sampler(self) -> None:
        begin = time.monotonic()
        while time.monotonic() < self.end:
            memory, descriptors = 0.0, 0
            for pid in self.processes():
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                    memory += int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1]) * 1024 / 1e6  # type: ignore[index]
                    descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            self.samples.append((time.monotonic() - begin, memory, descriptors))
            await asyncio.sleep(SAMPLE_EVERY)

    async def run(self, minutes: float) -> dict[str, Any]:
        begin = time.monotonic()
        await asyncio.gather(*(self.client(None, begin + 8) for _ in range(CONNECTIONS)))
        greatest = self.counts["200"] / (time.monotonic() - begin)
        self.counts.clear()
        rate, tickets = 0.9 * greatest, asyncio.Queue[int]()
        begin = time.monotonic()
        self.end = begin + 60 * minutes

        async def pace() -> None:
            given = 0
            while (now := time.monotonic()) < self.end:
                due = int(rate * (now - begin))
                for _ in range(due - given):  # what the server does not keep up with is asked later
                    tickets.put_nowait(0)
                given = due
                await asyncio.sleep(0.002)

        clients = [self.client(tickets, self.end) for _ in range(CONNECTIONS)]
        strangers = [self.stranger() for _ in range(4)]
        await asyncio.gather(pace(), self.killer(), self.sampler(), *clients, *strangers)
        return {
            "minutes": minutes,
            "greatest_rate": round(greatest, 1),
            "wanted_rate": round(rate, 1),
            "rate": round(self.counts["200"] / (time.monotonic() - begin), 1),
            "of_greatest": round(self.counts["200"] / (time.monotonic() - begin) / greatest, 3),
            "never_asked": tickets.qsize(),
            "counts": dict(sorted(self.counts.items())),
            "workers_killed": len(self.killed),
            "faults": self.faults[:20],
            **self._slopes(),
        }

    def _slopes(self) -> dict[str, Any]:
        settled = [each for each in self.samples if each[0] >= min(SETTLE, self.samples[-1][0] / 2)]
        at, memory, descriptors = np.array(settled).T
        return {
            "memory_mb": {
                "first": round(float(memory[0]), 1),
                "last": round(float(memory[-1]), 1),
                "slope_per_minute": round(60 * float(np.polyfit(at, memory, 1)[0]), 3),
            },
            "descriptors": {
                "least": int(descriptors.min()),
                "most": int(descriptors.max()),
                "slope_per_minute": round(60 * float(np.polyfit(at, descriptors, 1)[0]), 3),
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("-o", "--output")
    given = parser.parse_args()
    model = zoo.pipeline(MODEL, engine="native")
    lines = [each.rstrip(b"\n") for each in model.example(400)]
    rows = []
    for at in range(0, 400, 4):
        some = lines[at : at + 1 + at % 4]
        found = model.predict(model.preprocess(some))["probability"].ravel()
        rows.append((b"\n".join(some) + b"\n", [float(str(each)) for each in found]))
    words = ["serve", MODEL, "--port", "0", "--workers", str(given.workers), "--max-body", str(BODY_LIMIT)]
    server = subprocess.Popen([sys.executable, "-m", "zoo.cli", *words], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(found for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:(\d+)$", line)))
        os.set_blocking(server.stderr.fileno(), False)
        report = asyncio.run(Soak(int(url[1]), server.pid, rows).run(given.minutes))
        server.terminate()
        report["exit"] = server.wait(60)
    finally:
        if server.poll() is None:
            server.kill()
    report["environment"] = environment(workers=given.workers)
    if given.output:
        files.write_json(given.output, report)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
