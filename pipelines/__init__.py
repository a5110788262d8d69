"""INT8 quantization, engines and kernels for any model. Knows no model by name and never imports `zoo`."""

import os

os.environ.setdefault(
    "ORT_DISABLE_TELEMETRY", "1"
)  # it would keep an id of the device and count calls; openvino: see `engine`
