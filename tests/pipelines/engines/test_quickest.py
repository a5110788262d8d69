"""The choice of the fastest engine."""

import numpy as np
import pytest

from pipelines.core.errors import RequestError, ZooError
from pipelines.engines import quickest, timing
from pipelines.engines.quickest import Option, QuickestSession
from pipelines.engines.session import BatchError, Port

PORTS = {"x": Port(np.dtype(np.float32), (None, 2))}


class Fake:
    """A session that knows its name and how often it ran."""

    def __init__(self, name, fault=None):
        self.engine, self.threads, self.inputs, self.ran, self.fault = name, 1, PORTS, 0, fault

    def run(self, batch):
        self.ran += 1
        if self.fault is not None:
            raise self.fault
        return {"y": batch["x"]}

    def executed(self, batch):
        return [self.engine]


def feeds(count):
    return {"x": np.ones((count, 2), np.float32)}


@pytest.fixture
def asked(monkeypatch):
    """The batches that were timed, and among which; the first name in the alphabet is the quickest."""
    calls = []

    def choose(digest, candidates, batch, threads):
        calls.append((len(batch["x"]), sorted(candidates)))
        return timing.Choice(min(candidates), threads, len(batch["x"]), {}, "")

    monkeypatch.setattr(quickest, "choose", choose)
    return calls


def options(**smallest):
    return {name: Option(lambda name=name: Fake(name), least) for name, least in smallest.items()}


def test_each_size_class_is_timed_once_and_the_first_shorter_batch_takes_the_next_larger(asked):
    session = QuickestSession("m", options(b=1, c=1))
    assert session.engine == "auto" and session.inputs == PORTS
    for count in (64, 60, 3, 128, 100):
        np.testing.assert_array_equal(session.run(feeds(count))["y"], feeds(count)["x"])
    assert asked == [(64, ["b", "c"]), (128, ["b", "c"])] and session.engine == "b"
    assert session.executed(feeds(3)) == ["b"]
    assert asked[2:] == [(3, ["b", "c"])]


def test_single_rows_after_a_large_batch_run_in_the_engine_that_is_faster_for_them(monkeypatch, caplog):
    def choose(digest, candidates, batch, threads):
        best = "a" if len(batch["x"]) > 8 else "a+fp32"
        return timing.Choice(best, threads, timing.size_class(batch), dict.fromkeys(candidates, 1.0), "")

    monkeypatch.setattr(quickest, "choose", choose)
    session = QuickestSession("m", {"a": Option(lambda: Fake("a")), "a+fp32": Option(lambda: Fake("a"))})
    engines = []
    for count in (512, 1, 1, 1, 512):
        session.run(feeds(count))
        engines.append(session.engine)
    assert engines == ["a", "a", "a+fp32", "a+fp32", "a"]


def test_an_option_is_not_tried_below_its_smallest_batch(asked):
    session = QuickestSession("m", options(a=33, b=1))
    session.run(feeds(100))
    assert session.engine == "a"
    session.run(feeds(5))  # one option is left, which needs no timing
    assert session.engine == "b" and [count for count, _ in asked] == [100]


def test_an_option_that_cannot_be_opened_gives_way(asked, caplog):
    def fails():
        raise ZooError("no space left")

    session = QuickestSession("m", {"a": Option(fails), **options(b=1)})
    session.run(feeds(4))
    assert session.engine == "b" and "the engine a is left out: no space left" in caplog.text
    with pytest.raises(ZooError, match="no space left"):
        QuickestSession("m", {"a": Option(fails)}).run(feeds(4))


def test_a_sibling_has_the_choices_and_sessions_of_its_own(asked):
    session = QuickestSession("m", options(b=1, c=1))
    session.run(feeds(64))
    other = session.sibling()
    other.run(feeds(64))
    assert len(asked) == 1 and other.session(feeds(64)) is not session.session(feeds(64))


def test_only_chosen_sessions_stay_open(zoo_home):
    opened = []
    made = {name: Option(lambda name=name: opened.append(name) or Fake(name)) for name in ("a", "b")}
    session = QuickestSession("m", made)
    session.run(feeds(8))
    assert sorted(opened) == ["a", "b"] and len(session._sessions) == 1


def test_a_wrong_batch_is_the_callers_fault_and_no_engines(zoo_home):
    wrong = BatchError("found id 7")
    session = QuickestSession("m", {name: Option(lambda name=name: Fake(name, wrong)) for name in ("a", "b")})
    with pytest.raises(RequestError, match="^found id 7$"):
        session.run(feeds(8))


def test_the_float_file_runs_where_it_is_faster(monkeypatch, caplog):
    def choose(digest, candidates, batch, threads):
        times = {name: 1.0 if (len(batch["x"]) > 8) == name.endswith("+fp32") else 2.0 for name in candidates}
        return timing.Choice(min(times, key=times.get), threads, timing.size_class(batch), times, "")

    monkeypatch.setattr(quickest, "choose", choose)
    made = {"a": Option(lambda: Fake("a")), "a+fp32": Option(lambda: Fake("a")), "b": Option(lambda: Fake("b"))}
    session = QuickestSession("m", made)
    session.run(feeds(2))
    assert session.engine in "ab" and not caplog.records
    for _ in range(2):
        session.run(feeds(100))
    assert session.engine == "a+fp32"
    (record,) = caplog.records
    assert record.getMessage() == (
        "batches of 128 run the float model (a), which is faster here, 1.0 ms against 2.0 ms of int8 (a); --engine a "
        "keeps int8"
    )
    quickest.leave_out_float(judged := QuickestSession("m", made))
    judged.run(feeds(100))
    assert judged.engine in "ab"


def test_the_finest_form_runs_unless_another_is_clearly_faster(monkeypatch, tmp_path):
    monkeypatch.setenv("ZOO_HOME", str(tmp_path))
    times = {"native:fine": 1.04, "native:fast": 1.0, "native:slow": 1.03}
    monkeypatch.setattr(timing, "measure", lambda sessions, *_: [times[session.engine] for session in sessions])
    options = {name: (lambda name=name: Fake(name)) for name in times}
    choice = timing.choose("m", options, feeds(3), finest=list(times))
    assert choice.engine == "native:fine"
    times["native:fine"] = 1.1
    choice = timing.choose("m", options, feeds(3), finest=list(times), fresh=True)
    assert choice.engine == "native:fast"


def test_batches_are_varied_where_a_session_can(monkeypatch):
    class Varied(Fake):
        def varied(self, batch, seed):
            return {"x": np.full_like(batch["x"], seed)}

        def run(self, batch):
            seen.append(float(batch["x"][0, 0]))
            return super().run(batch)

    seen = []
    timing.measure([Varied("a")], feeds(2), 2)
    assert len(set(seen)) == len(seen) == 3 * timing.VARIANTS // 2
