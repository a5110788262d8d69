"""RAPL's counters, in a folder that looks like the kernel's."""

import pytest

from pipelines.analysis.power import Meter


def zone(folder, name, energy, most=1_000_000):
    place = folder / name
    place.mkdir(exist_ok=True)
    (place / "energy_uj").write_text(f"{energy}\n")
    (place / "max_energy_range_uj").write_text(f"{most}\n")


def test_joules_of_all_packages_and_a_counter_that_begins_anew(tmp_path):
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        zone(tmp_path, name, 900_000)
    meter = Meter(tmp_path)
    assert meter.fault == "" and meter.joules() == 0
    zone(tmp_path, "intel-rapl:0", 950_000)
    zone(tmp_path, "intel-rapl:0:0", 950_000)  # a part of package 0, which has it already
    assert meter.joules() == pytest.approx(0.05)
    zone(tmp_path, "intel-rapl:1", 100_000)
    assert meter.joules() == pytest.approx(0.25)


def test_why_nothing_can_be_read_is_said(tmp_path):
    assert Meter(tmp_path).fault == f"power cannot be read: no package of RAPL in {tmp_path}"
    zone(tmp_path, "intel-rapl:0", 1)
    (tmp_path / "intel-rapl:0/energy_uj").write_text("much")
    assert "power cannot be read" in Meter(tmp_path).fault
