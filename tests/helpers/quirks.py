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


def rows_that_attend():
    """A graph whose samples depend on each other: the rows of x attend to each other, so that no batch may be padded."""
    return model(
        """(float[n,4] x) => (float[n,4] y) {
            t = Transpose<perm=[1,0]>(x) s = MatMul(x, t) w = Softmax<axis=1>(s) y = MatMul(w, x) }"""
    )


def time_first():
    """A recurrent layer with time as the first axis, in both directions: zeros after the end would be read first."""
    values = np.linspace(-0.9, 0.9, 120, dtype=np.float32)
    return model(
        """(float[t,b,3] x) => (float[t,d,b,2] y) { y, h = GRU<hidden_size=2,direction="bidirectional">(x, W, R, B) }""",
        W=values[:36].reshape(2, 6, 3),
        R=values[36:60].reshape(2, 6, 2),
        B=values[60:84].reshape(2, 12),
    )


def attention_over_keys():
    """Attention over any number of keys without a mask, which OpenVINO 2026.4 computes wrongly after one key."""
    return model(
        """(float[b,2,8] q, float[b,n,8] k) => (float[b,2,8] y) {
            t = Transpose<perm=[0,2,1]>(k) s = MatMul(q, t) w = Softmax<axis=2>(s) y = MatMul(w, k) }"""
    )


def recurrent_time_first():
    """An LSTM over [time, batch], which OpenVINO 2026.4 computes wrongly from its cache for several series."""
    values = np.linspace(-0.9, 0.8, 224, dtype=np.float32)
    return model(
        """(float[t,b,3] x) => (float[t,d,b,4] y) { y, h, c = LSTM<hidden_size=4>(x, W, R, B) }""",
        W=values[:48].reshape(1, 16, 3),
        R=values[48:112].reshape(1, 16, 4),
        B=values[112:144].reshape(1, 32),
    )
