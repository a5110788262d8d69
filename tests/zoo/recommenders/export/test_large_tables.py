"""Tables of gigabytes: they stay in files from the checkpoint to native.onnx, which gets the same bytes as in memory."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import zoo
from pipelines.core import machine
from pipelines.core.files import DiskFull
from pipelines.graph import io, large_weights, tensor_sizes

pytest.importorskip("torch", reason="needs the train extra")
layers = importlib.import_module("zoo.recommenders.models.layers")

ROOT = Path(__file__).resolve().parents[4]
SETTINGS = {"hidden": "16,8", "embedding_size": "32", "epochs": "1", "refit": "false", "l2_embeddings": "10"}


def test_built_from_files_as_in_memory(tmp_path, monkeypatch):
    log = tmp_path / "log.csv"
    made = [sys.executable, ROOT / "scripts/synthesize_log.py", log, "-n", "2000", "--users", "400", "--items", "300"]
    subprocess.run(made, check=True)
    monkeypatch.setattr(layers, "LARGE_ROWS", 0)
    monkeypatch.setattr(io.save_mapped, "__defaults__", (2**12,))
    mapped = []
    take = large_weights.take_external
    monkeypatch.setattr(large_weights, "take_external", lambda *a: mapped.append(arrays := take(*a)) or arrays)
    results = {}
    for name in ("memory", "files"):
        folder = tmp_path / name
        if name == "files":
            monkeypatch.setenv("ZOO_TABLE_MEMORY", "16KB")
            monkeypatch.setattr(tensor_sizes, "MAX_PROTOBUF_BYTES", 2**14)
            monkeypatch.setattr(large_weights, "LARGE_BYTES", 2**12)
        zoo.train("deepfm", str(log), folder, settings=SETTINGS)
        zoo.build(folder)
        results[name] = {
            engine: np.array([row["probability"] for row in zoo.pipeline(folder, precision="int8", engine=engine)(log)])
            for engine in ("onnxruntime", "native:int16")
        }
    files = tmp_path / "files"
    assert {path.name for path in files.glob("*.data")} == {
        f"{name}.onnx.data" for name in ("fp32", "rewritten", "int8", "native")
    }
    assert any(arrays and all(isinstance(array.base, np.memmap) for array in arrays.values()) for arrays in mapped)
    for name in ("native.onnx", "native.onnx.data"):
        assert (files / name).read_bytes() == (tmp_path / "memory" / name).read_bytes()
    for engine, expected in results["memory"].items():
        np.testing.assert_array_equal(results["files"][engine], expected)


def test_arrays_beyond_memory_are_in_files(monkeypatch):
    monkeypatch.setenv("ZOO_TABLE_MEMORY", "64KiB")
    assert not isinstance(machine.large_zeros((16, 1024), np.uint8).base, np.memmap)
    large = machine.large_zeros((17, 1024), np.uint8)
    assert isinstance(large.base, np.memmap) and large.flags.writeable and not large.any()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine.os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match=r"an array of 17,408 bytes to .* \(\$TMPDIR\): No space left"):
        machine.large_zeros((17, 1024), np.uint8)
