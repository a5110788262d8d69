"""LitServe, a process with the model behind queues: `python litserve_model.py PORT [native|onnx|batched]`.

native (the default): the native session; onnx: int8.onnx in onnxruntime; batched: the same in batches of up to 64,
collected for 2 ms.
"""

import sys

import litserve as ls
from served_model import ROUTE, answered, answers, native, stock

KIND = (*sys.argv[2:], "native")[0]


class Model(ls.LitAPI):
    """Answers requests that LitServe has parsed."""

    def setup(self, device):
        self.run = native() if KIND == "native" else stock()

    def predict(self, x):
        return answers(x, self.run) if isinstance(x, list) else answered(x, self.run)


class Together(Model):
    """Answers requests that wait together."""

    def batch(self, inputs):
        return inputs

    def unbatch(self, output):
        return output


if __name__ == "__main__":
    batched = {"max_batch_size": 64, "batch_timeout": 0.002}
    api = Together(api_path=ROUTE, **batched) if KIND == "batched" else Model(api_path=ROUTE)
    server = ls.LitServer(api, accelerator="cpu")
    server.run(port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
