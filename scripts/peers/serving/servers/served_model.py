"""The model behind every server, and requests of the Open Inference Protocol.

Two engines compute it on one thread: `native`, the native session of this project, and `stock`, int8.onnx in
onnxruntime as users of the peers open it (this project need not be installed).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

NAME = os.environ.get("ZOO_MODEL", "wide-deep-criteo")
ROUTE = f"/v2/models/{NAME}/infer"
DTYPES = {"INT32": np.int32, "FP32": np.float32}
Run = Callable[[dict[str, Any]], Any]  # inputs by name -> probabilities


@cache
def native() -> Run:
    """Returns the native session, opened once in a process."""
    import zoo

    pipeline = zoo.pipeline(NAME, precision="int8", engine="native", threads=1)
    return lambda batch: pipeline.predict(batch)["probability"]


@cache
def stock() -> Run:
    """Returns the session of onnxruntime, opened once in a process."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(os.environ["ZOO_INT8"], options, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(["probability"], batch)[0]


def arrays(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a request."""
    return {
        tensor["name"]: np.array(tensor["data"], DTYPES[tensor["datatype"]]).reshape(tensor["shape"])
        for tensor in request["inputs"]
    }


def response(scores: Any) -> dict[str, Any]:
    """Returns the response with the probabilities of a request."""
    output = {"name": "probability", "datatype": "FP32", "shape": list(scores.shape), "data": scores.ravel().tolist()}
    return {"model_name": NAME, "outputs": [output]}


def answered(request: dict[str, Any], run: Run) -> dict[str, Any]:
    """Returns the response to a request."""
    return response(run(arrays(request)))


def answers(requests: list[dict[str, Any]], run: Run) -> list[dict[str, Any]]:
    """Returns the responses to several requests, computed together."""
    batches = [arrays(request) for request in requests]
    scores = run({name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]})
    ends = np.cumsum([len(next(iter(batch.values()))) for batch in batches])
    return [response(part) for part in np.split(scores, ends[:-1])]


def answer(body: bytes) -> bytes:
    """Returns the native session's response to a request, from bytes to bytes."""
    return json.dumps(answered(json.loads(body), native())).encode()
