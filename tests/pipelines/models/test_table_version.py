"""The version under which build.json keeps that a table and its graph belong together."""

import hashlib
import json

from helpers.rewriting import model

from pipelines.graph import io
from pipelines.models import stages
from pipelines.quantization.calibration.table import CalibrationTable

# (build.TABLE_VERSION, digest of what is read of the table and the graph below with that version)
RECORDED = (1, "b227a6cd4379d187")

GRAPH = """(float[n, 2] x) => (float[n, 3] y)
<float[2, 3] w = {1, 2, 3, -1, -2, -3}, float[3] b = {0.5, 1, -1}>
{ h = MatMul(x, w)  z = Add(h, b)  y = LeakyRelu<alpha = 0.5>(z) }"""


def test_the_version_changes_with_what_is_read(tmp_path):
    graph = model(GRAPH)
    tensors = {
        "h": {"minimum": -2.0, "maximum": 2.5, "low": -1.5, "high": 2.0, "count": 6, "method": "mse"},
        "y": {"minimum": 0.0, "maximum": 3.0, "low": 0.0, "high": 3.0, "count": 9},
    }
    table = {"graph": io.digest(graph), "observer": "minmax", "samples": 3, "samples_digest": "abc", "tensors": tensors}
    table |= {"clip": True, "equalization": {"h": [1.0, 2.0]}, "bias": {"y": [0.5]}, "recipe": {"clip": True}}
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(table))
    loaded = CalibrationTable.load(path)
    loaded.require(graph)
    read = json.dumps([loaded.graph, loaded.save(path).read_text()])
    stamp = (stages.TABLE_VERSION, hashlib.sha256(read.encode()).hexdigest()[:16])
    assert stamp == RECORDED, (
        "a table or the digest of its graph is read otherwise than when RECORDED was written: bump TABLE_VERSION in "
        f"pipelines/models/stages.py, so that built folders are checked anew, and record {stamp} here with the new version"
    )
