"""The fork server lets go of models that were replaced."""

from __future__ import annotations

import gc
import socket
import weakref
from dataclasses import dataclass
from typing import Any

from zoo.serving.workers import forkserver
from zoo.serving.workers.model_loader import ServedModel


class Ring:
    """An object in a cycle."""

    def __init__(self) -> None:
        self.itself = self


@dataclass
class Cyclic(ServedModel):
    """A model whose handler is in a cycle, as pipelines are with their sessions."""

    def prepare(self) -> None:
        handler: Any = Ring()
        self._handler = handler


def test_a_model_that_is_replaced_is_freed_though_a_fork_froze_it() -> None:
    models: dict[str, ServedModel] = {}
    channel, other = socket.socketpair()
    with channel, other:
        assert forkserver._load(channel, models, {"m": Cyclic("m", "m")})
        gc.freeze()
        before = weakref.ref(models["m"]._handler)  # type: ignore[arg-type]
        assert forkserver._load(channel, models, {"m": Cyclic("m", "m", version="2")})
        assert before() is None and models["m"].version == "2"
