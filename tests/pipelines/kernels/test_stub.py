"""The stub of the native kernels names what the extension has."""

import ast
import re
from pathlib import Path

import pytest

from pipelines.kernels import extension

STUB = Path(extension.__file__).parent / "_native.pyi"


def of_stub(nodes):
    """{name: its arguments, or its methods'} of functions and classes."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            found[node.name] = of_stub(node.body)
        elif isinstance(node, ast.FunctionDef):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            found[node.name] = [name for name in names if name not in ("self", "arg")]
    return found


def of_extension(owner):
    """The same of the extension, by the signatures that nanobind keeps."""
    found = {}
    for name, value in vars(owner).items():
        if isinstance(value, type):
            found[name] = of_extension(value)
        elif isinstance(value, property):
            found[name] = []
        elif signatures := getattr(value, "__nb_signature__", None):
            text = re.sub(
                r"ndarray\[[^]]*\]", "ndarray", re.sub(r"\\\d+", "0", signatures[0][0])
            )  # defaults are numbers
            tree = ast.parse(f"{text}: ...").body[0]
            found |= of_stub([tree])
    return found


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
def test_the_stub_is_that_of_the_extension():
    wanted, found = of_extension(extension.native()), of_stub(ast.parse(STUB.read_text()).body)
    assert found == wanted, "the extension has other functions or arguments than its stub; run: make stub"


def test_every_argument_of_the_extension_has_a_name():
    tree = ast.parse(STUB.read_text())
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and not any(isinstance(each, ast.Attribute) and each.attr == "setter" for each in node.decorator_list)
    ]
    assert len(functions) > 50
    unnamed = [each.name for each in functions if any(a.arg != "self" for a in each.args.posonlyargs)]
    assert not unnamed, "nanobind numbers arguments without a name"


def test_packages_are_marked_as_typed():
    root = STUB.parents[2]
    assert all((root / package / "py.typed").is_file() for package in ("zoo", "pipelines"))
