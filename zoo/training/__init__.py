"""Training runs: output folders, checkpoints and processes (`runs`), settings and their ranges (`settings`), gradient
exchange (`communication`), torch networks in files that load no torch (`lazy_module`), and the writer of ONNX graphs
from torch modules (`onnx_builder`)."""
