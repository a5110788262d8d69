import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,500 synthetic labelled rows."""
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"
    subprocess.run([sys.executable, ROOT / "scripts" / "synthesize_criteo.py", "-n", "1500", "-o", path], check=True)
    return path


@pytest.fixture(scope="session")
def trained(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Wide & Deep model, trained for one epoch and built up to int8."""
    pytest.importorskip("tensorflow", reason="training needs the train extra")
    import zoo

    folder = tmp_path_factory.mktemp("models") / "small"
    settings = {"epochs": "1", "hidden": "64,32", "buckets": "100", "embedding_size": "8", "validation": "500", "refit": "false"}
    zoo.train("wide-deep", str(rows), folder, settings=settings)
    zoo.build(folder)
    return folder
