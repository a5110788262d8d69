"""CPU features, caches, versions and the fingerprint of the machine."""

import json
import os
import subprocess

import pytest
import threadpoolctl

from pipelines.core import machine


@pytest.fixture(autouse=True)
def forget():
    machine.cpu.cache_clear()
    machine.commit.cache_clear()
    yield
    machine.cpu.cache_clear()
    machine.commit.cache_clear()


CPUINFO = """processor	: 0
cpu family	: 6
model		: 207
model name	: Some CPU @ 3.00GHz
flags		: fpu avx2 {} amx_int8x

processor	: 1
model name	: Another
flags		: fpu avx2 avx512_vnni
"""


@pytest.mark.parametrize(("flag", "vnni"), [("avx512_vnni", True), ("avx_vnni", True), ("avx512f", False)])
def test_cpu_is_the_first_processor(monkeypatch, flag, vnni):
    monkeypatch.setattr("pathlib.Path.read_text", lambda self, *a, **k: CPUINFO.format(flag))
    assert machine.cpu() == {"name": "Some CPU @ 3.00GHz", "family": "6", "model": "207", "flags": ["avx2", flag]}
    assert machine.has_vnni() == vnni


def test_a_system_without_cpuinfo(monkeypatch):
    def missing(self, *arguments, **options):
        raise FileNotFoundError(self)

    monkeypatch.setattr("pathlib.Path.read_text", missing)
    assert machine.cpu()["flags"] == [] and machine.cpu()["name"] and not machine.has_vnni()


def test_caches_are_those_of_the_first_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    assert machine.caches() == {"L1d": 0, "L2": 0, "L3": 0}
    said = [
        ("1", "Data", "32K"),
        ("1", "Instruction", "64K"),
        ("2", "Unified", "2M"),
        ("3", "Unified", "?"),
        ("4", "Unified", "1G"),
    ]
    for number, values in enumerate(said):
        (tmp_path / f"index{number}").mkdir()
        for name, value in zip(("level", "type", "size"), values, strict=True):
            (tmp_path / f"index{number}" / name).write_text(f"{value}\n")
    (tmp_path / "index9").mkdir()  # without files
    assert machine.caches() == {"L1d": 2**15, "L2": 2**21, "L3": 0}


def test_versions():
    versions = machine.versions()
    assert {"python", "onnxruntime", "openvino", "numpy", "onnx-ir"} <= set(versions)
    import onnxruntime

    assert versions["onnxruntime"] == onnxruntime.__version__


def test_environment_is_json_with_the_facts_of_the_run():
    facts = machine.environment(threads=3)
    assert facts["threads"] == 3 and facts["cores"] == machine.cores() >= 1
    assert {"cpu", "cpu_model", "isa", "versions", "commit"} <= set(json.loads(json.dumps(facts)))


def test_fingerprint_follows_cpu_cores_and_versions(monkeypatch):
    before = machine.fingerprint()
    assert machine.fingerprint() == before and len(before) == 12
    for name, value in (("cpu", {"name": "other"}), ("cores", 1000), ("versions", {"python": "9"})):
        with monkeypatch.context() as patch:
            patch.setattr(machine, name, lambda value=value: value)
            assert machine.fingerprint() != before, name
    assert machine.fingerprint() == before


def checkout(tmp_path, monkeypatch):
    (tmp_path / "pipelines" / "core").mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "pipelines" / "core" / "machine.py"))


def test_commit_of_a_checkout(tmp_path, monkeypatch):
    checkout(tmp_path, monkeypatch)
    (tmp_path / "file.py").write_text("1")
    (tmp_path / "report.json").write_text("1")
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "x"]):
        subprocess.run(
            ["git", *arguments], cwd=tmp_path, check=True, env=os.environ | {"GIT_CONFIG_GLOBAL": os.devnull}
        )
    clean = machine.commit()
    assert len(clean) == 12
    (tmp_path / "report.json").write_text("2")
    machine.commit.cache_clear()
    assert machine.commit() == clean
    (tmp_path / "file.py").write_text("2")
    machine.commit.cache_clear()
    assert machine.commit() == clean + "+"


def test_no_commit_outside_a_checkout(tmp_path, monkeypatch):
    checkout(tmp_path, monkeypatch)
    assert machine.commit() is None
    (tmp_path / ".git").write_text("broken")
    machine.commit.cache_clear()
    assert machine.commit() is None


