"""KServe's Python SDK before int8.onnx in onnxruntime."""

import logging
import sys

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from served_model import NAME, stock


class Served(Model):
    """Answers requests that KServe has parsed."""

    def __init__(self):
        super().__init__(NAME)
        stock()
        self.ready = True

    def predict(self, payload: InferRequest, headers=None, response_headers=None):
        scores = stock()({tensor.name: tensor.as_numpy() for tensor in payload.inputs})
        output = InferOutput("probability", list(scores.shape), "FP32")
        output.set_data_from_numpy(scores, binary_data=False)
        return InferResponse(payload.id or "", NAME, [output])


if __name__ == "__main__":
    logging.disable(logging.INFO)
    ModelServer(http_port=int(sys.argv[1]), enable_grpc=False, workers=1, access_log_format=None).start([Served()])
