"""The stub of the native kernels names what the extension has."""

import ast
import re
from pathlib import Path

import pytest

from pipelines.kernels import extension

STUB = Path(extension.__file__).parent / "_native.pyi"


def of_stub(nodes):
    """{name: its arguments, or its methods'} of functions and classes."""
    arguments = {}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            arguments[node.name] = of_stub(node.body)
        elif isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            arguments[node.name] = [name for name in names if name not in ("self", "arg")]
    return arguments


def of_extension(owner):
    """The same of the extension, by the signatures that nanobind keeps."""
    arguments = {}
    for name, value in vars(owner).items():
        if isinstance(value, type):
            arguments[name] = of_extension(value)
        elif isinstance(value, property):
            arguments[name] = []
        elif signatures := getattr(value, "__nb_signature__", None):
            text = re.sub(
                r"ndarray\[[^]]*\]", "ndarray", re.sub(r"\\\d+", "0", signatures[0][0])
            )  # defaults are numbers
            tree = ast.parse(f"{text}: ...").body[0]
            arguments |= of_stub([tree])
    return arguments


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
def test_the_stub_is_that_of_the_extension():
    wanted, stub = of_extension(extension.native()), of_stub(ast.parse(STUB.read_text()).body)
    assert stub == wanted, "the extension has other functions or arguments than its stub; run: make stub"


def test_every_argument_of_the_extension_has_a_name():
    tree = ast.parse(STUB.read_text())
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and not any(isinstance(wrapper, ast.Attribute) and wrapper.attr == "setter" for wrapper in node.decorator_list)
    ]
    assert len(functions) > 50
    unnamed = [function.name for function in functions if any(a.arg != "self" for a in function.args.posonlyargs)]
    assert not unnamed, "nanobind numbers arguments without a name"


def test_packages_are_marked_as_typed():
    root = STUB.parents[2]
    assert all((root / package / "py.typed").is_file() for package in ("zoo", "pipelines"))
