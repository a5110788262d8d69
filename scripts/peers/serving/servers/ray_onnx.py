"""Ray Serve before int8.onnx in onnxruntime, one replica; a third word, "batched": batches of 64, waited for 2 ms."""

import signal
import sys
import threading

import ray
from onnx_model import NAME, answered, answers, session
from ray import serve
from starlette.requests import Request


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=128)
class Served:
    """Answers one request at a time."""

    def __init__(self):
        session()

    async def __call__(self, request: Request):
        return answered(await request.json())


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=128)
class Together:
    """Answers requests that wait together."""

    def __init__(self):
        session()

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002)
    async def compute(self, requests):
        return answers(requests)

    async def __call__(self, request: Request):
        return await self.compute(await request.json())


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    served = Together if sys.argv[2:] == ["batched"] else Served
    serve.run(served.bind(), route_prefix=f"/v2/models/{NAME}/infer")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()
    ray.shutdown()
