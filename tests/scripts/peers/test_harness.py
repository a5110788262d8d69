"""The harness of comparisons: options, processes, reports and their tables."""

import importlib
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError
from scripts.peers import harness, processes

PEERS = Path(harness.__file__).parent


def comparisons() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("peers_main", PEERS / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    before = sys.path[0]
    spec.loader.exec_module(module)
    sys.path[0] = before
    return module.COMPARISONS


@pytest.mark.parametrize("name", comparisons())
def test_every_comparison_has_help_and_no_option_twice(name: str) -> None:
    if name == "exported":
        pytest.importorskip("transformers", reason="needs the train extra")
    module = importlib.import_module(f"scripts.peers.{comparisons()[name]}")
    parser = harness.Parser(name, module.__doc__)
    module.options(parser)
    assert callable(module.measure)
    assert module.__doc__.splitlines()[0] in parser.format_help()


def test_a_comparison_that_is_not_known_is_named_with_those_that_are() -> None:
    done = subprocess.run([sys.executable, PEERS, "wide-shallow"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "scripts/peers: unknown comparison wide-shallow; choose among wide-deep, click-models"
    )
    listed = subprocess.run([sys.executable, PEERS], capture_output=True, text=True, check=True).stdout
    assert set(comparisons()) <= set(listed.replace(",", "").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "found --rounds '0', expected a whole number of 1 or more"),
        (["--rounds", "1,2"], "found --rounds '1,2', expected a whole number of 1 or more"),
        (["--sizes", "4,x"], "found --sizes '4,x', expected whole numbers of 1 or more"),
        (["--peers", "c"], "unknown peer c; choose among a, b"),
        (["--peers", " , "], "found an empty list, expected at least one peer"),
    ],
)
def test_wrong_values_are_refused(arguments: list[str], message: str) -> None:
    parser = harness.Parser("some", "Some comparison.")
    parser.names("--peers", "peer", ["a", "b"])
    parser.numbers("--sizes", "1,32", "sizes")
    parser.count("--rounds", 9, "turns")
    options = parser.parse_args([])
    assert (options.peers, options.sizes, options.rounds) == (["a", "b"], [1, 32], 9)
    with pytest.raises(RequestError) as raised:
        parser.parse_args(arguments)
    assert str(raised.value) == message


def test_a_report_is_a_table_of_its_lists_below_the_figures_of_their_owner() -> None:
    rows = [{"name": "a", "ms": {"median": 2.0, "spread": [1.0, 3.5]}}, {"name": "bb", "failed": "no"}]
    report = {"models": [{"model": "m", "share": 0.5, "results": rows, "steps": [{"x": 1}]}], "environment": {"cpu": 1}}
    assert harness.table(report, ("steps",)).splitlines() == [
        "model m, share 0.5",
        "results:",
        "  name  ms          failed",
        "  a     2 (1..3.5)",
        "  bb                no",
    ]


def test_a_report_is_written_after_every_item(tmp_path: Path) -> None:
    def measure(name: str) -> str:
        if name == "b":
            raise ZooError("no more")
        return name

    with pytest.raises(ZooError):
        harness.gather("items", ["a", "b"], measure, str(tmp_path / "report.json"), {"cpu": "some"})
    assert json.loads((tmp_path / "report.json").read_text()) == {"items": ["a"], "environment": {"cpu": "some"}}


def test_what_fails_is_left_out_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    left_out: dict[str, str] = {}
    with harness.leave_out("a", left_out):
        raise ValueError("no\nway")
    assert left_out == {"a": "ValueError: no way"}
    assert capsys.readouterr().err == "a is left out: ValueError: no way\n"
    with pytest.raises(RequestError), harness.leave_out("b", left_out, fatal=(RequestError,)):
        raise RequestError("wrong")
    assert "b" not in left_out


def test_calls_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "TURN_SECONDS", 0)
    order: list[str] = []
    times = harness.in_turn({name: partial(order.append, name) for name in "ab"}, 2)
    assert order == ["a", "b"] * 3  # once before the two rounds
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}
    assert harness.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0


def affinity() -> tuple[set[int], str, int]:
    print("something")
    return os.sched_getaffinity(0), os.environ["OMP_NUM_THREADS"], os.getpid()


def test_a_process_of_its_own_is_pinned_and_quiet(tmp_path: Path) -> None:
    core = {processes.last_core()}
    state = processes.on_one_core(affinity, cores=core, log=tmp_path / "log")
    assert state[:2] == (core, "1") and state[2] != os.getpid()
    assert (tmp_path / "log").read_text() == "something\n"


def test_a_process_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ZooError, match="its process ended, or took more than 1 s"):
        processes.in_process(time.sleep, 30, seconds=1)


class Engine:
    """Adds, unless it is broken."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def open(self, number: int) -> int:
        if self.broken:
            raise ValueError("no such kernel")
        self.number = number
        return number

    def add(self, other: int) -> int:
        return self.number + other


def test_engines_answer_from_processes_and_broken_ones_are_left_out(tmp_path: Path) -> None:
    with processes.Workers(tmp_path) as workers:
        assert workers.open("good", Engine, 3) == 3
        assert workers.open("bad", partial(Engine, broken=True), 3) is None
        assert workers.ask_all("add", 4) == {"good": 7}
        assert workers.left_out == {"bad": "ValueError: no such kernel"}


def test_memory_is_that_of_the_process() -> None:
    peak, resident, shares = (processes.memory_mb(field) for field in ("VmHWM", "VmRSS", "Pss"))
    assert peak >= resident > 10 and 10 < shares <= resident * 1.1
    assert processes.memory_mb("VmHWM", 1 << 30) == 0.0
    script = "import time; x = bytearray(50_000_000); time.sleep(0.2); print('done')"
    output, seconds, processor, memory = processes.run([sys.executable, "-c", script])
    assert output == "done\n" and processor > 0 and seconds > 0.2 and memory > 50
    with pytest.raises(ZooError, match="failed: .*no such thing"):
        processes.run([sys.executable, "-c", "raise SystemExit('no such thing')"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "published"),
    [
        (
            ["runs", "wide-deep-criteo", "-n", "2000", "--rounds", "1"],
            "zoo/weights/wide-deep-criteo/reports/runs-*.json",
        ),
        (
            ["runs", "shop-clicks", "-n", "2000", "--part", "1000", "--rounds", "1"],
            "zoo/weights/shop-clicks/reports/runs-*.json",
        ),
        (["log-reading", "--rows", "2000", "--rounds", "1"], "scripts/peers/reports/log-reading-*.json"),
        (["contexts", "mobilenet-v1-cifar10", "--rounds", "1"], "scripts/peers/reports/contexts-*.json"),
    ],
    ids=lambda parameter: parameter[0] + parameter[1] if isinstance(parameter, list) else "",
)
def test_a_new_report_has_the_fields_of_those_in_the_repository(
    arguments: list[str], published: str, tmp_path: Path, require_fields
) -> None:
    pytest.importorskip("pandas", reason="needs the peers extra")
    if "wide-deep-criteo" in arguments:
        pytest.importorskip("farmhash", reason="needs the peers extra")
    if "contexts" in arguments and machine.cores() < 2:
        pytest.skip("needs two cores")
    report = tmp_path / "report.json"
    subprocess.run([sys.executable, PEERS, *arguments, "-o", report], check=True, capture_output=True)
    later = (".results[].rows", ".models[].samples_per_joule", ".models[].power")
    require_fields(json.loads(report.read_text()), published, missing=later)
