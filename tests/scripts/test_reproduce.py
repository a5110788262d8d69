"""The command of `make bench`."""

import json

import pytest


def test_a_run_goes_on_with_the_parts_that_are_not_measured(tmp_path, monkeypatch, capsys):
    from scripts import reproduce  # with all that measures

    ran, faults = [], [ValueError("no data")]

    def first():
        """One."""
        ran.append("first")

    def second():
        """Two."""
        ran.append("second")
        if faults:
            raise faults.pop()

    monkeypatch.setattr(reproduce, "PARTS", {"first": first, "second": second})
    monkeypatch.setattr(reproduce, "STATE", tmp_path / "reproduce.json")
    monkeypatch.setattr(reproduce.reports, "PEERS", tmp_path)
    monkeypatch.setattr(reproduce.reports, "cpu_slug", lambda: "a-cpu")
    monkeypatch.setattr(reproduce.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(reproduce.machine, "commit", lambda: "abc")
    monkeypatch.setattr(reproduce.machine, "environment", dict)
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["reproduce.py"])
    with pytest.raises(SystemExit, match="reproduce: second: ValueError: no data"):
        reproduce.main()
    assert "minutes" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["reproduce.py", "--resume"])
    reproduce.main()
    reproduce.main()
    assert ran == ["first", "second", "second"]
    monkeypatch.setattr(reproduce.machine, "commit", lambda: "abd")
    reproduce.main()
    assert ran[3:] == ["first", "second"]
    parts = json.loads(reproduce.reports.peers_report("minutes").read_text())["parts"]
    cores = reproduce.machine.cores()
    assert parts["first"] == {"minutes": 0.0, "about": "One.", "commit": "abd", "cores": cores}
    assert parts.keys() == {"first", "second"}
