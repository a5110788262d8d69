"""One pipeline used by many threads, and by a forked process: every engine and task gives each caller its own results."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest

import zoo
from pipelines.engines import catalog, contexts, plan, stock
from pipelines.kernels import extension

pytestmark = pytest.mark.usefixtures("shared_home")

THREADS, CALLS = 8, 40
needs_kernels = pytest.mark.skipif(not extension.isas(), reason="needs the native kernels")
CLICKS = [*stock.STOCK, pytest.param("native", marks=needs_kernels)]


@pytest.fixture
def path(tmp_path):
    """A network that takes long enough for threads to meet in it."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    net (float[n, 256] x) => (float[n, 256] y) { a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) d = Relu(c) y = MatMul(d, w) }""")
    weight = np.random.default_rng(0).normal(0, 0.1, (256, 256)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def batches(count=THREADS):
    random = np.random.default_rng(1)
    return [{"x": random.normal(size=(1 + index % 3, 256)).astype(np.float32)} for index in range(count)]


def each_gets_its_own(call, inputs, same=np.testing.assert_array_equal):
    """`call` in as many threads as there are inputs gives what it gives alone."""
    alone = [call(batch) for batch in inputs]

    def repeat(at):
        for _ in range(CALLS):
            same(call(inputs[at]), alone[at])

    with ThreadPoolExecutor(len(inputs)) as pool:
        list(pool.map(repeat, range(len(inputs))))


def close(found, wanted):  # another batch size of an engine may sum in another order
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("engine", [*stock.STOCK, "auto"])
def test_threads_share_a_session(path, engine):
    session = catalog.load(path, engine)
    each_gets_its_own(lambda batch: session.run(batch)["y"], batches(), close)


def test_threads_share_a_plan(path, tmp_path):
    candidates = [plan.Candidate(engine, "fp32", path) for engine in stock.STOCK]
    plan.build(candidates, [batches()[0], batches()[2]], [1], tmp_path / "net.plan", catalog.load)
    session = catalog.load(tmp_path / "net.plan")
    each_gets_its_own(lambda batch: session.run(batch)["y"], batches(), close)


@pytest.mark.parametrize("engine", CLICKS)
@pytest.mark.parametrize("rows", [1, 60])  # native kernels alone, and with an engine for the layers after them
def test_threads_share_a_click_pipeline(engine, rows):
    pipeline = zoo.pipeline("wide-deep-criteo", engine=engine)
    batch = pipeline.preprocess(pipeline.example(rows * THREADS))
    parts = [{name: array[start::THREADS] for name, array in batch.items()} for start in range(THREADS)]
    each_gets_its_own(lambda part: pipeline.predict(part)["probability"], parts, close)


@pytest.mark.parametrize("engine", ["auto", *stock.STOCK])
def test_threads_share_an_image_pipeline(engine):
    pipeline = zoo.pipeline("mobilenet-v1-cifar10", engine=engine)
    random = np.random.default_rng(0)
    name, (dtype, shape) = next(iter(pipeline.input_ports.items()))
    parts = [{name: random.integers(0, 256, (1 + index % 2, *shape[1:])).astype(dtype)} for index in range(THREADS)]
    each_gets_its_own(lambda part: pipeline.predict(part)["logits"], parts, close)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_a_native_translator(threads):
    pipeline = zoo.pipeline("multi30k-en-de", engine="native", threads=threads)
    texts = [f"{count} children play in the snow." for count in ("Two", "Three", "Four", "Five")]
    alone = [pipeline([text])[0]["translation"] for text in texts]
    with ThreadPoolExecutor(THREADS) as pool:
        translated = list(pool.map(lambda index: pipeline([texts[index % 4]])[0]["translation"], range(40)))
    assert translated == [alone[index % 4] for index in range(40)]


def in_a_child(call) -> int:
    """The exit status of a forked process that calls `call`; a hang is ended after 60 s and gives -SIGALRM."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's own, of forking beside threads
@pytest.mark.parametrize("engine", CLICKS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_process_goes_on_with_a_pipeline(engine, threads):
    pipeline = zoo.pipeline("wide-deep-criteo", engine=engine, threads=threads)
    batch = pipeline.preprocess(pipeline.example(512))
    before = pipeline.predict(batch)["probability"]
    assert in_a_child(lambda: close(pipeline.predict(batch)["probability"], before)) == 0


@needs_kernels
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_contexts_of_its_own():
    pipeline = zoo.pipeline("wide-deep-criteo", engine="native")
    pipeline.session.contexts = 1
    batch = pipeline.preprocess(pipeline.example(8))
    before = pipeline.submit(batch).result()["probability"]

    def again():
        close(pipeline.submit(batch).result(timeout=20)["probability"], before)

    assert in_a_child(again) == 0
    again()  # and the parent keeps its own


@needs_kernels
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_while_a_thread_starts_contexts_starts_its_own():
    pipeline = zoo.pipeline("wide-deep-criteo", engine="native")
    batch, started = pipeline.preprocess(pipeline.example(8)), threading.Event()

    def starting():
        with contexts._STARTING:
            started.set()
            time.sleep(0.1)

    thread = threading.Thread(target=starting)
    thread.start()
    started.wait()
    assert in_a_child(lambda: pipeline.submit(batch).result(timeout=20)) == 0
    thread.join()


@needs_kernels
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_process_goes_on_with_a_native_translator(threads):
    pipeline = zoo.pipeline("multi30k-en-de", engine="native", threads=threads)
    texts = [f"{count} children play in the snow." for count in ("Two", "Three", "Four")] * 30
    before = pipeline(texts)

    def again():
        assert pipeline(texts) == before

    assert in_a_child(again) == 0