@pytest.mark.parametrize(
    ("vnni", "kernels", "fastest", "said"),
    [
        (True, ["avx512", "avx2", "portable"], True, machine.VNNI),
        (True, [], False, machine.VNNI),
        (True, ["avx2", "portable"], False, machine.WITHOUT_VNNI.format("avx2")),
        (False, ["avx2", "portable"], False, machine.NO_VNNI),
    ],
)
def test_advice_is_of_what_the_kernels_take(monkeypatch, vnni, kernels, fastest, said):
    monkeypatch.setattr(machine, "has_vnni", lambda: vnni)
    assert machine.advice(kernels, fastest) == said


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A fake system: siblings of processors, the list of E-cores, capacities, control groups and files below them."""

    def made(allowed, siblings=(), efficient="", capacity=(), groups="", files=()):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
        for name in ("PROCESSORS", "EFFICIENT_PROCESSORS", "CONTROL_GROUPS", "OWN_GROUPS"):
            monkeypatch.setattr(machine, name, tmp_path / name)
        (tmp_path / "EFFICIENT_PROCESSORS").write_text(efficient)
        (tmp_path / "OWN_GROUPS").write_text(groups)
        texts = {f"PROCESSORS/cpu{number}/topology/thread_siblings_list": text for number, text in siblings}
        texts |= {f"PROCESSORS/cpu{number}/cpu_capacity": text for number, text in capacity}
        for name, text in {**texts, **{f"CONTROL_GROUPS/{name}": text for name, text in files}}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        return machine.processors()

    return made


PAIRS = [(number, f"{number % 4},{number % 4 + 4}") for number in range(8)]  # four cores of two


def test_threads_take_each_core_once(system):
    layout = system(range(8), PAIRS)
    assert (layout.threads, layout.count, layout.order) == (4, 8, [0, 1, 2, 3, 4, 5, 6, 7])
    layout = system({0, 4, 5}, PAIRS)
    assert (layout.threads, layout.count, layout.order) == (2, 3, [0, 5, 4])


def test_threads_of_hybrid_cpus_are_on_performance_cores(system):
    pairs = [(0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3"), (4, "4"), (5, "5")]
    layout = system(range(6), pairs, efficient="4-5")
    assert (layout.threads, layout.count, layout.order) == (2, 6, [0, 2, 4, 5, 1, 3])
    assert system({4, 5}, pairs, efficient="4-5").threads == 2  # no other core is allowed


def test_smaller_capacity_is_that_of_efficiency_cores(system):
    assert system(range(4), capacity=[(0, 512), (1, 512), (2, 1024), (3, 1024)]).order == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("groups", "files", "threads"),
    [
        ("0::/a/b", [("a/b/cpu.max", "200000 100000")], 2),
        ("0::/a/b", [("a/b/cpu.max", "max 100000"), ("a/cpu.max", "350000 100000")], 3),
        ("0::/a/b", [("cpu.max", "50000 100000")], 1),  # in a container, whose root is its own group
        ("0::/", [("cpu.max", "max 100000")], 8),
        ("3:cpu,cpuacct:/a", [("cpu/a/cpu.cfs_quota_us", "200000"), ("cpu/a/cpu.cfs_period_us", "100000")], 2),
        ("3:cpu,cpuacct:/a", [("cpu/a/cpu.cfs_quota_us", "-1"), ("cpu/a/cpu.cfs_period_us", "100000")], 8),
        ("0::/a", [("a/cpuset.cpus.effective", "0-2,9")], 3),
        ("2:cpuset:/a", [("cpuset/a/cpuset.effective_cpus", "4,6")], 2),
        ("2:memory:/a", [("memory/a/cpu.max", "100000 100000")], 8),
        ("", [], 8),
    ],
)
def test_threads_are_within_the_limits_of_control_groups(system, groups, files, threads):
    layout = system(range(8), groups=groups, files=files)
    assert layout.threads == layout.count == machine.cores() == threads


def test_threads_that_share_a_core_are_warned_of_once(system, caplog):
    system(range(8), PAIRS)
    machine._warn_of_siblings.cache_clear()
    for threads in (1, 4, 5, 5):
        machine.require_threads(threads)
    assert [record.getMessage() for record in caplog.records] == [
        "found 5 threads for 4 core(s): some share a core (SMT siblings) and are slower; --threads auto takes 4"
    ]
    machine._warn_of_siblings.cache_clear()


def test_linear_algebra_in_one_thread():
    def threads():
        return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]

    with threadpoolctl.threadpool_limits(limits=2, user_api="blas"):
        before = threads()
        with machine.single_blas_thread():
            assert set(threads()) <= {1}
        assert threads() == before
        with pytest.raises(ValueError), machine.single_blas_thread():
            raise ValueError
        assert threads() == before
