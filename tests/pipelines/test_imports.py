"""Imports of libraries that this package changes."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("first", ["", "import sympy", "import onnx_ir"])
def test_onnx_ir_imports_sympy_where_sizes_are_computed(first: str) -> None:
    code = f"""{first}
import sys
imported = "sympy" in sys.modules
from pipelines.graph import io
import onnx_ir as ir
assert ir.SymbolicDim("n") == ir.SymbolicDim("n") and ir.Shape(["n", 3])[0].value == "n"
assert ("sympy" in sys.modules) == imported
assert (ir.SymbolicDim("n") + 1).value == "n + 1" and ir.SymbolicDim("2*n").evaluate({{"n": 3}}) == 6
import sympy.core
assert sys.modules["sympy"].Symbol is sympy.core.Symbol and type(sympy).__name__ == "module"
import onnx_ir._symbolic_shapes
assert onnx_ir._symbolic_shapes is sys.modules["onnx_ir._symbolic_shapes"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
