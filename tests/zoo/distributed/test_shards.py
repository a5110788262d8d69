"""Runs in shards: parts, resuming and merged results."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import sha256
from pipelines.engines import catalog
from pipelines.engines.native.forms import Forms
from zoo.distributed import arrow_scorer, parts, remote_files, shards
from zoo.distributed.shards import ShardedRun, check, run_shard
from zoo.recommenders import log_pipeline

pytestmark = pytest.mark.usefixtures("shared_home")

CLICKS = "shop-clicks"
IMAGES = "mobilenet-v1-cifar10"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The sample of shop-clicks as CSV with an empty line and a line break in quotes, as .gz and as Parquet of several
    row groups.
    """
    folder = tmp_path_factory.mktemp("log")
    with gzip.open(zoo.load(CLICKS).path / "sample.csv.gz", "rt", newline="") as file:
        header, *rows = file.read().splitlines(keepends=True)
    quoted = rows[0].rstrip("\n").rsplit(",", 1)[0] + ',"i1|i2\ni3"\n'
    (folder / "a.csv").write_text(header + "".join([*rows[:300], "\n", quoted, *rows[300:]]), newline="")
    with gzip.open(folder / "b.csv.gz", "wt", newline="") as file:
        file.write(header + "".join(rows[:50]))
    from zoo.recommenders.data.logs import open_log

    table = pa.Table.from_batches(open_log(folder / "a.csv").batches())
    pq.write_table(table, folder / "c.parquet", row_group_size=100)
    return folder


@pytest.fixture
def small(monkeypatch):
    """Parts of a few rows."""
    monkeypatch.setattr(parts, "MIN_PART_BYTES", 8192)
    monkeypatch.setattr(parts, "MIN_PART_ROWS", 150)
    monkeypatch.setattr(parts, "IMAGES_PER_PART", 2)


def union(found):
    return pa.concat_tables(pq.read_table(path) for path in found["files"])


def test_shards_together_write_what_one_process_writes(log, small, tmp_path):
    inputs = [str(log / "*.csv"), str(log / "b.csv.gz"), str(log / "c.parquet")]
    whole = zoo.run(CLICKS, [str(log / name) for name in ("a.csv", "b.csv.gz", "c.parquet")], tmp_path / "one.parquet")
    for i in (2, 1, 3):
        stats = run_shard(CLICKS, inputs, tmp_path / "out", f"{i}/3")
        assert stats["parts"] > 1 and not stats["kept"]
    stats = check(tmp_path / "out")
    assert union(stats).equals(pq.read_table(tmp_path / "one.parquet"))
    assert {name: stats[name] for name in ("rows", "clicks", "skipped")} == {
        name: whole[name] for name in ("rows", "clicks", "skipped")
    }
    assert stats["expected_clicks"] == pytest.approx(whole["expected_clicks"], abs=0.01 * stats["parts"])


