"""Minutes under load with what goes wrong in production: `soak_serving.py [--minutes 10] [-o report.json]`.

A server of wide-deep-criteo and multi30k-en-de, on one core, is first asked as quickly as it answers, then at 90% of
that rate, from another core: one request in four is a sentence, the others are 1 to 4 rows. Every 20 s one of its two
workers is killed; slow, broken and oversized clients come and go, and such that leave or whose deadline passes amid a
long text. Counts answers that are wrong (other than the model's alone), requests that were accepted and got none, and
the slopes of memory (PSS) and open descriptors of all its processes. Times count from when a request was to be asked.
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
from typing import Any, NamedTuple

import numpy as np

import zoo
from pipelines.core import files
from pipelines.core.machine import environment

CLICKS, TRANSLATION = "wide-deep-criteo", "multi30k-en-de"
CONNECTIONS, STRANGERS, BODY_LIMIT = 64, 4, 1_000_000
ROWS_AMONG = 4  # requests, of which one is a sentence
LOAD, WARM = (
    0.9,
    15.0,
)  # of the greatest rate, which is measured for so many seconds, beside the clients who ask wrongly
KILL_EVERY, SAMPLE_EVERY = 20.0, 5.0
SETTLE = 60.0  # seconds before slopes count


class Question(NamedTuple):
    """A request and the answer that it must get: of each result what is under a key."""

    model: str
    body: bytes
    key: str
    wanted: list[Any]

    def message(self, length: int | None = None, *headers: str) -> bytes:
        kind = "text/tab-separated-values" if self.model == CLICKS else "text/plain"
        size = len(self.body) if length is None else length
        head = [f"POST /v1/models/{self.model}:run HTTP/1.1", "Host: x", f"Content-Type: {kind}", *headers]
        return "\r\n".join([*head, f"Content-Length: {size}", "", ""]).encode() + self.body

    def right(self, answer: bytes) -> bool:
        return [each[self.key] for each in json.loads(answer)["results"]] == self.wanted


def questions() -> tuple[list[Question], list[Question], Question]:
    """Some of rows, some of sentences, and a long text."""
    clicks, translation = (zoo.pipeline(name, engine="native", threads=1) for name in (CLICKS, TRANSLATION))
    lines = [each.rstrip(b"\n") for each in clicks.example(400)]
    rows = []
    for at in range(0, 400, 4):
        some = lines[at : at + 1 + at // 4 % 4]
        found = clicks.predict(clicks.preprocess(some))["probability"].ravel()
        wanted = [float(str(each)) for each in found]
        rows.append(Question(CLICKS, b"\n".join(some) + b"\n", "probability", wanted))
    texts = list(translation.example(200))
    sentences = [
        Question(TRANSLATION, each.encode(), "translation", [translation(each)[0]["translation"]]) for each in texts
    ]
    return rows, sentences, Question(TRANSLATION, "\n".join(texts[:40]).encode(), "translation", [])


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> tuple[int, bytes]:
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    at = head.index(b"content-length:") + 15
    return int(head[9:12]), await reader.readexactly(int(head[at : head.index(b"\r\n", at)]))


class Soak:
    """One run."""

    def __init__(self, port: int, pid: int, rows: list[Question], sentences: list[Question], text: Question) -> None:
        self.port, self.pid, self.rows, self.sentences, self.text = port, pid, rows, sentences, text
        self.times: dict[str, list[float]] = {CLICKS: [], TRANSLATION: []}
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.samples: list[tuple[float, float, int]] = []
        self.killed: list[float] = []
        self.random = random.Random(3)
        self.end, self.never_asked = 0.0, 0

    def open(self) -> Any:
        return asyncio.open_connection("127.0.0.1", self.port)

    # ------------------------------------------------------------------------------------------------- who asks rightly

    async def client(self, tickets: asyncio.Queue[float] | None, end: float) -> None:
        """Asks; at the times of the tickets, if any. A connection that breaks is opened anew."""
        reader, writer = await self.open()
        while (begin := time.monotonic()) < end:
            if tickets is not None and (begin := await tickets.get()) < 0:
                break
            asked = self.random.choice(self.rows if self.random.randrange(ROWS_AMONG) else self.sentences)
            try:
                async with asyncio.timeout(30):
                    status, found = await exchange(reader, writer, asked.message())
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.counts["lost"] += 1
                self.faults.append(f"{begin:.3f} {error!r}")
                writer.close()
                reader, writer = await self.open()
                continue
            self.counts[str(status)] += 1
            if status == 200:
                self.times[asked.model].append(time.monotonic() - begin)
                self.counts["right" if asked.right(found) else "wrong"] += 1
            elif status == 503 and not any(-0.1 <= begin - each <= 10 for each in self.killed):
                self.counts["503 without a killed worker"] += 1
        writer.close()

    # ------------------------------------------------------------------------------------------------- who asks wrongly

    async def stranger(self) -> None:
        """Slow, broken and oversized clients, one after the other."""
        ways = [self.slow, self.gone, self.broken, self.oversized, self.lying, self.leaving, self.expiring]
        while time.monotonic() < self.end:
            way = self.random.choice(ways)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
                await asyncio.wait_for(way(), 15)
            self.counts[f"client: {way.__name__}"] += 1

    async def slow(self) -> None:
        _, writer = await self.open()
        for byte in self.rows[0].message()[:100]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        writer.close()

    async def gone(self) -> None:
        _, writer = await self.open()
        writer.write(self.rows[0].message()[:-10])
        await asyncio.sleep(0.05)
        writer.close()

    async def broken(self) -> None:
        reader, writer = await self.open()
        writer.write(self.random.randbytes(500))
        await reader.read(1000)
        writer.close()

    async def oversized(self) -> None:
        reader, writer = await self.open()
        status, _ = await exchange(reader, writer, self.rows[0].message(BODY_LIMIT * 100))
        self.counts["413" if status == 413 else "oversized, accepted"] += 1
        writer.close()

    async def lying(self) -> None:
        reader, writer = await self.open()
        status, _ = await exchange(reader, writer, Question(CLICKS, b"1\t2\t3\n", "", []).message())
        self.counts["400" if status == 400 else "broken, accepted"] += 1
        writer.close()

    async def leaving(self) -> None:
        _, writer = await self.open()
        asked = self.random.choice([self.rows[0], self.text])
        writer.write(asked.message())
        await asyncio.sleep(self.random.choice([0.0, 0.02]))
        writer.transport.abort()

    async def expiring(self) -> None:
        reader, writer = await self.open()
        status, _ = await exchange(reader, writer, self.text.message(None, "timeout-ms: 10"))
        self.counts["504" if status == 504 else "late, answered"] += 1
        writer.close()

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
        self.end = time.monotonic() + WARM
        strangers = [self.stranger() for _ in range(STRANGERS)]
        await asyncio.gather(*(self.client(None, self.end) for _ in range(CONNECTIONS)), *strangers)
        greatest = self.counts["200"] / WARM
        self.counts.clear()
        self.times = {name: [] for name in self.times}
        rate, tickets = LOAD * greatest, asyncio.Queue[float]()
        begin = time.monotonic()
        self.end = begin + 60 * minutes

        async def pace() -> None:
            given = 0
            while (now := time.monotonic()) < self.end:
                due = int(rate * (now - begin))
                for i in range(given, due):  # what the server does not keep up with is asked later
                    tickets.put_nowait(begin + i / rate)
                given = due
                await asyncio.sleep(0.002)
            self.never_asked = tickets.qsize()
            for _ in range(CONNECTIONS):
                tickets.put_nowait(-1.0)

        clients = [self.client(tickets, self.end) for _ in range(CONNECTIONS)]
        strangers = [self.stranger() for _ in range(STRANGERS)]
        await asyncio.gather(pace(), self.killer(), self.sampler(), *clients, *strangers)
        answered = self.counts["200"] / (60 * minutes)
        return {
            "minutes": minutes,
            "greatest_rate": round(greatest, 1),
            "wanted_rate": round(rate, 1),
            "rate": round(answered, 1),
            "of_greatest": round(answered / greatest, 3),
            "never_asked": self.never_asked,
            "milliseconds": {
                name: dict(zip(("p50", "p99"), (1e3 * np.percentile(each, [50, 99])).round(2).tolist(), strict=True))
                for name, each in self.times.items()
            },
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
    asked, cores = questions(), sorted(os.sched_getaffinity(0))
    words = [
        "serve",
        CLICKS,
        TRANSLATION,
        "--port",
        "0",
        "--workers",
        str(given.workers),
        "--max-body",
        str(BODY_LIMIT),
    ]
    pinned = ["taskset", "-c", str(cores[0]), sys.executable, "-m", "zoo.cli.app", *words]
    server = subprocess.Popen(pinned, stderr=subprocess.PIPE, text=True)
    os.sched_setaffinity(0, {cores[-1]})
    try:
        assert server.stderr is not None
        url = next(found for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:(\d+)$", line)))
        os.set_blocking(server.stderr.fileno(), False)
        report = asyncio.run(Soak(int(url[1]), server.pid, *asked).run(given.minutes))
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
