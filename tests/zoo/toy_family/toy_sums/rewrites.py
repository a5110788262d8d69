"""Nothing but the shared passes."""

from pipelines.rewrites.shared import SHARED


def passes(preprocessing=None):
    """The passes from fp32.onnx to rewritten.onnx, in order."""
    return [each() for each in SHARED]
