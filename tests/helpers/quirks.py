"""The smallest graphs that engines compute wrongly, for several test files."""

import numpy as np

from helpers.rewriting import model


def bias_of_the_first_column(sizes="n"):
    """A graph that OpenVINO 2026.4 computes wrongly at static batch sizes up to 8, with one thread.

    See `pipelines.engines.openvino.forms.correct_form`.
    """
    return model(
        f"""(float[{sizes},2] x, float[{sizes},2] v) => (float[{sizes},2] y) {{
            a = Gemm(x, one, first) b = Add(a, v) c = Gemm(b, two, second)
            q = QuantizeLinear(c, step, zero) y = DequantizeLinear(q, step, zero) }}""",
        one=np.eye(2, dtype=np.float32),
        first=np.array([10, 20], np.float32),
        two=2 * np.eye(2, dtype=np.float32),
        second=np.array([3, 4], np.float32),
        step=np.float32(0.5),
        zero=np.uint8(0),
    )
