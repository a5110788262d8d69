"""Every test: `rewriting` can be imported, the cache is an empty folder of its own."""

import gc
import importlib.util
import itertools
import os
import signal
import sys
import types
from pathlib import Path

# As many processes run tests as there are cores: further threads of numpy and torch would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read where numpy is imported first

import numpy as np
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
HOMES = itertools.count()  # `mktemp` would look through the folders of all tests before
# the root comes first: beside tests/ on the path, the folder tests/zoo would pass for the package zoo
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
if importlib.util.find_spec("pipelines.kernels._native") is not None:
    importlib.import_module(
        "pipelines.kernels._native"
    )  # tests of kernels skip where none were built, not where they fail
# every run draws the same examples; times depend on what else the machine does
settings.register_profile("same", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("thorough", settings.get_profile("same"), max_examples=200)  # of make test-all
settings.load_profile("same")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell started the tests in the background; what they start would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """What lives before a file's tests (items, modules of engines and frameworks) is not looked at by later collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def zoo_home(tmp_path_factory, monkeypatch):
    """ZOO_HOME of this test, not made yet."""
    home = tmp_path_factory.getbasetemp() / "homes" / str(next(HOMES)) / "home"
    home.parent.mkdir(parents=True)
    monkeypatch.setenv("ZOO_HOME", str(home))
    return home


@pytest.fixture(autouse=True, scope="session")
def young_garbage():
    """Where the program gives back memory, it looks at young objects alone: not at all that tests have imported."""
    from pipelines.core import machine
    from pipelines.graph import reference_session

    young = types.SimpleNamespace(collect=lambda: gc.collect(1))
    with pytest.MonkeyPatch.context() as patch:
        for module in (machine, reference_session):
            patch.setattr(module, "gc", young)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_child():
    """The process in which OpenVINO may crash stays for all tests: a new one loads its libraries anew."""
    from pipelines.engines.openvino import child

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "IDLE_SECONDS", 3600.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def plain_curves():
    """Trainings do not draw their curves, which takes as long as training a tiny network; `test_runs` draws some."""

    def plot(path, history, left_axis, right, axes, best=None):
        assert all(key in entry for entry in history for key in ("epoch", *left_axis, *right)) and len(axes) == 2
        path.write_bytes(b"\x89PNG")

    with pytest.MonkeyPatch.context() as patch:
        for task in ("recommenders", "translation", "vision"):
            if (module := sys.modules.get(f"zoo.{task}.training.train")) is not None:
                patch.setattr(module, "plot_curves", plot)
        yield


@pytest.fixture(autouse=True, scope="session")
def models_home(tmp_path_factory):
    """ZOO_HOME of all fixtures of a file: files of shipped models are made once, by the process that needs them first."""
    base = tmp_path_factory.getbasetemp()
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "models home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_HOME", str(home))
        yield home


@pytest.fixture
def shared_home(zoo_home, models_home, monkeypatch):
    """ZOO_HOME of tests of shipped models that make no difference between a cache that is empty and one that is not."""
    monkeypatch.setenv("ZOO_HOME", str(models_home))
    return models_home


@pytest.fixture
def rng():
    """The random generator of one test. Constants of modules are drawn with other seeds, so that inputs differ from weights."""
    return np.random.default_rng(1)


@pytest.fixture
def normal(rng):
    """`normal(*shape, scale=1.0)`: float32 of the normal distribution."""
    from helpers.arrays import normals

    return normals(rng)


@pytest.fixture(scope="session")
def shared():
    """The development data folder."""
    path = Path(os.environ.get("ZOO_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"no development data at {path}; name its folder in $ZOO_SHARED")
    return path