@pytest.mark.parametrize(("first", "end"), [(0, "\n"), (0, "\n\n"), (300, "\n")], ids=["", "blank", "late"])
def test_parts_of_json_lines_have_the_columns_of_all(log, small, tmp_path, monkeypatch, first, end):
    """Objects may leave out what is null, and blank lines may lie where a part begins."""
    monkeypatch.setattr(log_pipeline, "HEAD", 10)
    rows = pq.read_table(log / "c.parquet").to_pylist()[:400]
    sparse = [
        row if 0 <= index - first < 5 else {key: value for key, value in row.items() if value and key != "age"}
        for index, row in enumerate(rows)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + end for row in sparse))
    run_shard(CLICKS, [str(tmp_path / "log.jsonl")], tmp_path / "out")
    zoo.run(CLICKS, [str(tmp_path / "log.jsonl")], tmp_path / "one.parquet")
    stats = check(tmp_path / "out")
    assert stats["parts"] > 2 and union(stats).equals(pq.read_table(tmp_path / "one.parquet"))


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_parts_of_partitions_have_the_columns_of_their_path(log, small, tmp_path, suffix):
    """The files are read in natural order, as by a single process."""
    table = pq.read_table(log / "c.parquet")
    stored = table.drop_columns(["country"])
    for index, country in enumerate(["DE", "FR2", "FR10", "__HIVE_DEFAULT_PARTITION__"]):
        place = tmp_path / "hive" / f"country={country}"
        place.mkdir(parents=True)
        part = stored.slice(index * 300, 300)
        if suffix == ".parquet":
            pq.write_table(part, place / "a.parquet", row_group_size=100)
        elif suffix == ".csv":
            part.to_pandas().to_csv(place / "a.csv", index=False)
        else:
            (place / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part.to_pylist()))
    for name in ("hive", "hive/country=DE/a" + suffix, "hive/*/*" + suffix):
        output = tmp_path / "out" / name.replace("/", "-").replace("*", "-")
        run_shard(CLICKS, [str(tmp_path / name)], output)
        zoo.run(CLICKS, [str(tmp_path / name)], tmp_path / "one.parquet")
        stats = check(output)
        assert stats["parts"] > 1 and union(stats).equals(pq.read_table(tmp_path / "one.parquet"))


def test_a_column_that_the_first_line_of_json_lacks(log, small, tmp_path):
    rows = pq.read_table(log / "c.parquet").to_pylist()[:400]
    del rows[0]["age"], rows[0]["country"]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_shard(CLICKS, [str(tmp_path / "log.jsonl")], tmp_path / "out")
    zoo.run(CLICKS, [str(tmp_path / "log.jsonl")], tmp_path / "one.parquet")
    stats = check(tmp_path / "out")
    assert stats["parts"] > 2 and union(stats).equals(pq.read_table(tmp_path / "one.parquet"))


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_part_without_a_good_row_is_an_empty_one(log, tmp_path, suffix):
    header, *rows = (log / "a.csv").read_text().splitlines(keepends=True)
    (tmp_path / "a.csv").write_text(header + "".join(rows[:20]))
    (tmp_path / "b.csv").write_text(header + "x\n" * 7)
    (tmp_path / "c.csv").write_text(header + "y,z\n" + "".join(rows[:3]))
    inputs = [str(tmp_path / name) for name in ("a.csv", "b.csv", "c.csv")]
    run_shard(CLICKS, inputs, tmp_path / "out", format=suffix, on_error="skip")
    whole = zoo.run(CLICKS, inputs, tmp_path / f"one{suffix}", on_error="skip")
    stats = check(tmp_path / "out")
    assert stats["parts"] == 3 and stats["skipped"] == whole["skipped"] == 8 and stats["rows"] == whole["rows"] == 23
    if suffix == ".parquet":
        assert union(stats).equals(pq.read_table(tmp_path / "one.parquet"))
    else:
        lines = [line for path in stats["files"] for line in Path(path).read_text().splitlines()[1:]]
        assert lines == (tmp_path / "one.csv").read_text().splitlines()[1:]
    with pytest.raises(RequestError, match="part 1 .*b.csv"):
        run_shard(CLICKS, inputs, tmp_path / "strict")


