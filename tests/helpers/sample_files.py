"""The command called from a test, and a small network to call it on."""

import pytest

from zoo.cli import app as cli

TEXT = "(float[n,8] x) => (float[n,4] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        cli.call(arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err
