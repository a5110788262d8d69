"""Holds every engine to ONNX Runtime at many batch sizes: zoo models, model folders and .onnx files.

    python scripts/scan_engines.py shop-clicks MODEL_FOLDER net.onnx          samples of net.onnx: net.test.npz
    python scripts/scan_engines.py --train shop.csv --work DIR                every family of click logs, trained first

Every model runs in each engine and precision in a process of its own, so that a crash is a line of the report. With
--unchecked, OpenVINO runs with static shapes as they are, which shows what its check keeps out. Exit code 1: a model
crashed, or differs more at one batch size than rounding explains.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core.errors import ZooError, one_line
from pipelines.engines import catalog
from pipelines.engines.agreement import largest_difference
from pipelines.engines.openvino import forms
from pipelines.engines.openvino.probe import resized

SIZES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 64, 100, 128)
LOG_FAMILIES = ("wide-deep", "deepfm", "dcn-v2", "dlrm", "two-tower")
SETTINGS = ("epochs=1", "l2_embeddings=10", "refit=false")
ROUNDING = 1e-3  # share of the power; int8 in two engines differs by less
UNEVEN = 30  # times the least difference of all batch sizes


def main() -> None:
    """Runs the scan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names, model folders and .onnx files")
    parser.add_argument("--train", metavar="LOG", help="train every family of click logs on LOG and scan it")
    parser.add_argument("--data", default=None, help="samples of model folders [default: LOG, or the model's own]")
    parser.add_argument("--work", type=Path, default=Path("scan"), help="folder of trained models")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "int8"])
    parser.add_argument("--engines", nargs="+", default=["openvino", "native"])
    parser.add_argument("--unchecked", action="store_true", help="OpenVINO with static shapes, without its check")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(scan(**json.loads(given.one))))
        return
    models = given.models + (trained(given.train, given.work) if given.train else [])
    failed = False
    for model in models:
        for precision in ["file"] if model.endswith(".onnx") else given.precisions:
            for engine in given.engines:
                if engine == "native" and precision not in ("int8", "file"):
                    continue
                request = {"model": model, "precision": precision, "engine": engine, "sizes": list(given.sizes)}
                request |= {"threads": given.threads, "unchecked": given.unchecked, "data": given.data or given.train}
                failed |= run_child(request)
    sys.exit(int(failed))


def trained(log: str, work: Path) -> list[str]:
    """Trains every family of click logs; models that are there are kept.

    Args:
        log: Click log with a header.
        work: Folder of the models.

    Returns:
        The model folders.
    """
    folders = []
    for family in LOG_FAMILIES:
        folder = work / family
        if not (folder / "card.json").is_file():
            more = [word for each in SETTINGS for word in ("--set", each)]
            subprocess.run(["zoo", "train", family, "--data", log, "-o", str(folder), *more], check=True)
        folders.append(str(folder))
    return folders


def run_child(request: dict[str, Any]) -> bool:
    """Runs one scan in a child process and prints its line.

    Args:
        request: Arguments of `scan`.

    Returns:
        Whether it failed.
    """
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps(request)], capture_output=True, text=True, check=False
    )
    name = f"{request['model']} {request['precision']} {request['engine']}"
    if done.returncode:
        why = f"signal {-done.returncode}" if done.returncode < 0 else done.stderr.strip().rpartition("\n")[2]
        print(f"FAILED   {name}: {why}", flush=True)
        return True
    found = json.loads(done.stdout.strip().rpartition("\n")[2])
    if "left_out" in found:
        print(f"left out {name}: {found['left_out']}", flush=True)
        return False
    shares = {int(size): share for size, share in found["shares"].items()}
    worst = max(shares, key=shares.__getitem__)
    wrong = shares[worst] > ROUNDING and shares[worst] > UNEVEN * min(shares.values())
    more = f"; {found['form']}" if found.get("form") else ""
    print(
        f"{'WRONG' if wrong else 'ok':8} {name}: at most {shares[worst]:.2g} (batch size {worst}), at least "
        f"{min(shares.values()):.2g}{more}",
        flush=True,
    )
    return wrong


def scan(
    model: str, precision: str, engine: str, sizes: list[int], threads: int, *, unchecked: bool, data: str | None
) -> dict[str, Any]:
    """Compares an engine with ONNX Runtime at every batch size.

    Args:
        model: Name, model folder or .onnx file.
        precision: Precision of a model; "file" for an .onnx file.
        engine: Name of the engine.
        sizes: Batch sizes.
        threads: Intra-op threads.
        unchecked: Run OpenVINO with static shapes.
        data: Samples of a model; None: its own.

    Returns:
        {"shares": difference as a share of an output's power by batch size, "form": of OpenVINO}, or {"left_out":
        why}.
    """
    if unchecked:
        forms.correct_form = lambda *_: forms.STATIC
    try:
        if precision == "file":
            run, reference = (catalog.load(model, name, threads).run for name in (engine, "onnxruntime"))
            with np.load(Path(model).with_suffix(".test.npz")) as arrays:
                batch = {name: arrays[name][: max(sizes)] for name in arrays.files}
        else:
            import zoo

            pipes = [zoo.pipeline(model, precision, each, threads, max(sizes)) for each in (engine, "onnxruntime")]
            run, reference = (each.predict for each in pipes)
            batch = pipes[1].preprocess(pipes[1].example(max(sizes), data))
        shares = {}
        for size in sizes:
            example = resized(batch, size)
            shares[size] = largest_difference(engine, run(example), reference(example))[0]
    except ZooError as error:
        return {"left_out": one_line(error)}
    used = [each.form for each in forms._VERDICTS.values() if each.form != forms.STATIC]
    return {"shares": shares, "form": used[0] if used else ""}


if __name__ == "__main__":
    main()