def test_files_that_hold_only_a_header_are_no_parts(log, tmp_path):
    header, *rows = (log / "a.csv").read_text().splitlines(keepends=True)
    (tmp_path / "a.csv").write_text(header + "".join(rows[:20]))
    (tmp_path / "b.csv").write_text(header)
    run_shard(CLICKS, [str(tmp_path / "*.csv")], tmp_path / "out")
    zoo.run(CLICKS, [tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "one.parquet")
    stats = check(tmp_path / "out")
    assert stats["parts"] == 1 and union(stats).equals(pq.read_table(tmp_path / "one.parquet"))
    with pytest.raises(RequestError, match="found no row in .*b.csv"):
        run_shard(CLICKS, [str(tmp_path / "b.csv")], tmp_path / "other")


@pytest.mark.parametrize("name", ["part-00000.parquet", "part-00000.json"])
@pytest.mark.parametrize("place", ["{}", "{}/*", "file://{}/*"])
def test_results_never_replace_the_input(log, tmp_path, name, place):
    if "://" in place:
        pytest.importorskip("fsspec")
    kept = (tmp_path / name).write_bytes((log / "c.parquet").read_bytes())
    with pytest.raises(RequestError, match=f"the output .*{name} would replace the input "):
        run_shard(CLICKS, [place.format(tmp_path)], tmp_path)
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [(name, kept)]


def test_what_is_done_is_kept_and_what_is_damaged_done_again(log, small, tmp_path):
    inputs, out = [str(log / "a.csv")], tmp_path / "out"
    first = run_shard(CLICKS, inputs, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert run_shard(CLICKS, inputs, out)["kept"] == first["parts"]
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / "part-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(ZooError, match=r"lacks 1 of \d+ parts \(1\)"):
        check(out)
    (out / "part-00001.parquet").unlink()
    assert run_shard(CLICKS, inputs, out)["kept"] == first["parts"] - 1
    check(out)


def test_another_run_is_not_mixed_in(log, small, tmp_path):
    source = tmp_path / "log.csv"
    shutil.copy(log / "a.csv", source)
    run_shard(CLICKS, [str(source)], tmp_path / "out")
    with pytest.raises(RequestError, match="differs in digest, precision"):
        run_shard(CLICKS, [str(source)], tmp_path / "out", precision="fp32")
    source.write_bytes(source.read_bytes() * 2)
    with pytest.raises(RequestError, match="differs in files"):
        run_shard(CLICKS, [str(source)], tmp_path / "out")


def test_the_native_form_is_part_of_a_run(log, small, tmp_path, monkeypatch):
    """A machine with other caches lowers the model in another way, so that the last digits differ."""
    inputs, out = [str(log / "a.csv")], tmp_path / "out"
    run_shard(CLICKS, inputs, out, "1/2")
    plan = json.loads((out / "plan.json").read_text())
    form = sha256(zoo.load(CLICKS).path / "native.onnx")
    engine = catalog.chosen_form(zoo.load(CLICKS).path / "native.onnx")
    assert (plan["engine"], plan["form"]) == (engine, form) and engine.startswith("native:")
    manifest = json.loads((out / "part-00000.json").read_text())
    assert (manifest["engine"], manifest["form"]) == (engine, form)
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "same"))
    run_shard(CLICKS, inputs, out, "2/2")
    check(out)
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(machine, "caches", lambda: {"L1d": 0, "L2": 0, "L3": 0})
    with pytest.raises(RequestError, match=r"holds a run whose native form of the model .* --engine onnxruntime"):
        run_shard(CLICKS, inputs, out, "2/2")
    old = {key: value for key, value in plan.items() if key != "form"} | {"engine": "native"}
    (out / "plan.json").write_text(json.dumps(old))
    run_shard(CLICKS, inputs, out, "2/2")  # a run of 0.2 goes on


