"""MLServer with int8.onnx in onnxruntime, in one process, configured by files in its working folder.

`python mlserver_onnx.py PORT` writes them and starts it.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from served_model import NAME, stock


class Served(MLModel):
    """Answers requests that MLServer has parsed."""

    async def load(self) -> bool:
        stock()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        scores = stock()({tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs})
        return InferenceResponse(model_name=NAME, outputs=[NumpyCodec.encode_output("probability", scores)])


if __name__ == "__main__":
    port = int(sys.argv[1])
    folder = Path(tempfile.mkdtemp())
    server = {"http_port": port, "grpc_port": port + 1, "metrics_port": port + 2, "parallel_workers": 0}
    (folder / "settings.json").write_text(json.dumps({**server, "host": "127.0.0.1", "debug": False}))
    (folder / "model-settings.json").write_text(
        json.dumps({"name": NAME, "implementation": "mlserver_onnx.Served", "parameters": {"version": "1"}})
    )
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    command = Path(sys.executable).with_name("mlserver")
    os.execv(command, [str(command), "start", str(folder)])
