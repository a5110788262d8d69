"""On a CPU without VNNI the tests of kernels run on the model of AVX-VNNI in its place."""

import os

from pipelines.kernels import extension

MODEL = "avx_vnni_int8_model"
SETS = {each.name: each for each in extension.instruction_sets()}

if (
    MODEL in SETS
    and SETS[MODEL].supported
    and not any(each.vnni and each.supported and each.listed for each in SETS.values())
):
    os.environ.setdefault("ZOO_ISA", MODEL)
