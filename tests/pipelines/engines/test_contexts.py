"""Asynchronous calls of one session: at once, in order, of the same weights."""

import threading

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.engines.contexts import WAITING, Asynchronous
from pipelines.engines.onnxruntime import OnnxRuntimeSession

pytestmark = pytest.mark.usefixtures("shared_home")


class Meeting(Asynchronous):
    """A session whose calls each wait until another one computes."""

    threads = 1

    def __init__(self, contexts):
        self.contexts, self.barrier = contexts, threading.Barrier(2)

    def run(self, batch):
        self.barrier.wait(timeout=10)
        return {"y": batch["x"] * 2}


class Slow(Asynchronous):
    """A session whose calls end when it is told so; `began` in what order they began."""

    threads = 1

    def __init__(self, contexts):
        self.contexts, self.gate, self.began = contexts, threading.Event(), []

    def run(self, batch):
        self.began.append(int(batch["x"][0]))
        self.gate.wait(10)
        return {"y": batch["x"]}


def batch(value):
    return {"x": np.array([value])}


def test_calls_of_two_contexts_compute_at_once():
    session = Meeting(2)
    futures = [session.submit(batch(i)) for i in range(4)]
    assert [int(future.result(timeout=10)["y"][0]) for future in futures] == [0, 2, 4, 6]


def test_calls_begin_in_their_order_and_too_many_wait_for_room():
    session = Slow(1)
    several = [session.submit(batch(i)) for i in range(1 + WAITING)]
    late = threading.Thread(target=lambda: several.append(session.submit(batch(99))))
    late.start()
    late.join(0.2)
    assert late.is_alive() and len(several) == 1 + WAITING  # there is no room until one is done
    session.gate.set()
    late.join(10)
    assert [int(future.result(10)["y"][0]) for future in several] == [*range(1 + WAITING), 99]
    assert session.began == [*range(1 + WAITING), 99]


def test_a_stream_keeps_its_order_and_does_not_run_ahead():
    session, read = Slow(2), []
    session.gate.set()

    def batches():
        for i in range(20):
            read.append(i)
            yield batch(i)

    results = session.map(batches())
    assert int(next(results)["y"][0]) == 0 and len(read) == 3
    assert [int(result["y"][0]) for result in results] == list(range(1, 20))


def test_a_call_that_fails_raises_in_its_future_and_leaves_its_room():
    pipeline = zoo.pipeline("wide-deep-criteo", engine="onnxruntime")
    session = pipeline.session
    assert isinstance(session, OnnxRuntimeSession)
    bad = [session.submit({"ids": np.zeros((1, 3), np.int32)}) for _ in range(30)]
    assert all(isinstance(future.exception(10), RequestError) for future in bad)
    with pytest.raises(RequestError, match="contexts is -1"):
        Meeting(-1).submit(batch(1))


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "auto"])
def test_what_contexts_compute_is_what_one_call_after_the_other_does(engine):
    pipeline = zoo.pipeline("wide-deep-criteo", engine=engine, batch_size=64)
    pipeline.session.contexts = 2
    several = [pipeline.preprocess(pipeline.example(64))] * 6
    wanted = [pipeline.predict(feeds)["probability"] for feeds in several]
    scores = [outputs["probability"] for outputs in pipeline.session.map(several)]
    assert all(np.array_equal(a, b) for a, b in zip(scores, wanted, strict=True))
    assert np.array_equal(pipeline.submit(several[0]).result()["probability"], wanted[0])
    with pytest.raises(RequestError, match="more samples than the batch size"):
        pipeline.submit({name: np.concatenate([array] * 2) for name, array in several[0].items()})
