"""Scales of an earlier model for a newer one, so that the rows that did not change keep their bits."""

from __future__ import annotations

from dataclasses import replace

from pipelines.graph import io
from pipelines.models import stages
from pipelines.models.family import Lowerable
from pipelines.models.folder import ModelFolder
from pipelines.models.npz import rows_of, scales_of, write_npz
from pipelines.models.record import SCALES
from pipelines.quantization.calibration.table import CalibrationTable

ROOM = 1.25  # factor by which a range grows that an earlier one does not hold
TABLE, GRAPH = "calibration.json", "rewritten.onnx"


def keep_scales(folder: ModelFolder, earlier: ModelFolder) -> list[str]:
    """Builds a model with the scales of an earlier one as long as its values fit, so that equal rows keep their bits.

    A range that no longer fits is widened by `ROOM`, so that the ranges of the next models fit.

    Args:
        folder: Model folder.
        earlier: Folder of the earlier model, of the same network.

    Returns:
        Names of the ranges of activations that were widened.
    """
    stages.build(earlier, until=TABLE)
    stages.build(folder, until=TABLE)
    table, before = (CalibrationTable.load(model.path / TABLE) for model in (folder, earlier))
    tensors, widened = dict(table.tensors), []
    for name, entry in table.tensors.items() if table.observer == before.observer else ():
        if (kept := before.tensors.get(name)) is None or entry.method != kept.method:
            continue
        if kept.low <= entry.low and entry.high <= kept.high:
            tensors[name] = replace(entry, low=kept.low, high=kept.high)
        else:
            widened.append(name)
            tensors[name] = replace(entry, low=min(kept.low, ROOM * entry.low), high=max(kept.high, ROOM * entry.high))
    if not folder.record[TABLE].get("own_data"):
        stages.set_table(folder, replace(table, tensors=tensors), own_data=False)
    if isinstance(earlier.entry, Lowerable):
        graph, kept_scales = io.load(earlier.path / GRAPH), scales_of(earlier)
        rows = rows_of(earlier)
        _, _, scales = earlier.entry.lower(graph, before, earlier.recipe, kept_scales, rows, earlier.imported)
        write_npz(folder.path / SCALES, scales)
    return widened
