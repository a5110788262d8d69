import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import zoo
from pipelines.core.errors import RequestError, ZooError
from zoo.scoring import arrow_scorer, parts, places
from zoo.scoring.shards import check, run_shard

CLICKS = "shop-clicks"


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
    from zoo.clicks.logs import open_log

    table = pa.Table.from_batches(open_log(folder / "a.csv").batches())
    pq.write_table(table, folder / "c.parquet", row_group_size=100)
    return folder


@pytest.fixture
def small(monkeypatch):
    """Parts of a few rows."""
    monkeypatch.setattr(parts, "BYTES", 8192)
    monkeypatch.setattr(parts, "ROWS", 150)
    monkeypatch.setattr(parts, "FILES", 2)


def union(found):
    return pa.concat_tables(pq.read_table(each) for each in found["files"])


def test_shards_together_write_what_one_process_writes(log, small, tmp_path):
    inputs = [str(log / "*.csv"), str(log / "b.csv.gz"), str(log / "c.parquet")]
    whole = zoo.run(CLICKS, [str(log / name) for name in ("a.csv", "b.csv.gz", "c.parquet")], tmp_path / "one.parquet")
    for i in (2, 1, 3):
        found = run_shard(CLICKS, inputs, tmp_path / "out", f"{i}/3")
        assert found["parts"] > 1 and not found["kept"]
    found = check(tmp_path / "out")
    assert union(found).equals(pq.read_table(tmp_path / "one.parquet"))
    assert {name: found[name] for name in ("rows", "clicks", "skipped")} == {
        name: whole[name] for name in ("rows", "clicks", "skipped")
    }
    assert found["expected_clicks"] == pytest.approx(whole["expected_clicks"], abs=0.01 * found["parts"])


@pytest.mark.parametrize("end", ["\n", "\n\n"], ids=["", "blank"])
def test_parts_of_json_lines_have_the_columns_of_the_first(log, small, tmp_path, end):
    """Objects may leave out what is null, and blank lines may lie where a part begins."""
    rows = pq.read_table(log / "c.parquet").to_pylist()[:400]
    some = [
        row if at < 5 else {key: each for key, each in row.items() if each and key != "age"}
        for at, row in enumerate(rows)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(each) + end for each in some))
    run_shard(CLICKS, [str(tmp_path / "log.jsonl")], tmp_path / "out")
    zoo.run(CLICKS, [str(tmp_path / "log.jsonl")], tmp_path / "one.parquet")
    found = check(tmp_path / "out")
    assert found["parts"] > 2 and union(found).equals(pq.read_table(tmp_path / "one.parquet"))


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_part_without_a_good_row_is_an_empty_one(log, tmp_path, suffix):
    header, *rows = (log / "a.csv").read_text().splitlines(keepends=True)
    (tmp_path / "a.csv").write_text(header + "".join(rows[:20]))
    (tmp_path / "b.csv").write_text(header + "x\n" * 7)
    (tmp_path / "c.csv").write_text(header + "y,z\n" + "".join(rows[:3]))
    inputs = [str(tmp_path / name) for name in ("a.csv", "b.csv", "c.csv")]
    run_shard(CLICKS, inputs, tmp_path / "out", format=suffix, on_error="skip")
    whole = zoo.run(CLICKS, inputs, tmp_path / f"one{suffix}", on_error="skip")
    found = check(tmp_path / "out")
    assert found["parts"] == 3 and found["skipped"] == whole["skipped"] == 8 and found["rows"] == whole["rows"] == 23
    if suffix == ".parquet":
        assert union(found).equals(pq.read_table(tmp_path / "one.parquet"))
    else:
        lines = [line for each in found["files"] for line in Path(each).read_text().splitlines()[1:]]
        assert lines == (tmp_path / "one.csv").read_text().splitlines()[1:]
    with pytest.raises(RequestError, match="part 1 .*b.csv"):
        run_shard(CLICKS, inputs, tmp_path / "strict")


def test_what_is_done_is_kept_and_what_is_damaged_done_again(log, small, tmp_path):
    inputs, out = [str(log / "a.csv")], tmp_path / "out"
    first = run_shard(CLICKS, inputs, out)
    before = {each.name: each.stat().st_mtime_ns for each in out.iterdir()}
    assert run_shard(CLICKS, inputs, out)["kept"] == first["parts"]
    assert before == {each.name: each.stat().st_mtime_ns for each in out.iterdir()}
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
    with pytest.raises(RequestError, match="another digest, precision"):
        run_shard(CLICKS, [str(source)], tmp_path / "out", precision="fp32")
    source.write_bytes(source.read_bytes() * 2)
    with pytest.raises(RequestError, match="another files"):
        run_shard(CLICKS, [str(source)], tmp_path / "out")


