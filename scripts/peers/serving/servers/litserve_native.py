"""LitServe before the native session: FastAPI, and a process with the model behind queues."""

import sys

import litserve as ls
from layers import ROUTE, answered, model


class Model(ls.LitAPI):
    """Answers requests that LitServe has parsed."""

    def setup(self, device):
        model()

    def predict(self, x):
        return answered(x)


if __name__ == "__main__":
    server = ls.LitServer(Model(api_path=ROUTE), accelerator="cpu")
    server.run(port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
