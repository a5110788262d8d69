"""A server under load for minutes while workers are killed and clients misbehave.

A server of wide-deep-criteo and multi30k-en-de, on one core, first gets requests as quickly as it answers, then at 90%
of that rate, from another core: one request in four is a sentence, the others are 1 to 4 rows. Every 20 s one of its
two workers is killed; slow, broken and oversized clients come and go, also clients that leave or whose deadline passes
amid a long text. The report counts wrong answers (other than the model's own) and accepted requests without an answer,
and has the slopes of memory (PSS) and open descriptors of all processes of the server. Times count from when a request
was due.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import zoo
from pipelines.core.machine import environment
from scripts.peers import harness
from scripts.peers.processes import memory_mb, session_members
from scripts.peers.serving.load import Request, exchange
from scripts.peers.serving.server import CLICKS, CORES, TEXT, TSV, Server, running

TRANSLATION = "multi30k-en-de"
CONNECTIONS, STRANGERS, BODY_LIMIT = 64, 4, 1_000_000
ROWS_AMONG = 4  # requests, of which one is a sentence
LOAD = 0.9  # share of the greatest rate
WARM = 15.0  # seconds for which the greatest rate is measured, beside the misbehaving clients
KILL_EVERY, SAMPLE_EVERY = 20.0, 5.0
SETTLE = 60.0  # seconds before slopes count
STOP_SECONDS = 60.0


class Question(NamedTuple):
    """A request to a model, and the values of `key` that its results must have."""

    model: str
    body: bytes
    key: str
    expected: list[Any]

    @property
    def request(self) -> Request:
        """The request."""
        return Request(f"/v1/models/{self.model}:run", TSV if self.model == CLICKS else TEXT, self.body)

    def right(self, answer: bytes) -> bool:
        """Returns whether a response has the expected results."""
        return [result[self.key] for result in json.loads(answer)["results"]] == self.expected


def questions() -> tuple[list[Question], list[Question], Question]:
    """Returns requests of rows, requests of sentences, and a long text."""
    clicks, translation = (zoo.pipeline(name, engine="native", threads=1) for name in (CLICKS, TRANSLATION))
    lines = [line.rstrip(b"\n") for line in clicks.example(400)]
    rows = []
    for start in range(0, 400, 4):
        chunk = lines[start : start + 1 + start // 4 % 4]
        scores = clicks.predict(clicks.preprocess(chunk))["probability"].ravel()
        expected = [float(str(score)) for score in scores]
        rows.append(Question(CLICKS, b"\n".join(chunk) + b"\n", "probability", expected))
    texts = list(translation.example(200))
    sentences = [
        Question(TRANSLATION, text.encode(), "translation", [translation(text)[0]["translation"]]) for text in texts
    ]
    return rows, sentences, Question(TRANSLATION, "\n".join(texts[:40]).encode(), "translation", [])


class Soak:
    """A run of the load, the misbehaving clients and the killer against one server."""

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
        """Opens a connection."""
        return asyncio.open_connection("127.0.0.1", self.port)

    # --------------------------------------------------------------------------------------------- well-behaved clients

    async def client(self, tickets: asyncio.Queue[float] | None, end: float) -> None:
        """Sends requests, at the times of the tickets if there are any. A broken connection is replaced."""
        reader, writer = await self.open()
        while (begin := time.monotonic()) < end:
            if tickets is not None and (begin := await tickets.get()) < 0:
                break
            asked = self.random.choice(self.rows if self.random.randrange(ROWS_AMONG) else self.sentences)
            try:
                async with asyncio.timeout(30):
                    status, answer = await exchange(reader, writer, asked.request.message())
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.counts["lost"] += 1
                self.faults.append(f"{begin:.3f} {error!r}")
                writer.close()
                reader, writer = await self.open()
                continue
            self.counts[str(status)] += 1
            if status == 200:
                self.times[asked.model].append(time.monotonic() - begin)
                self.counts["right" if asked.right(answer) else "wrong"] += 1
            elif status == 503 and not any(-0.1 <= begin - moment <= 10 for moment in self.killed):
                self.counts["503 without a killed worker"] += 1
        writer.close()

    # ---------------------------------------------------------------------------------------------- misbehaving clients

    async def stranger(self) -> None:
        """Runs misbehaving clients, one after the other."""
        ways = [self.slow, self.gone, self.broken, self.oversized, self.lying, self.leaving, self.expiring]
        while time.monotonic() < self.end:
            way = self.random.choice(ways)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
                await asyncio.wait_for(way(), 15)
            self.counts[f"client: {way.__name__}"] += 1

    async def slow(self) -> None:
        """Sends a request byte by byte, and leaves."""
        _, writer = await self.open()
        for byte in self.rows[0].request.message()[:100]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        writer.close()

    async def gone(self) -> None:
        """Leaves before the end of a request."""
        _, writer = await self.open()
        writer.write(self.rows[0].request.message()[:-10])
        await asyncio.sleep(0.05)
        writer.close()

    async def broken(self) -> None:
        """Sends random bytes."""
        reader, writer = await self.open()
        writer.write(self.random.randbytes(500))
        await reader.read(1000)
        writer.close()

    async def oversized(self) -> None:
        """States a body over the limit."""
        reader, writer = await self.open()
        status, _ = await exchange(reader, writer, self.rows[0].request.message(length=BODY_LIMIT * 100))
        self.counts["413" if status == 413 else "oversized, accepted"] += 1
        writer.close()

    async def lying(self) -> None:
        """Sends a row without most of its columns."""
        reader, writer = await self.open()
        status, _ = await exchange(reader, writer, Question(CLICKS, b"1\t2\t3\n", "", []).request.message())
        self.counts["400" if status == 400 else "broken, accepted"] += 1
        writer.close()

    async def leaving(self) -> None:
        """Leaves before the response."""
        _, writer = await self.open()
        asked = self.random.choice([self.rows[0], self.text])
        writer.write(asked.request.message())
        await asyncio.sleep(self.random.choice([0.0, 0.02]))
        writer.transport.abort()

    async def expiring(self) -> None:
        """Sends a long text with a short deadline."""
        reader, writer = await self.open()
        status, _ = await exchange(reader, writer, self.text.request.message("timeout-ms: 10"))
        self.counts["504" if status == 504 else "late, answered"] += 1
        writer.close()

    # ------------------------------------------------------------------------------------------------------- the server

    async def killer(self) -> None:
        """Kills a worker of the server every `KILL_EVERY` seconds."""
        while time.monotonic() < self.end - KILL_EVERY:
            await asyncio.sleep(KILL_EVERY)
            parent = next(pid for pid in session_members(self.pid) if pid != self.pid and self._children(pid))
            self.killed.append(time.monotonic())
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.random.choice(self._children(parent)), signal.SIGKILL)

    @staticmethod
    def _children(pid: int) -> list[int]:
        return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]

    async def sampler(self) -> None:
        """Records memory and descriptors every `SAMPLE_EVERY` seconds."""
        begin = time.monotonic()
        while time.monotonic() < self.end:
            memory, descriptors = 0.0, 0
            for pid in session_members(self.pid):
                memory += memory_mb("Pss", pid)
                with contextlib.suppress(OSError):
                    descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            self.samples.append((time.monotonic() - begin, memory, descriptors))
            await asyncio.sleep(SAMPLE_EVERY)

    async def run(self, minutes: float) -> dict[str, Any]:
        """Runs the load and returns the figures."""
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
            sent = 0
            while (now := time.monotonic()) < self.end:
                due = int(rate * (now - begin))
                for i in range(sent, due):  # what the server does not keep up with is asked later
                    tickets.put_nowait(begin + i / rate)
                sent = due
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
                name: dict(zip(("p50", "p99"), (1e3 * np.percentile(seconds, [50, 99])).round(2).tolist(), strict=True))
                for name, seconds in self.times.items()
            },
            "counts": dict(sorted(self.counts.items())),
            "workers_killed": len(self.killed),
            "faults": self.faults[:20],
            **self._slopes(),
        }

    def _slopes(self) -> dict[str, Any]:
        settled = [sample for sample in self.samples if sample[0] >= min(SETTLE, self.samples[-1][0] / 2)]
        seconds, memory, descriptors = np.array(settled).T
        return {
            "memory_mb": {
                "first": round(float(memory[0]), 1),
                "last": round(float(memory[-1]), 1),
                "slope_per_minute": round(60 * float(np.polyfit(seconds, memory, 1)[0]), 3),
            },
            "descriptors": {
                "least": int(descriptors.min()),
                "most": int(descriptors.max()),
                "slope_per_minute": round(60 * float(np.polyfit(seconds, descriptors, 1)[0]), 3),
            },
        }


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.count("--workers", 2, "workers of the server")


def measure(args: Any) -> dict[str, Any]:
    """Returns the figures of `Soak.run`, "exit" and "environment"."""
    asked = questions()
    words = (CLICKS, TRANSLATION, "--workers", str(args.workers), "--max-body", str(BODY_LIMIT))
    server, first = Server("zoo serve", "", words, "int8-zoo"), asked[0][0]
    os.sched_setaffinity(0, {CORES[-1]})
    with running(server, Path(), first.request, STOP_SECONDS) as live:
        figures = asyncio.run(Soak(live.port, live.process.pid, *asked).run(args.minutes))
    return {**figures, "exit": live.stop["exit"], "environment": environment(workers=args.workers)}
