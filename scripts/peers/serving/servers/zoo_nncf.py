"""`zoo serve` with a model that NNCF quantized, which OpenVINO alone runs: PORT MODEL XML."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import zoo
from scripts.peers.engines import open_vino
from zoo.cli import app

port, model, xml = sys.argv[1:]
opened = zoo.pipeline


class NncfSession:
    """Session of OpenVINO as a pipeline's; shapes are static, which is faster."""

    def __init__(self, session: Any) -> None:
        self.stock = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    @cache  # noqa: B019 (one session lives as long as the process)
    def request(self, size: int) -> Any:
        """Returns a request for batches of `size` samples."""
        import openvino as ov

        graph = ov.Core().read_model(xml)
        shapes = {port.any_name: [size, port.partial_shape[1].get_length()] for port in graph.inputs}
        return open_vino.infer_request(graph, shapes)

    def run(self, batch: Any) -> dict[str, Any]:
        """Computes the outputs of a batch."""
        results = self.request(len(next(iter(batch.values())))).infer(dict(batch), share_inputs=True)
        return {output.any_name: array for output, array in results.items()}


def pipeline(*arguments: Any, **options: Any) -> Any:
    """Opens a pipeline on OpenVINO and exchanges its session."""
    made = opened(*arguments, **options)
    made._session = NncfSession(made.session)
    return made


zoo.pipeline = pipeline
app.call(["serve", model, "--engine", "openvino", "--port", port, "--workers", "1"])
