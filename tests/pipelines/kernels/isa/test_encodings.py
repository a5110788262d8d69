"""The encodings of the dot products of AVX-VNNI, as the assembler writes and the disassembler reads them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[4] / "pipelines" / "kernels"
pytestmark = pytest.mark.skipif(not (shutil.which("g++") and shutil.which("objdump")), reason="needs g++ and objdump")
PRODUCTS = """#include "isa/x86/avx_vnni_int8/products.h"
extern "C" void bytes(__m256i &sum, __m256i a, __m256i b) { zoo::dot_u8s8(sum, a, b); }
extern "C" void half(__m128i &sum, __m128i a, __m128i b) { zoo::dot_u8s8(sum, a, b); }
extern "C" void words(__m256i &sum, __m256i a, __m256i b) { zoo::dot_s16s16(sum, a, b); }
extern "C" void signed_bytes(__m256i &sum, __m256i a, __m256i b) { zoo::dot_s8s8(sum, a, b); }
"""


def disassembled(folder, source, *options):
    """The instructions of a file, [(bytes, text)]."""
    command = [
        "g++",
        "-std=c++17",
        "-mavx2",
        "-mfma",
        "-mf16c",
        f"-I{SOURCES}",
        *options,
        "-c",
        str(source),
        "-o",
        "made.o",
    ]
    subprocess.run(command, cwd=folder, check=True)
    listing = subprocess.run(["objdump", "-d", "made.o"], cwd=folder, check=True, capture_output=True, text=True).stdout
    return re.findall(r"^ +[0-9a-f]+:\t([0-9a-f ]+?) *\t(.*)$", listing, re.M)


@pytest.mark.parametrize(
    ("options", "encoded"),
    [
        ([], [("c4", 5, "50"), ("c4", 1, "50"), ("c4", 5, "52"), ("c4", 7, "50")]),
        (["-DZOO_EVEX"], [("62", 5, "50"), ("62", 5, "50"), ("62", 5, "52"), ("c4", 7, "50")]),
        (["-DZOO_MODEL"], []),
    ],
)
def test_dot_products_are_encoded_as_their_instruction_set_has_them(tmp_path, options, encoded):
    """Prefix, W, L and pp of its third byte, opcode: Intel's manual, volume 2, VPDPBUSD, VPDPWSSD and VPDPBSSD."""
    (tmp_path / "products.cpp").write_text(PRODUCTS)
    codes = [code.split() for code, text in disassembled(tmp_path, "products.cpp", "-O1", *options) if "vpdp" in text]
    opcode = {"c4": 3, "62": 4}
    assert [(code[0], int(code[2], 16) & 0x87, code[opcode[code[0]]]) for code in codes] == encoded


@pytest.mark.slow
def test_kernels_of_avx_vnni_have_no_instruction_of_avx512(tmp_path):
    folder = "isa/x86/avx_vnni"
    options = ["-O2", "-ffp-contract=off", "-DZOO_SET=avx_vnni"]
    options += [f'-DZOO_{name.upper()}="{folder}/{name}.h"' for name in ("vectors", "images")]
    sources = [f"{SOURCES}/{part}/kernels.cpp" for part in (folder, "isa/images", "isa/rows", "isa/clicks")]
    listing = [line for source in sources for line in disassembled(tmp_path, source, *options)]
    products = [code for code, text in listing if "vpdp" in text]
    assert len(products) > 100 and all(code.startswith("c4") for code in products)
    assert not [text for code, text in listing if code.startswith("62") or "zmm" in text]
