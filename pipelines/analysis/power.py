"""Energy of the processor's packages in joules, by RAPL's counters, if the kernel exposes them."""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
PACKAGES = "intel-rapl:[0-9]*"  # AMD's have the same name; a part of a package is called intel-rapl:0:0


class Meter:
    """Counts energy from its creation.

    Attributes:
        fault: Why the counters cannot be read, in one line, or "".
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._zones = [zone for zone in sorted(root.glob(PACKAGES)) if zone.name.count(":") == 1]
        self._total, self._last, self.fault = 0, {}, ""
        if not self._zones:
            self.fault = f"power cannot be read: no package of RAPL in {root}"
            return
        try:
            self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in self._zones]
            self._last = self._read()
        except (OSError, ValueError) as error:
            self.fault = f"power cannot be read: {error}"

    def _read(self) -> dict[Path, int]:
        return {zone: int((zone / "energy_uj").read_text()) for zone in self._zones}

    def joules(self) -> float:
        """Returns the energy of all packages since the creation, in joules.

        Call it at least once a minute, within which a counter wraps around at most once.

        Raises:
            OSError: A counter became unreadable.
        """
        now = self._read()
        for zone, most in zip(self._zones, self._ranges, strict=True):
            gone = now[zone] - self._last[zone]
            self._total += gone if gone >= 0 else gone + most
        self._last = now
        return self._total / 1e6
