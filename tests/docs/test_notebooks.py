"""The notebooks run from their first to their last cell within three minutes and show plots; no outputs are committed."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from pipelines.core.settings import mirror

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SECONDS = 180  # of a notebook on two cores


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code and not [cell for cell in code if cell["outputs"] or cell["execution_count"]]
    assert notebook["cells"][0]["source"][0].startswith("# ")
    for cell in code:
        compile("".join(cell["source"]), path.name, "exec")


def settings(path: Path, folder: Path) -> dict[str, str]:
    """Variables in which a notebook finds its model; the models are tiny and random."""
    if path.stem == "opus-mt-to-a-server":
        pytest.importorskip("transformers", reason="needs the test extra")
        from helpers.huggingface_folders import make

        make("marian", folder / "opus-mt-en-de")
        return {"FOLDER": str(folder / "opus-mt-en-de")}
    if path.stem == "search-your-texts":
        pytest.importorskip("transformers", reason="needs the test extra")
        from helpers.text_models import built

        return {"MODEL": str(built(folder / "encoder", 0))}
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_show_plots(path: Path, tmp_path: Path, zoo_home: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs the test extra")
    nbformat = pytest.importorskip("nbformat", reason="needs the test extra")
    kernels = pytest.importorskip("ipykernel.kernelspec", reason="needs the test extra")
    pytest.importorskip("torch", reason="needs the train extra")
    pytest.importorskip("pandas", reason="needs the test extra")
    kernels.install(user=False, prefix=str(tmp_path / "kernels"))  # a kernel of this Python, whatever is installed
    more = {"ZOO_HOME": str(zoo_home), "ZOO_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    more |= {
        "JUPYTER_PATH": str(tmp_path / "kernels" / "share" / "jupyter"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    more |= {"ZOO_MIRROR": mirror()} if mirror() else {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (more | settings(path, tmp_path)).items():
            patch.setenv(name, value)
        notebook = nbformat.read(path, as_version=4)
        work = tmp_path / "work"
        work.mkdir()
        start = time.monotonic()
        nbclient.NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(work)}}
        ).execute()
    assert time.monotonic() - start < SECONDS
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert not [output for output in outputs if output.output_type == "error"]