def test_rows_of_urls(log, small, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    system.pipe("/logs/a.csv", (log / "a.csv").read_bytes())
    system.pipe("/logs/c.parquet", (log / "c.parquet").read_bytes())
    system.pipe("/logs/_SUCCESS", b"")
    assert places.expand(["memory://logs/"]) == places.expand(["memory://logs/*.[cp]*"])
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
    lines = [line for each in files for line in Path(each).read_text().splitlines()[1:]]
    assert lines == (tmp_path / "one.csv").read_text().splitlines()[1:]


def test_sentences(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BYTES", 40)
    (tmp_path / "text.txt").write_text("A dog runs.\n\nTwo men sit on a bench.\nA girl is singing.\nA cat sleeps.\n")
    run_shard("multi30k-en-de", [str(tmp_path / "text.txt")], tmp_path / "out")
    zoo.run("multi30k-en-de", [str(tmp_path / "text.txt")], tmp_path / "one.txt")
    files = check(tmp_path / "out")["files"]
    assert len(files) == 2
    assert "".join(Path(each).read_text() for each in files) == (tmp_path / "one.txt").read_text()


def test_sentences_of_urls(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(parts, "BYTES", 40)
    text = b"A dog runs.\nTwo men sit on a bench.\nA girl is singing.\nA cat sleeps.\n"
    fsspec.filesystem("memory").pipe({"/texts/a.txt": text, "/texts/b.txt.gz": gzip.compress(text)})
    (tmp_path / "text.txt").write_bytes(text * 2)
    run_shard("multi30k-en-de", ["memory://texts/*"], tmp_path / "out")
    zoo.run("multi30k-en-de", [str(tmp_path / "text.txt")], tmp_path / "one.txt")
    files = check(tmp_path / "out")["files"]
    assert len(files) == 3
    assert "".join(Path(each).read_text() for each in files) == (tmp_path / "one.txt").read_text()


def test_images_of_urls(small, tmp_path):
    from PIL import Image

    fsspec = pytest.importorskip("fsspec")
    for i in range(4):
        noise = np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{i}.png")
        fsspec.filesystem("memory").pipe(f"/photos/{i}.png", (tmp_path / f"{i}.png").read_bytes())
    fsspec.filesystem("memory").pipe({"/photos/notes.txt": b"no image", "/photos/1b.png": b"no image"})
    fsspec.filesystem("memory").pipe("/empty/notes.txt", b"no image")
    run_shard("mobilenet-v1-cifar10", ["memory://photos/"], tmp_path / "out")
    zoo.run("mobilenet-v1-cifar10", [str(tmp_path / f"{i}.png") for i in range(4)], tmp_path / "one.parquet")
    found = check(tmp_path / "out")
    assert found["images"] == 4 and found["skipped"] == 1
    scored, one = union(found).to_pylist(), pq.read_table(tmp_path / "one.parquet").to_pylist()
    assert [each["file"] for each in scored] == [f"memory:///photos/{name}.png" for name in ("0", "1", "1b", "2", "3")]
    assert "is no image" in scored.pop(2)["error"]
    assert [each | {"file": ""} for each in scored] == [each | {"file": ""} for each in one]
    with pytest.raises(RequestError, match="found no images in memory://empty/"):
        run_shard("mobilenet-v1-cifar10", ["memory://empty/"], tmp_path / "other")


def test_images(small, tmp_path):
    from PIL import Image

    for i in range(5):
        noise = np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{i}.png")
    for i in (2, 3):  # a part of them
        (tmp_path / f"{i}.png").write_bytes(b"no image")
    run_shard("mobilenet-v1-cifar10", [str(tmp_path)], tmp_path / "out", engine="onnxruntime", batch_size=1)
    zoo.run("mobilenet-v1-cifar10", [str(tmp_path)], tmp_path / "one.parquet", engine="onnxruntime", batch_size=1)
    found = check(tmp_path / "out")
    assert found["parts"] == 3 and found["images"] == 3 and found["skipped"] == 2
    assert union(found).equals(pq.read_table(tmp_path / "one.parquet"))


@pytest.mark.parametrize(
    ("inputs", "options", "told"),
    [
        (["nothing*.csv"], {}, "found no file .*nothing"),
        (["nosuch://x/y.csv"], {}, "cannot read nosuch://x/y.csv"),
        ([], {}, "name the input"),
        (["x.csv"], {"shard": "3/2"}, "wanted i/n"),
        (["x.csv"], {"format": ".xlsx"}, "found the format .xlsx"),
        (["x.csv"], {"top": 3}, "has no option top"),
    ],
)
def test_wrong_requests(inputs, options, told, tmp_path):
    with pytest.raises(RequestError, match=told):
        run_shard(CLICKS, inputs, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_named(log, tmp_path):
    (tmp_path / "cut.csv.gz").write_bytes((log / "b.csv.gz").read_bytes()[:400])
    (tmp_path / "empty.csv").touch()
    for name, told in (("cut.csv.gz", "cannot be read"), ("empty.csv", "is empty")):
        with pytest.raises(RequestError, match=rf"{name}.*{told}"):
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
    wanted = [each["probability"] for each in zoo.pipeline(CLICKS)(table)]
    assert scored["probability"].to_pylist() == wanted
