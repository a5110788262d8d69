"""On a CPU without VNNI the tests of kernels run on the model of AVX-VNNI in its place."""

import os

from pipelines.kernels import extension

MODEL = "avx_vnni_int8_model"
SETS = {isa.name: isa for isa in extension.instruction_sets()}

if (
    MODEL in SETS
    and SETS[MODEL].supported
    and not any(isa.vnni and isa.supported and isa.listed for isa in SETS.values())
):
    os.environ.setdefault("ZOO_ISA", MODEL)
