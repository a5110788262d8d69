"""What trainings of all tasks share: their curves."""

import pytest
from PIL import Image

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("matplotlib", reason="needs the train extra")

from zoo.training.runs import plot_curves


@pytest.mark.parametrize(("epochs", "best"), [(1, None), (3, 2)])
def test_curves_are_drawn(tmp_path, epochs, best):
    history = [{"epoch": epoch, "loss": 1 / epoch, "auc": 1 - 1 / epoch} for epoch in range(1, epochs + 1)]
    loss, auc = {"loss": ("loss, held out", "C0-")}, {"auc": ("AUC, held out", "C1-")}
    for name in ("curves.png", "again.png"):
        plot_curves(tmp_path / name, history, loss, auc, ("loss", "AUC"), best)
    with Image.open(tmp_path / "curves.png") as image:
        assert image.size == (840, 480) and len(image.convert("RGB").getcolors(1 << 20)) > 10
    assert (tmp_path / "curves.png").read_bytes() == (tmp_path / "again.png").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "again.png"}
