"""The rules of CONTRIBUTING.md that a machine can check."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*ROOT.glob("pipelines/**/*.py"), *ROOT.glob("zoo/**/*.py")])
NATIVE = sorted([*ROOT.glob("pipelines/**/*.cpp"), *ROOT.glob("pipelines/**/*.h")])
HEAVY = {"torch", "tensorflow", "keras", "datasets", "tf2onnx", "matplotlib"}
HEAVY_ROOMS = {"training", "models", "export", "importers"}  # torch, tensorflow and datasets at module level
# packages of pipelines/: each imports those before it, never one behind it; a file joins its package's place by lying
# there
PACKAGES = (
    "core",
    "graph",
    "rewrites",
    "quantization",
    "kernels",
    "engines",
    "data",
    "analysis",
    "compression",
    "models",
    "deltas",
)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements and expressions below a node but those that only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from statements(other)
        else:
            yield child
            yield from statements(child)


@functools.cache
def imports(path: Path, top: bool, types: bool = False) -> set[str]:
    """Names of the modules that a file imports: at module level only, or anywhere. types: for type checkers, too."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in tree.body if top else ast.walk(tree) if types else statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def module(path: Path) -> str:
    """The dotted name of a file of ours."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_heavy_libraries_are_imported_at_module_level_only_where_training_happens() -> None:
    for path in FILES:
        heavy = {name.split(".")[0] for name in imports(path, top=True)} & HEAVY
        assert not heavy or HEAVY_ROOMS & {*path.relative_to(ROOT).parts[:-1]}, path


def test_test_files_import_slow_libraries_where_a_test_uses_them() -> None:
    """Every process of `make test` reads all test files: see `helpers.lazily`."""
    slow = r"(tensorflow|keras|tf2onnx|sklearn|polars|datasets|transformers\.models)\b"
    imported = re.compile(rf"^(\w+ = )?(import |from |pytest\.importorskip\(\"){slow}", re.MULTILINE)
    files = [*ROOT.glob("tests/**/*.py")]
    assert len(files) > 300 and not [path for path in files if imported.search(path.read_text())]


def test_pipelines_never_imports_zoo_and_imports_between_packages_run_one_way() -> None:
    for path in ROOT.glob("pipelines/**/*.py"):
        names = imports(path, top=False, types=True)
        assert not any(name.split(".")[0] == "zoo" for name in names), path
        own = path.relative_to(ROOT / "pipelines").parts[0]
        used = {parts[1] for name in names if (parts := name.split("."))[0] == "pipelines" and len(parts) > 1}
        allowed = PACKAGES[: PACKAGES.index(own) + 1] if own in PACKAGES else ()
        assert own == "__init__.py" or used <= set(allowed), f"{path} may import {', '.join(allowed) or 'nothing'}"


def test_no_files_import_each_other_in_a_circle_within_functions_neither() -> None:
    modules = {module(path): path for path in FILES}
    needed = {
        name: {imported for imported in imports(path, top=False) if imported in modules} - {name}
        for name, path in modules.items()
    }
    for name in needed:  # `from package import module` names the package, too, of which only the module is meant
        needed[name] -= {
            imported
            for imported in needed[name]
            if any(other.startswith(f"{imported}.") for other in (*needed[name], name))
        }
    graphlib.TopologicalSorter(needed).prepare()  # raises CycleError, which names the circle


def test_every_package_says_what_is_in_it() -> None:
    for path in (ROOT / "pipelines").rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring and len(docstring) > 30, path


DOCUMENTED = (  # rooms and files whose public functions describe their arguments; it grows
    "pipelines/analysis",
    "pipelines/compression",
    "pipelines/core",
    "pipelines/data",
    "pipelines/engines",
    "pipelines/graph",
    "pipelines/kernels/arrays",
    "pipelines/kernels/extension",
    "pipelines/kernels/images",
    "pipelines/kernels/program_file",
    "pipelines/kernels/recommenders",
    "pipelines/kernels/transformer",
    "pipelines/models",
    "pipelines/quantization",
    "pipelines/rewrites",
    "zoo/__init__",
    "zoo/__main__",
    "zoo/api",
    "zoo/cli",
    "zoo/distributed",
    "zoo/huggingface",
    "zoo/recommenders",
    "zoo/registry",
    "zoo/serving",
    "zoo/texts",
    "zoo/training",
    "zoo/translation",
    "zoo/vision",
)


def functions(node: ast.Module | ast.ClassDef, prefix: str = "") -> list[tuple[str, ast.FunctionDef]]:
    """Public functions of a module, and public methods of its public classes, by their names."""
    public = [part for part in node.body if not getattr(part, "name", "_").startswith("_") and not _is_command(part)]
    own = [(prefix + part.name, part) for part in public if isinstance(part, ast.FunctionDef)]
    return own + [
        method for part in public if isinstance(part, ast.ClassDef) for method in functions(part, f"{part.name}.")
    ]


def _is_command(part: ast.stmt) -> bool:
    """Whether it is a command of click: its docstring is the text of --help."""
    return any(".command(" in ast.unparse(decorator) for decorator in getattr(part, "decorator_list", ()))


@pytest.mark.parametrize("room", DOCUMENTED)
def test_public_functions_of_two_arguments_and_more_describe_them(room: str) -> None:
    undescribed = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(ROOT.glob(f"{room}.py" if (ROOT / f"{room}.py").is_file() else f"{room}/**/*.py"))
        for name, function in functions(ast.parse(path.read_text()))
        if len([a for a in (*function.args.args, *function.args.kwonlyargs) if a.arg not in ("self", "cls")]) > 1
        and not re.search(r"^Args:$|\ASee `", ast.get_docstring(function) or "", re.M)  # or a protocol's method
    ]
    assert not undescribed


SIDE_BY_SIDE = 12  # files in a folder, besides __init__.py and lists of like things
LISTS = {"pipelines/rewrites", "zoo/recommenders/models", "zoo/texts/models/architectures"}


def test_no_folder_has_more_files_than_a_reader_overlooks() -> None:
    files = [path for path in (*FILES, *NATIVE) if path.name != "__init__.py"]
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in files)
    assert not {folder: n for folder, n in counts.items() if n > SIDE_BY_SIDE and folder not in LISTS}


def test_no_file_is_longer_than_500_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (*FILES, *NATIVE, *ROOT.glob("scripts/**/*.py"))}
    assert not {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 500}


def test_comments_of_native_code_name_files_that_exist() -> None:
    paths = [f"/{other.relative_to(ROOT)}" for other in (*FILES, *NATIVE)]
    for path in NATIVE:
        comments = re.findall(r"//.*", path.read_text())
        named = {name for comment in comments for name in re.findall(r"\w[\w./]*\.(?:py|h|cpp)\b", comment)}
        assert not {name for name in named if not any(other.endswith(f"/{name}") for other in paths)}, path


TASKS = ("recommenders", "translation", "texts", "vision")
# rooms of zoo/ and what of zoo/ each may import besides itself; a task imports no other task
ROOMS = {task: {"training"} for task in TASKS} | {
    "training": set(),
    "huggingface": set(),
    "api": {"training", "huggingface"},
    "cli": {"api", "training"},
    "serving": set(),
    "distributed": {"api", "training", "serving"},
}
OPENS = {  # functions that open a room on demand
    **{f"zoo/{task}/family.py": {"serving"} for task in TASKS},  # a family names the handler of its requests
    "zoo/vision/networks/family.py": {"serving"},
    "zoo/serving/handlers/rows.py": {"recommenders"},
    "zoo/serving/handlers/row_bodies.py": {"recommenders"},
    "zoo/serving/handlers/translation.py": {"translation"},
    "zoo/serving/handlers/texts.py": {"texts"},
    "zoo/serving/handlers/text_tasks.py": {"texts"},
    **{
        f"zoo/serving/handlers/text_apis/{name}.py": {"texts"}
        for name in ("api", "openai", "tei", "cohere", "multi_vector")
    },
    "zoo/serving/handlers/image_handler.py": {"vision"},
    "zoo/api/distributed.py": {"distributed"},
    "zoo/api/samples.py": {"vision"},
    "zoo/api/serving.py": {"serving"},
}


def test_rooms_of_zoo_import_only_what_they_may() -> None:
    for path in (file for room in ROOMS for file in ROOT.glob(f"zoo/{room}/**/*.py")):
        relative = path.relative_to(ROOT)
        own = relative.parts[1]
        names = [name.split(".") for name in imports(path, top=False)]
        used = {parts[1] for parts in names if parts[0] == "zoo" and len(parts) > 1} & {*ROOMS}
        assert used <= {own, *ROOMS[own], *OPENS.get(str(relative), ())}, relative


@pytest.mark.parametrize("task", TASKS)
def test_rooms_of_a_task_import_each_other_one_way(task: str) -> None:
    """At module level: a family opens training and export, behind it, in its methods."""
    needed: dict[str, set[str]] = {}
    for path in ROOT.glob(f"zoo/{task}/*/**/*.py"):
        names = [name.split(".") for name in imports(path, top=True) if name.startswith(f"zoo.{task}.")]
        own = path.relative_to(ROOT / "zoo" / task).parts[0]
        needed.setdefault(own, set()).update(
            {parts[2] for parts in names if (ROOT.joinpath(*parts[:3])).is_dir()} - {own}
        )
    graphlib.TopologicalSorter(needed).prepare()  # raises CycleError, which names the circle


def test_importing_zoo_and_the_command_loads_nothing_heavy() -> None:
    code = "import sys, zoo, zoo.cli.app, zoo.api, zoo.recommenders.log_pipeline, zoo.translation.inference, zoo.texts.inference; assert [*zoo.entries()] == [*zoo.BUILT_IN]; print(' '.join(sys.modules))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & HEAVY


@pytest.mark.parametrize("package", ["pipelines.engines", "pipelines.quantization", "pipelines.rewrites"])
def test_packages_load_their_public_names_at_first_use(package: str) -> None:
    code = (
        f"import sys, {package} as package; print(*sys.modules); "
        "print(*(f'{name}:{getattr(package, name) is not None}' for name in package.__all__))"
    )
    modules, names = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert not {"numpy", "onnx", "onnx_ir", "onnxruntime", "openvino"} & {*modules.split()}
    assert len(names.split()) > 5 and all(name.endswith(":True") for name in names.split())


def test_folders_of_tests_are_folders_of_what_they_test() -> None:
    tested = {path.parent.relative_to(ROOT / "tests") for path in ROOT.glob("tests/*/**/test_*.py")}
    assert not [str(path) for path in tested if path.parts[0] != "faults" and not (ROOT / path).is_dir()]


GENERATORS = {"default_rng", "RandomState", "Random", "normals", "seed", "manual_seed"}


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute of a name; of other expressions the attributes alone."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def generators(node: ast.AST, parent: ast.AST | None = None, within: bool = False) -> Iterator[int]:
    """Lines at which a module keeps or seeds a random generator outside functions, or draws from that of numpy.

    `default_rng(0).normal(size=3)` and `network(default_rng(0))` keep none.
    """
    name = dotted(node.func) if isinstance(node, ast.Call) else ""
    kept = not within and not isinstance(parent, ast.Attribute | ast.Call)
    if (kept and name.split(".")[-1] in GENERATORS) or re.match(r"np\.random\.(?!default_rng)", name):
        yield node.lineno
    for field, value in ast.iter_fields(node):
        body = within or (field == "body" and isinstance(node, ast.FunctionDef | ast.Lambda))
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from generators(child, node, body)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("RNG = np.random.default_rng(0)", [1]),
        ("a, normal = 1, normals(0)", [1]),
        ("KEPT = {'a': random.Random(0)}", [1]),
        ("@pytest.mark.parametrize('rng', [default_rng(0)])\ndef test_x(rng): ...", [1]),
        ("def draw(rng=np.random.default_rng(0)): ...", [1]),
        ("class Network:\n    rng = random.Random(0)", [2]),
        ("torch.manual_seed(0)", [1]),
        ("def draw():\n    return np.random.normal()", [2]),
        ("X = np.random.default_rng(0).normal(size=3)", []),
        ("NET = network(np.random.default_rng(0), normals(0)(3))", []),
        ("def draw():\n    rng = np.random.default_rng(0)", []),
        ("draw = lambda: np.random.default_rng(0).normal()", []),
    ],
)
def test_generators_between_tests_are_found(line: str, found: list[int]) -> None:
    assert [*generators(ast.parse(line))] == found


def test_no_test_draws_from_a_generator_that_others_draw_from() -> None:
    """The data of a test would depend on the tests that ran before it; the fixture `rng` makes one for each test."""
    trees = {path: ast.parse(path.read_text()) for path in ROOT.glob("tests/**/*.py")}
    assert not {str(path.relative_to(ROOT)): lines for path, tree in trees.items() if (lines := [*generators(tree)])}


def test_the_version_is_one_wherever_it_stands() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == version
    for name in ("deploy/Dockerfile", "deploy/kserve.yaml", "docs/serve.md"):
        assert set(re.findall(r"int8-zoo:([\d.]+\d)", (ROOT / name).read_text())) == {version}, name
