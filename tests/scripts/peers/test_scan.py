"""The scan of all engines at many batch sizes: families of click logs, third-party networks."""

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers.quirks import bias_of_the_first_column, rows_that_attend
from helpers.rewriting import needs_vnni

from pipelines.engines.openvino import forms
from pipelines.graph import io
from scripts.peers import harness
from scripts.peers.scan import scan

NETWORKS = "cnn,depthwise,text-encoder,gru-time-first,set,ranker,classifier"
WRONG = ("WRONG", "FAILED")
# as users open it, float or int8: OpenVINO's fault, see test_openvino_still_keeps_buffers_of_one_key
KNOWN = [("set.int8.onnx", "openvino-file")]


def scanned(work, *arguments):
    """Returns the rows of a report."""
    command = [sys.executable, harness.ROOT / "scripts" / "peers", "scan", "--work", work, "-o", work / "report.json"]
    done = subprocess.run([*map(str, [*command, *arguments])], capture_output=True, text=True, check=False)
    rows = json.loads((work / "report.json").read_text())["results"]
    wrong = [(row["model"], row["engine"]) for row in rows if row["verdict"] in WRONG]
    assert wrong in ([], KNOWN) and done.returncode == len(wrong), done.stderr
    return [row for row in rows if row["verdict"] == "ok"]


@pytest.mark.slow
@needs_vnni
def test_no_family_of_click_logs_is_wrong_in_any_engine(tmp_path):
    """DCN v2 crashed in OpenVINO at 2 to 8 rows, which the scan shows without the check."""
    pytest.importorskip("openvino")
    assert len(scanned(tmp_path, "--kinds", "families", "--sizes", "1,2,8,9,64")) == 5 * len(scan.LOG_FAMILIES)


@pytest.mark.slow
@needs_vnni
def test_no_network_that_people_bring_is_wrong_in_any_engine(tmp_path):
    """Where samples depend on each other, or time is first, OpenVINO was given padded batches."""
    pytest.importorskip("openvino")
    pytest.importorskip("torch", reason="needs the train extra")
    rows = scanned(tmp_path, "--kinds", "foreign", "--networks", NETWORKS, "--sizes", "1,2,3,8,9,64")
    assert {row["model"] for row in rows if row["engine"] == "openvino-file"} >= {"cnn.int8.onnx", "ranker.int8.onnx"}
    assert {row["model"] for row in rows if row["engine"] == "native"} == {
        "cnn.int8.onnx",
        "depthwise.int8.onnx",
        "classifier.int8.onnx",
    }


@pytest.mark.parametrize("unchecked", [False, True])
@needs_vnni
def test_a_wrong_result_is_seen(tmp_path, monkeypatch, unchecked):
    pytest.importorskip("openvino")
    monkeypatch.setattr(forms, "correct_form", forms.correct_form)
    monkeypatch.setattr(forms, "_VERDICTS", {})
    for name, graph, inputs in (("bias", bias_of_the_first_column(), "xv"), ("set", rows_that_attend(), "x")):
        path = io.save(graph, tmp_path / f"{name}.onnx")
        shape = [64, *(int(size) for size in graph.graph.inputs[0].shape[1:])]
        x = np.linspace(0.1, 2, np.prod(shape), dtype=np.float32).reshape(shape)
        np.savez(tmp_path / f"{name}.test.npz", **{key: np.sin(x) for key in inputs})
        report = scan.scan(scan.Scan(str(path), "file", "openvino", (1, 2, 3, 9, 64), 1, unchecked, None))
        assert "shares" in report, report
        assert (max(report["shares"].values()) > scan.ROUNDING["int8"]) is unchecked
        assert bool(report["form"]) is not unchecked


@pytest.mark.parametrize(
    ("shares", "larger", "verdict", "at"),
    [
        ({"1": 1e-6, "4": 8e-4, "128": 1e-4}, {"1": 1e-6, "4": 7e-4}, "ok", "4"),  # a sample that rounds differently
        ({"1": 1e-6, "4": 8e-4, "128": 1e-6}, {"1": 1e-6, "4": 1e-6}, "WRONG", "4"),
        ({"1": 1e-6, "4": 1e-6, "128": 2.0}, {"1": 2.0, "4": 2.0}, "WRONG", "128"),
        ({"1": 1e-6, "4": 2.0, "128": 2.0}, {"1": 2.0, "4": 2.0}, "WRONG", "4"),
    ],
)
def test_rounding_of_a_sample_is_no_fault_of_a_batch_size(monkeypatch, shares, larger, verdict, at):
    result = {"shares": shares, "larger": larger, "noise": 3e-4, "form": ""}
    monkeypatch.setattr(scan.processes, "in_process", lambda *_: result)
    row = scan.judged(scan.Scan("x.int8.onnx", "file", "openvino", (1, 4, 128), 1, False, None))
    assert (row["verdict"], row["at"]) == (verdict, at)
