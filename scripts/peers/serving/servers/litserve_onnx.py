"""LitServe before int8.onnx in onnxruntime; a third word "batched": batches of up to 64, waited for 2 ms."""

import sys

import litserve as ls
from onnx_model import NAME, answered, answers, session

BATCHED = sys.argv[2:] == ["batched"]


class Model(ls.LitAPI):
    """Answers requests that LitServe has parsed."""

    def setup(self, device):
        session()

    def predict(self, x):
        return answers(x) if isinstance(x, list) else answered(x)


class Together(Model):
    """Answers requests that wait together."""

    def batch(self, inputs):
        return inputs

    def unbatch(self, output):
        return output


if __name__ == "__main__":
    path = f"/v2/models/{NAME}/infer"
    api = Together(api_path=path, max_batch_size=64, batch_timeout=0.002) if BATCHED else Model(api_path=path)
    server = ls.LitServer(api, accelerator="cpu")
    server.run(port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