@pytest.mark.slow
def test_shards_at_once_write_what_one_process_writes(log, small, tmp_path):
    """Every shard is a first use of its own: byte for byte, and the way that computed it is named."""
    command = [sys.executable, "-m", "zoo", "run", CLICKS, str(log / "a.csv"), "-o", str(tmp_path / "out"), "--shard"]
    running = [
        subprocess.Popen(
            [*command, f"{i + 1}/3"],
            env={**os.environ, "ZOO_HOME": str(tmp_path / f"home{i}")},
            cwd=Path(__file__).parents[3],
            stdout=subprocess.DEVNULL,
        )
        for i in range(3)
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    engine = json.loads((tmp_path / "out" / "plan.json").read_text())["engine"]
    zoo.run(CLICKS, log / "a.csv", tmp_path / "one.parquet", engine=engine)
    assert union(check(tmp_path / "out")).equals(pq.read_table(tmp_path / "one.parquet"))


def test_shards_run_the_form_of_the_plan_whatever_they_would_choose(log, small, tmp_path, monkeypatch):
    """Of processes that begin at once the first one to write the plan decides."""
    path = zoo.load(CLICKS).ensure("native.onnx")
    first, other = (f"native:{name}" for name in Forms(path).names[:2])
    arguments = (CLICKS, [str(log / "a.csv")], tmp_path / "out")
    split, run = shards.split_inputs, []

    def meanwhile(*options):
        monkeypatch.setattr(shards, "split_inputs", split)
        monkeypatch.setattr(catalog, "chosen_form", lambda _: first)
        run.append(ShardedRun(*arguments))
        return split(*options)

    monkeypatch.setattr(shards, "split_inputs", meanwhile)
    monkeypatch.setattr(catalog, "chosen_form", lambda _: other)
    run += [ShardedRun(*arguments), ShardedRun(*arguments, engine="native")]
    assert [shard.plan["engine"] for shard in run] == [shard.pipeline.requested for shard in run] == [first] * 3
    with pytest.raises(RequestError, match="holds a run that differs in engine"):
        ShardedRun(*arguments, engine=other)


def test_rows_of_urls(log, small, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    system.pipe("/logs/a.csv", (log / "a.csv").read_bytes())
    system.pipe("/logs/c.parquet", (log / "c.parquet").read_bytes())
    system.pipe("/logs/_SUCCESS", b"")
    assert remote_files.expand(["memory://logs/"]) == remote_files.expand(["memory://logs/*.[cp]*"])
    run_shard(CLICKS, ["memory://logs/"], tmp_path / "out")
    zoo.run(CLICKS, [str(log / "a.csv"), str(log / "c.parquet")], tmp_path / "one.parquet")
    assert union(check(tmp_path / "out")).equals(pq.read_table(tmp_path / "one.parquet"))


def test_rows_of_criteo(small, tmp_path):
    sample = zoo.load("wide-deep-criteo").path / "sample.tsv.gz"
    text = gzip.decompress(sample.read_bytes())
    (tmp_path / "rows.tsv").write_bytes(text[: text.index(b"\n", 40_000) + 1])
    run_shard("wide-deep-criteo", [str(tmp_path / "rows.tsv")], tmp_path / "out", format=".csv")
    zoo.run("wide-deep-criteo", [str(tmp_path / "rows.tsv")], tmp_path / "one.csv")
    files = check(tmp_path / "out")["files"]
    assert len(files) > 2
    lines = [line for path in files for line in Path(path).read_text().splitlines()[1:]]
    assert lines == (tmp_path / "one.csv").read_text().splitlines()[1:]


@pytest.mark.parametrize("labelled", [True, False])
def test_the_first_row_of_all_says_whether_rows_of_criteo_have_a_label(small, tmp_path, labelled):
    text = gzip.decompress((zoo.load("wide-deep-criteo").path / "sample.tsv.gz").read_bytes())
    rows = [line.split(b"\t")[-39:] for line in text.splitlines()[:400]]
    lines, others = ([b"\t".join([b"1"] * label + row) for row in rows] for label in (labelled, not labelled))
    inputs = [str(tmp_path / name) for name in ("a.tsv", "b.tsv")]

    def write() -> None:
        (tmp_path / "a.tsv").write_bytes(b"\n".join([b"bad", *lines[:200]]) + b"\n")
        (tmp_path / "b.tsv").write_bytes(b"\n".join(lines[200:]))

    write()
    begin = parts.split_inputs(zoo.pipeline("wide-deep-criteo"), inputs, {})[1].begin
    for index in (200, (tmp_path / "a.tsv").read_bytes()[:begin].count(b"\n") - 1):  # a file and a part begin there
        lines[index] = others[index]
    write()
    run_shard("wide-deep-criteo", inputs, tmp_path / "out", on_error="skip")
    whole = zoo.run("wide-deep-criteo", inputs, tmp_path / "one.parquet", on_error="skip")
    stats = check(tmp_path / "out")
    assert stats["skipped"] == whole["skipped"] == 3
    assert union(stats)["row"].to_pylist() == pq.read_table(tmp_path / "one.parquet")["row"].to_pylist()


def test_parts_of_rows_without_a_header_have_the_columns_of_the_first(small, tmp_path):
    from zoo.recommenders.data.logs import CRITEO, open_log

    text = gzip.decompress((zoo.load("wide-deep-criteo").path / "sample.tsv.gz").read_bytes())
    rows = [b"\t".join(line.split(b"\t")[-39:]) for line in text.splitlines()[:400]]
    (tmp_path / "rows.tsv").write_bytes(b"\n".join([b"1\t" + rows[0], *rows]))
    pipeline = zoo.pipeline(CLICKS)
    log_parts = parts.split_inputs(pipeline, [str(tmp_path / "rows.tsv")], {})
    assert len(log_parts) > 2
    for part in log_parts:
        with parts.open_part(pipeline, part) as log:
            assert open_log(log).columns == CRITEO and not open_log(log).header


def test_empty_files_of_criteo_are_refused(tmp_path):
    (tmp_path / "empty.tsv").touch()
    with pytest.raises(RequestError, match=r"empty.tsv: found no row"):
        run_shard("wide-deep-criteo", [str(tmp_path / "empty.tsv")], tmp_path / "out")


def test_sentences(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MIN_PART_BYTES", 40)
    (tmp_path / "text.txt").write_text("A dog runs.\n\nTwo men sit on a bench.\nA girl is singing.\nA cat sleeps.\n")
    run_shard("multi30k-en-de", [str(tmp_path / "text.txt")], tmp_path / "out")
    zoo.run("multi30k-en-de", [str(tmp_path / "text.txt")], tmp_path / "one.txt")
    files = check(tmp_path / "out")["files"]
    assert len(files) == 2
    assert "".join(Path(path).read_text() for path in files) == (tmp_path / "one.txt").read_text()


def test_lines_count_through_the_whole_input(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MIN_PART_BYTES", 20)
    texts = {"a.txt": "A dog runs.\n\nTwo men sit on a bench.\nA girl is singing.", "c.txt": "A cat sleeps."}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"A dog runs.\nA cat sleeps.\n"))
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.txt.gz", "c.txt")]
    run_shard("multi30k-en-de", inputs, tmp_path / "out", format=".parquet")
    zoo.run("multi30k-en-de", inputs, tmp_path / "one.parquet")
    stats = check(tmp_path / "out")
    assert stats["parts"] == 4 and union(stats).equals(pq.read_table(tmp_path / "one.parquet"))
    assert union(stats)["line"].to_pylist() == [1, 2, 3, 4, 5, 6, 7]


def test_a_part_that_cannot_be_translated_ends_no_run(tmp_path):
    name = os.fsdecode(b"a\xff\n.txt")
    (tmp_path / name).write_text("A dog runs.\n")
    (tmp_path / "b.txt").write_bytes(b"\xfe\n")
    inputs = [str(tmp_path / name), str(tmp_path / "b.txt")]
    run_shard("multi30k-en-de", inputs, tmp_path / "out")
    zoo.run("multi30k-en-de", [Path(path) for path in inputs], tmp_path / "one.txt")
    stats = check(tmp_path / "out")
    assert stats["skipped"] == 1
    assert "".join(Path(path).read_text() for path in stats["files"]) == (tmp_path / "one.txt").read_text()


@pytest.mark.parametrize("labels", [0, 1], ids=["encoder", "reranker"])
def test_texts_count_through_the_whole_input(tmp_path, labels):
    pytest.importorskip("transformers", reason="needs the test extra")
    from helpers import text_models

    (tmp_path / "theirs").mkdir()
    text_models.write(tmp_path / "theirs", labels=labels)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "a.csv").write_text("one,two\nthe cat,a\nthe zoo,b\n")
    (tmp_path / "b.csv").write_text("one,two\n")
    (tmp_path / "c.csv").write_text("one,two\n,\n")
    (tmp_path / "d.jsonl").write_text('{"two": "a", "one": "the cat"}\n')
    inputs = [str(tmp_path / name) for name in ("a.csv", "b.csv", "c.csv", "d.jsonl")]
    options = {"precision": "fp32", "engine": "onnxruntime", "column": "one,two" if labels else "one"}
    run_shard(tmp_path / "ours", inputs, tmp_path / "out", **options)
    zoo.run(tmp_path / "ours", inputs, tmp_path / "one.parquet", **options)
    stats = check(tmp_path / "out")
    assert stats["parts"] == 3 and stats["skipped"] == 1
    assert union(stats)["row"].to_pylist() == pq.read_table(tmp_path / "one.parquet")["row"].to_pylist() == [1, 2, 3, 4]
    with pytest.raises(RequestError, match=r"found no row in .*b\.csv"):
        run_shard(tmp_path / "ours", inputs[1:2], tmp_path / "other", **options)


def test_sentences_of_urls(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(parts, "MIN_PART_BYTES", 40)
    text = b"A dog runs.\nTwo men sit on a bench.\nA girl is singing.\nA cat sleeps.\n"
    fsspec.filesystem("memory").pipe({"/texts/a.txt": text, "/texts/b.txt.gz": gzip.compress(text)})
    (tmp_path / "text.txt").write_bytes(text * 2)
    run_shard("multi30k-en-de", ["memory://texts/*"], tmp_path / "out")
    zoo.run("multi30k-en-de", [str(tmp_path / "text.txt")], tmp_path / "one.txt")
    files = check(tmp_path / "out")["files"]
    assert len(files) == 3
    assert "".join(Path(path).read_text() for path in files) == (tmp_path / "one.txt").read_text()


def pictures(folder, *names):
    """Images of noise, small ones."""
    from PIL import Image

    for i, name in enumerate(names):
        noise = np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(noise).save(folder / name)


def test_images_of_urls(small, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    pictures(tmp_path, *(f"{i}.png" for i in range(4)))
    for i in range(4):
        fsspec.filesystem("memory").pipe(f"/photos/{i}.png", (tmp_path / f"{i}.png").read_bytes())
    fsspec.filesystem("memory").pipe({"/photos/notes.txt": b"no image", "/photos/1b.png": b"no image"})
    fsspec.filesystem("memory").pipe("/empty/notes.txt", b"no image")
    run_shard(IMAGES, ["memory://photos/"], tmp_path / "out")
    zoo.run(IMAGES, [str(tmp_path / f"{i}.png") for i in range(4)], tmp_path / "one.parquet")
    stats = check(tmp_path / "out")
    assert stats["images"] == 4 and stats["skipped"] == 1
    scored, one = union(stats).to_pylist(), pq.read_table(tmp_path / "one.parquet").to_pylist()
    assert [row["file"] for row in scored] == [f"memory:///photos/{name}.png" for name in ("0", "1", "1b", "2", "3")]
    assert "is no image" in scored.pop(2)["error"]
    assert [row | {"file": ""} for row in scored] == [row | {"file": ""} for row in one]
    with pytest.raises(RequestError, match="found no images in memory://empty/"):
        run_shard(IMAGES, ["memory://empty/"], tmp_path / "other")


def test_images(small, tmp_path):
    pictures(tmp_path, *(f"{i}.png" for i in range(5)))
    for i in (2, 3):  # a part of them
        (tmp_path / f"{i}.png").write_bytes(b"no image")
    run_shard(IMAGES, [str(tmp_path)], tmp_path / "out", engine="onnxruntime", batch_size=1)
    zoo.run(IMAGES, [str(tmp_path)], tmp_path / "one.parquet", engine="onnxruntime", batch_size=1)
    stats = check(tmp_path / "out")
    assert stats["parts"] == 3 and stats["images"] == 3 and stats["skipped"] == 2
    assert union(stats).equals(pq.read_table(tmp_path / "one.parquet"))


def test_names_of_images_mean_what_they_meant_where_the_plan_was_made(small, tmp_path, monkeypatch):
    photos, options = Path("photos"), {"engine": "onnxruntime", "batch_size": 1}
    (tmp_path / photos).mkdir()
    monkeypatch.chdir(tmp_path)
    names = ("a.png", "b.png", "c\n.png", os.fsdecode(b"d\xff.png"))
    pictures(photos, *names)
    (photos / "b.png").write_bytes(b"no image")
    run_shard(IMAGES, ["photos/*.png"], tmp_path / "out", "1/2", **options)
    monkeypatch.chdir("/")
    run_shard(IMAGES, [str(tmp_path / "photos/*.png")], tmp_path / "out", "2/2", **options)
    monkeypatch.chdir(tmp_path)
    zoo.run(IMAGES, [photos / name for name in names], tmp_path / "one.parquet", **options)
    stats = check("out")
    assert stats["parts"] == 2 and stats["images"] == 3
    assert union(stats).equals(pq.read_table(tmp_path / "one.parquet"))
    monkeypatch.chdir("/")
    with pytest.raises(RequestError, match="holds a run that differs in inputs"):
        run_shard(IMAGES, ["photos/*.png"], tmp_path / "out", "2/2", **options)


def test_images_that_are_not_there_are_told(small, tmp_path):
    pictures(tmp_path, "a.png", "b.png", "c.png")
    out, inputs = tmp_path / "out", [str(tmp_path / name) for name in ("a.png", "b.png", "c.png")]
    for wrong in ("d.png", "d*.png"):
        with pytest.raises(RequestError, match=r"found no file .*/d"):
            run_shard(IMAGES, [*inputs, str(tmp_path / wrong)], out)
    assert not out.exists()
    run_shard(IMAGES, inputs, out, "1/2")
    (tmp_path / "c.png").unlink()
    with pytest.raises(RequestError, match=r"part 1 .*found no .*c\.png here"):
        run_shard(IMAGES, inputs, out, "2/2")
    plan = json.loads((out / "plan.json").read_text())
    (out / "plan.json").write_text(json.dumps(plan | {"version": 1}))
    with pytest.raises(RequestError, match="differs in version"):
        run_shard(IMAGES, inputs, out)


@pytest.mark.parametrize(
    ("inputs", "options", "told"),
    [
        (["nothing*.csv"], {}, "found no file .*nothing"),
        (["nosuch://x/y.csv"], {}, "cannot read nosuch://x/y.csv"),
        ([], {}, "name the input"),
        (["x.csv"], {"shard": "3/2"}, "expected i/n"),
        (["x.csv"], {"format": ".xlsx"}, "found the format .xlsx"),
        (["x.csv"], {"top": 3}, "has no option top, expected keep"),
    ],
)
def test_wrong_requests(inputs, options, told, tmp_path):
    with pytest.raises(RequestError, match=told):
        run_shard(CLICKS, inputs, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_named(log, tmp_path):
    (tmp_path / "cut.csv.gz").write_bytes((log / "b.csv.gz").read_bytes()[:400])
    (tmp_path / "empty.csv").touch()
    for name, problem in (("cut.csv.gz", "cannot be read"), ("empty.csv", "is empty")):
        with pytest.raises(RequestError, match=rf"{name}.*{problem}"):
            run_shard(CLICKS, [str(tmp_path / name)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(RequestError, match=r"holds no plan\.json"):
        check(tmp_path)


def test_arrow_batches_get_a_probability(log):
    import pickle

    table = pq.read_table(log / "c.parquet")
    scorer = pickle.loads(pickle.dumps(arrow_scorer(CLICKS)))
    scored = scorer(table)
    assert scored.drop_columns("probability").equals(table)
    batches = list(scorer(iter(table.to_batches(max_chunksize=64))))
    assert pa.Table.from_batches(batches)["probability"].combine_chunks().equals(scored["probability"].combine_chunks())
    expected = [row["probability"] for row in zoo.pipeline(CLICKS)(table)]
    assert scored["probability"].to_pylist() == expected
