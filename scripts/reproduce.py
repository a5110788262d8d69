"""Measure again what README.md, MODELS.md and docs/benchmarks/ show, and render them from the reports.

    python scripts/reproduce.py [PART ...] [--resume]     all parts if none is named; `make bench` runs it

All parts together take less than three hours on two quiet cores. A part writes a report file for every model or
comparison, under zoo/weights/NAME/reports/ or scripts/peers/reports/; some parts also write the figures of a card. File
names contain the CPU, so reports of several machines are kept. A part that cannot be measured here (missing data) is
reported at the end; the other parts continue. The minutes of all parts are printed at the end; those of every CPU are
in docs/benchmarks/reports.md. --resume leaves out the parts that earlier runs of the same commit have measured
(build/reproduce.json). Peers that are not installed (extras `peers` and `ray`, and wrk, Debian's package) are missing
in the report. $ZOO_SHARED (by default ../shared) holds weights/ and data/criteo/, movielens/, cifar10/,
imagenet/nips17/, translation/ and stsb/.

Comparisons that take longer or need a cluster are run by hand (`python scripts/peers`): compression, soak, ray-serve,
communication, own-models, other choices of vision, translation and serving.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipelines.core import files, machine, settings
from pipelines.core.errors import ZooError
from scripts.peers import harness
from scripts.reproduction import recommenders, reports, services, translation, vision

PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part
    for part in (
        recommenders.quality,
        recommenders.shop,
        recommenders.families,
        recommenders.new_ids,
        recommenders.speed,
        recommenders.stream,
        recommenders.training,
        recommenders.instances,
        recommenders.peers,
        recommenders.runs,
        vision.images,
        services.encoder,
        vision.photos,
        vision.networks,
        vision.quantizers,
        vision.exported,
        recommenders.reading,
        recommenders.tables,
        translation.bleu,
        translation.translation,
        translation.imported,
        translation.threads,
        translation.students,
        translation.steps,
        services.texts,
        services.text_networks,
        services.contexts,
        services.cluster,
        services.servers,
    )
}


STATE = harness.ROOT / "build" / "reproduce.json"  # the commit, and the minutes of its measured parts


def main() -> None:
    """Runs the parts that the command line names, and renders the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all if none is named")
    parser.add_argument("--resume", action="store_true", help="leave out parts that runs of this commit have measured")
    options = parser.parse_args()
    parts = options.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"reproduce: unknown part {', '.join(unknown)}; choose among {', '.join(PARTS)}")
    settings.home().mkdir(parents=True, exist_ok=True)
    harness.use_development_weights()
    measured = measured_before()
    minutes = dict(measured) if options.resume else {}
    left_out = []
    for part in [part for part in parts if part not in minutes]:
        print(f"{part}: {(PARTS[part].__doc__ or '').splitlines()[0]}", flush=True)
        start = time.perf_counter()
        failure = run(PARTS[part])
        minutes[part] = round((time.perf_counter() - start) / 60, 1)
        print(f"{part}: took {minutes[part]} minutes", flush=True)
        if failure is None:
            measured[part] = minutes[part]
            files.write_json(STATE, {"commit": machine.commit(), "minutes": measured})
            report_minutes(part, minutes[part])
        else:
            left_out.append(f"{part}: {failure}")
    print("\n".join(f"{part:15}{spent:8.1f}" for part, spent in [*minutes.items(), ("minutes", sum(minutes.values()))]))
    subprocess.run([sys.executable, Path(__file__).with_name("render.py")], check=True)
    if left_out:
        sys.exit("\n".join(f"reproduce: {reason}" for reason in left_out))


def measured_before() -> dict[str, float]:
    """Returns the minutes of the parts that earlier runs of this commit measured."""
    state = files.read_json(STATE) if STATE.exists() else {}
    return dict(state["minutes"]) if state.get("commit") == machine.commit() else {}


def report_minutes(part: str, minutes: float) -> None:
    """Writes the minutes of a part into the report of this CPU, beside those of other parts."""
    path = reports.peers_report("minutes")
    parts = files.read_json(path)["parts"] if path.exists() else {}
    about = (PARTS[part].__doc__ or "").splitlines()[0]
    parts[part] = {"minutes": minutes, "about": about, "commit": machine.commit(), "cores": machine.cores()}
    most = max(facts["cores"] for facts in parts.values())
    files.write_json(path, {"parts": parts, "environment": machine.environment(threads=most)})


def run(part: Callable[[], None]) -> str | None:
    """Runs a part; returns why it failed, since hours of other parts may be still to come, else None."""
    try:
        part()
    except ZooError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        return f"{command} ended with {error.returncode}: {(error.stderr or '').strip()}"
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    main()
