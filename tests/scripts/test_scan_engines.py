"""The scan of all engines at many batch sizes: families of click logs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.rewriting import needs_vnni

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path, *arguments):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@needs_vnni
def test_no_family_of_click_logs_is_wrong_in_any_engine(tmp_path):
    """DCN v2 crashed in OpenVINO at 2 to 8 rows, which the scan shows without the check."""
    pytest.importorskip("openvino")
    scan = ROOT / "scripts" / "scan_engines.py"
    run(tmp_path, ROOT / "scripts" / "synthesize_log.py", "shop.csv", "-n", 6000)
    done = run(tmp_path, scan, "shop-clicks", "--train", "shop.csv", "--sizes", 1, 2, 8, 9, 64)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len([each for each in lines if each.startswith("ok ")]) == 18, done.stdout
