"""The generator of synthetic rows, and what a model learns of them."""

from __future__ import annotations

import gzip
import subprocess
import sys

import numpy as np
import pytest
from helpers.criteo_logs import ROOT, SCRIPT, read, synthesize, synthetic_lines, write_synthetic

from zoo.recommenders import criteo
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("synthetic") / "rows.tsv")


def run_script(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, check=False)


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["synthesize_criteo.py", *map(str, arguments)])
    synthesize().main()


def test_script_output_is_the_same_everywhere(tmp_path, monkeypatch):
    result = run_script("-n", 300, "-o", "-", "--seed", 4)
    assert (result.returncode, result.stderr) == (0, b"")
    assert len(result.stdout.splitlines()) == 300
    for name in ("rows.tsv", "rows.tsv.gz"):
        main(monkeypatch, "-n", 300, "-o", tmp_path / name, "--seed", 4)
    assert (tmp_path / "rows.tsv").read_bytes() == result.stdout
    packed = (tmp_path / "rows.tsv.gz").read_bytes()
    assert gzip.decompress(packed) == result.stdout
    assert packed[4:8] == bytes(4)  # no time in it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.tsv", "rows.tsv.gz"]
    main(monkeypatch, "-n", 300, "-o", tmp_path / "rows.tsv", "--seed", 5)
    assert (tmp_path / "rows.tsv").read_bytes() != result.stdout


def test_script_refuses_wrong_requests(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_bytes(b"")
    for arguments, message in (
        (("-n", 0, "-o", tmp_path / "rows.tsv"), "expected at least 1 row"),
        (("-n", 5, "-o", tmp_path / "rows.tsv", "--seed", -1), "a seed from 0"),
        (("-n", 5, "-o", tmp_path / "rows.tsv", "--click-rate", 1.5), "a click rate"),
        (("-n", 5, "-o", tmp_path / "file" / "rows.tsv"), "cannot write"),
    ):
        with pytest.raises(SystemExit) as exit_code:
            main(monkeypatch, *arguments)
        assert exit_code.value.code == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_stopped_script_leaves_nothing_behind(tmp_path, monkeypatch):
    script = synthesize()

    def stopped(*arguments, **keywords):
        yield next(blocks(*arguments, **keywords))
        raise KeyboardInterrupt

    blocks = script.blocks
    monkeypatch.setattr(script, "blocks", stopped)
    monkeypatch.setattr(sys, "argv", ["", "-n", "50000", "-o", str(tmp_path / "rows.tsv.gz")])
    with pytest.raises(SystemExit) as exit_code:
        script.main()
    assert exit_code.value.code == 130
    assert list(tmp_path.iterdir()) == []


def test_the_first_rows_do_not_depend_on_how_many_there_are():
    script = synthesize()
    long, short = synthetic_lines(script.BLOCK + 10), synthetic_lines(script.BLOCK - 10)
    assert (len(long), len(short)) == (script.BLOCK + 10, script.BLOCK - 10)
    assert long[: len(short)] == short
    assert len(set(long)) == len(long)
    bare = synthetic_lines(20, label=False)
    assert [row.split(b"\t", 1)[1] for row in long[:20]] == bare


def test_synthetic_rows_look_like_the_log(synthetic):
    rows = read(synthetic)
    assert rows.labels.mean() == pytest.approx(0.22, abs=0.015)
    missing = np.isnan(rows.numbers).mean(axis=0)
    assert (missing[1], missing[7]) == (0, 0)
    assert missing[11] == pytest.approx(0.76, abs=0.02)
    assert rows.numbers[:, 1].min() == -1
    assert np.nanmin(np.delete(rows.numbers, 1, axis=1)) == 0
    first = [row.split(b"\t") for row in synthetic.read_bytes().splitlines()]
    categories = [{row[14 + field] for row in first} - {b""} for field in range(26)]
    assert all(len(value) == 8 and int(value, 16) >= 0 for values in categories for value in values)
    assert (len(categories[8]), len(categories[19])) == (3, 4)  # small vocabularies are used up
    assert len(categories[2]) > 10_000  # large ones never
    counts = np.unique([row[16] for row in first], return_counts=True)[1]
    assert counts.max() > 20 * counts.mean()  # and both are skewed
    assert synthetic_rate(0.5) == pytest.approx(0.5, abs=0.03)


def synthetic_rate(rate):
    return np.mean([row[:1] == b"1" for row in synthetic_lines(4000, click_rate=rate)])


def auc(labels, scores):
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    clicks = labels.sum()
    return (ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks))


def logistic_regression(train, test, epochs=3):
    """Scores of `test` after AdaGrad on `train`: one weight per bucket and number."""
    weights, slopes = np.zeros((26, 1000)), np.zeros(14)
    squares, steep = np.full_like(weights, 1e-6), np.full(14, 1e-6)
    fields = np.arange(26)

    def score(inputs):
        numbers = np.column_stack([inputs["numbers"], np.ones(len(inputs["ids"]))])
        return weights[fields, inputs["ids"]].sum(axis=1) + numbers @ slopes, numbers

    features = Features(criteo.schema(train))
    train, test = (Rows.concatenate(list(features.read(path))) for path in (train, test))
    inputs = features.encode(train)
    for begin in list(range(0, len(train), 256)) * epochs:
        part = {name: array[begin : begin + 256] for name, array in inputs.items()}
        scores, numbers = score(part)
        error = (1 / (1 + np.exp(-scores)) - train.labels[begin : begin + 256]) / len(scores)
        gradient = np.zeros_like(weights)
        np.add.at(gradient, (fields, part["ids"]), error[:, None])
        squares += gradient**2
        weights -= 0.03 * gradient / np.sqrt(squares)
        steep += (numbers.T @ error) ** 2
        slopes -= 0.1 * (numbers.T @ error) / np.sqrt(steep)
    return score(features.encode(test))[0]


@pytest.mark.slow
def test_the_planted_model_can_be_learnt_and_holds_for_other_seeds(synthetic, tmp_path):
    other = tmp_path / "other.tsv"
    with other.open("wb") as file:
        synthesize().write(file, 10_000, 6)
    assert auc(read(other).labels, logistic_regression(synthetic, other)) > 0.72


@pytest.mark.slow
def test_speed_and_memory(tmp_path):
    file = tmp_path / "rows.tsv"
    assert run_script("-n", 300_000, "-o", file).returncode == 0
    code = (
        "import re, sys, time\nfrom zoo.recommenders import criteo; from zoo.recommenders.data.features import Features\n"
        "f = Features(criteo.schema(sys.argv[1])); t = time.process_time()\n"
        "n = sum(len(f.encode(rows)['ids']) for rows in f.read(sys.argv[1]))\n"
        "print(n, n / (time.process_time() - t), int(re.search(r'VmHWM:\\s*(\\d+)', "
        "open('/proc/self/status').read())[1]) / 1024)"
    )
    result = subprocess.run([sys.executable, "-c", code, file], cwd=ROOT, capture_output=True, text=True, check=True)
    rows, speed, memory = map(float, result.stdout.split())
    assert rows == 300_000
    assert speed > 200_000  # about a million on a quiet machine
    assert memory < 300  # MB; the file alone has 70
