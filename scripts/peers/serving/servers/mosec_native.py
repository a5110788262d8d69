"""Mosec before the native session: a front end in Rust, the model in a process of its own, batches of up to 64."""

from __future__ import annotations

import sys

from mosec import Server, Worker
from served_model import ROUTE, answer, native


class Model(Worker):
    """Answers bodies."""

    def __init__(self) -> None:
        super().__init__()
        native()

    def deserialize(self, data: bytes) -> bytes:
        return data

    def serialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: list[bytes]) -> list[bytes]:
        return [answer(body) for body in data]


if __name__ == "__main__":
    sys.argv = [sys.argv[0], "--port", sys.argv[1], "--log-level", "warning"]
    server = Server()
    server.append_worker(Model, num=1, max_batch_size=64, max_wait_time=1, route=ROUTE)
    server.run()
