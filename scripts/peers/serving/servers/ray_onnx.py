"""Ray Serve before int8.onnx in onnxruntime, one replica; a third word, "batched": batches of 64, waited for 2 ms."""

import signal
import sys
import threading

import ray
from ray import serve
from served_model import ROUTE, answered, answers, stock
from starlette.requests import Request


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=128)
class Served:
    """Answers one request at a time."""

    def __init__(self):
        stock()

    async def __call__(self, request: Request):
        return answered(await request.json(), stock())


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=128)
class Together:
    """Answers requests that wait together."""

    def __init__(self):
        stock()

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002)
    async def compute(self, requests):
        return answers(requests, stock())

    async def __call__(self, request: Request):
        return await self.compute(await request.json())


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    served = Together if sys.argv[2:] == ["batched"] else Served
    serve.run(served.bind(), route_prefix=ROUTE)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()
    ray.shutdown()
