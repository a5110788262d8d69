"""Every instruction set that this CPU runs."""

import pytest

from pipelines.kernels import extension


@pytest.fixture(params=extension.isas() or ["none"])
def isa(request):
    return request.param
