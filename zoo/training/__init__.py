"""Training runs: settings, output folders, checkpoints and processes (`runs`), gradient exchange (`communication`), and
the writer of ONNX graphs from torch modules (`onnx_builder`)."""
