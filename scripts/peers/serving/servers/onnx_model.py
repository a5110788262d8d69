"""int8.onnx in onnxruntime as users of the peers open it: one thread, requests of the Open Inference Protocol."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort

NAME = os.environ.get("ZOO_MODEL", "wide-deep-criteo")
DTYPES = {"INT32": np.int32, "FP32": np.float32}


@cache
def session() -> ort.InferenceSession:
    """The model, opened once in a process."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(os.environ["ZOO_INT8"], options, providers=["CPUExecutionProvider"])


def arrays(request: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a request."""
    return {
        each["name"]: np.array(each["data"], DTYPES[each["datatype"]]).reshape(each["shape"])
        for each in request["inputs"]
    }


def response(found: Any) -> dict[str, Any]:
    """The response with the probabilities of a request."""
    output = {"name": "probability", "datatype": "FP32", "shape": list(found.shape), "data": found.ravel().tolist()}
    return {"model_name": NAME, "outputs": [output]}


def answers(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The responses to some requests, computed together."""
    batch = [arrays(each) for each in requests]
    feed = {name: np.concatenate([each[name] for each in batch]) for name in batch[0]}
    found = session().run(["probability"], feed)[0]
    ends = np.cumsum([len(next(iter(each.values()))) for each in batch])
    return [response(each) for each in np.split(found, ends[:-1])]


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """A request -> its response."""
    return response(session().run(["probability"], arrays(request))[0])
