"""Logs of several files: folders, patterns, Hive partitions and folders that Spark writes."""

import gzip
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.click_logs import written

import zoo
from pipelines.core.errors import RequestError
from zoo.cli import app as cli
from zoo.recommenders.data import sources
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_log, open_logs
from zoo.recommenders.data.schema_inference import infer

DAYS = 12


def rows(day, count=60):
    """Rows of one day; every day brings users of its own."""
    users = [f"u{day * 10 + i % 10}" for i in range(count)]
    return {"click": [i % 2 for i in range(count)], "user_id": users, "price": [i % 7 + day for i in range(count)]}


@pytest.fixture
def days(tmp_path):
    (tmp_path / "days").mkdir()
    for day in range(DAYS):
        written(tmp_path / f"days/day{day}.csv", **rows(day))
    return tmp_path / "days"


def users(schema):
    (column,) = (column for column in schema.columns if column.name == "user_id")
    return set(column.encoding["values"])


def joined(tmp_path):
    parts = [rows(day) for day in range(DAYS)]
    columns = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    return written(tmp_path / "joined.csv", **columns)


def test_the_schema_of_several_files_is_that_of_their_rows(days, tmp_path):
    wanted = infer(open_log(joined(tmp_path)))
    assert wanted.rows == 60 * DAYS and len(users(wanted)) == 10 * DAYS
    files = [str(days / f"day{day}.csv") for day in range(DAYS)]
    (tmp_path / "[1]").mkdir()
    strange = written(tmp_path / "[1]/day*.csv", **rows(0))
    assert [str(log.path) for log in open_logs(strange)] == [strange]  # a file of that name before the pattern
    for source in (
        files,
        days,
        str(days),
        f"{days}/*.csv",
        [f"{days}/day?.csv", f"{days}/day1?.csv"],
        f"{tmp_path}/days/**/*.csv",
    ):
        logs = open_logs(source)
        assert [str(log.path) for log in logs] == files  # day2 before day10
        assert infer(logs) == wanted


def test_the_command_takes_several_files(days, tmp_path, capsys):
    cli.call(["schema", str(days / "day0.csv"), f"{days}/day1*.csv", "-o", str(tmp_path / "schema.json"), "--json"])
    assert json.loads(capsys.readouterr().out)["rows"] == 4 * 60
    schema = zoo.schema([days], tmp_path / "schema.json")["schema"]
    assert schema["rows"] == 60 * DAYS == zoo.schema(days)["schema"]["rows"]
    with pytest.raises(RequestError, match="would replace the input"):
        zoo.schema([days / "day1.csv", days / "day0.csv"], days / "day0.csv")


def test_training_and_scoring_take_folders(days, tmp_path):
    pytest.importorskip("torch", reason="needs the train extra")
    settings = {"epochs": "1", "refit": "false", "hidden": "4", "embedding_size": "2", "l2_embeddings": "10"}
    zoo.train("deepfm", days, tmp_path / "model", settings=settings)
    record = json.loads((tmp_path / "model/train.json").read_text())
    assert [entry["file"] for entry in record["data"]] == [f"day{day}.csv" for day in range(DAYS)]
    assert record["rows"]["train"] + record["rows"]["held_out"] == 60 * DAYS
    assert len(users(Features.from_json(record["features"]).schema)) == 10 * DAYS
    one = zoo.run(tmp_path / "model", joined(tmp_path), tmp_path / "one.csv", precision="fp32", engine="onnxruntime")
    for source in (days, f"{days}/*"):
        report = zoo.run(tmp_path / "model", [source], tmp_path / "all.csv", precision="fp32", engine="onnxruntime")
        assert report["rows"] == one["rows"] == 60 * DAYS
        assert (tmp_path / "all.csv").read_text() == (tmp_path / "one.csv").read_text()


def partitioned(folder):
    """A data set of two partition columns, as Spark, pyarrow and pandas write it."""
    for index, (day, country) in enumerate((("2024-01-01", "US"), ("2024-01-02", "DE"), ("2024-01-03", "US"))):
        place = folder / f"dt={day}" / f"country={country}"
        place.mkdir(parents=True)
        columns = rows(index)
        pq.write_table(pa.table({name: columns[name] for name in ("click", "user_id")}), place / "part-0.parquet")
    place = folder / "dt=2024-01-04" / "country=__HIVE_DEFAULT_PARTITION__"
    place.mkdir(parents=True)
    pq.write_table(pa.table({"click": [0, 1], "user_id": ["u1", "u2"]}), place / "part-0.parquet")
    return folder


def test_partitions_are_columns(tmp_path):
    folder = partitioned(tmp_path / "hive")
    schema = infer(open_logs(folder))
    columns = {column.name: column for column in schema.columns}
    assert list(columns) == ["click", "user_id", "dt", "country"] and schema.rows == 182
    assert columns["dt"].kind == "timestamp" and columns["dt"].unit == "text"
    assert columns["country"].encoding["values"] == ["US", "DE"] and columns["country"].missing == 2
    read = Rows.concatenate(list(Features(schema).read(folder, labelled=True)))
    assert read.ids[[0, 60, 120, 180], 1].tolist() == [1, 2, 1, 3]
    assert (np.diff(np.unique(read.times)) == 86400).all()
    part = folder / "dt=2024-01-02/country=DE/part-0.parquet"  # one file has the columns of its path, too
    assert (next(Features(schema).read(part)).ids == read.ids[60:120]).all()
    assert open_log(part).columns == ("click", "user_id", "dt", "country")


def test_partitions_of_csv_and_of_json(tmp_path):
    columns = rows(1)
    for name in ("city=New%20York", "city=Köln"):
        (tmp_path / "csv" / name).mkdir(parents=True)
        (tmp_path / "json" / name).mkdir(parents=True)
        written(tmp_path / "csv" / name / "a.csv", **columns)
        lines = [json.dumps({key: columns[key][i] for key in columns}) for i in range(60)]
        (tmp_path / "json" / name / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    csv, lines = infer(open_logs(tmp_path / "csv")), infer(open_logs(tmp_path / "json"))
    assert csv == lines and csv.columns[-1].encoding["values"] == ["Köln", "New York"]
    (first, second) = (Rows.concatenate(list(Features(csv).read(tmp_path / form))) for form in ("csv", "json"))
    assert (first.ids == second.ids).all() and (first.numbers == second.numbers).all()
    assert first.ids[[0, -1], -1].tolist() == [1, 2] or first.ids[[0, -1], -1].tolist() == [2, 1]


def test_a_column_of_the_file_comes_before_one_of_the_path(tmp_path):
    (tmp_path / "user_id=x").mkdir()
    log = open_log(written(tmp_path / "user_id=x/a.csv", **rows(0)))
    assert log.columns == ("click", "user_id", "price") and users(infer(log)) == {f"u{i}" for i in range(10)}


def test_what_spark_leaves_beside_its_parts_is_passed_over(tmp_path):
    folder = tmp_path / "spark"
    folder.mkdir()
    for part in range(3):
        pq.write_table(pa.table(rows(part)), folder / f"part-0000{part}-8f.snappy.parquet")
        (folder / f".part-0000{part}-8f.snappy.parquet.crc").write_bytes(b"crc")
    (folder / "_SUCCESS").touch()
    (folder / "part-00003-8f.csv").touch()  # of a partition without rows
    assert infer(open_logs(folder)).rows == 180 and len(sources.expand(folder)) == 3
    for name, said in (("_temporary", "holds an unfinished job"), ("_delta_log", "is a table with versions")):
        (folder / name).mkdir()
        with pytest.raises(RequestError, match=f"found {name} in the folder .*spark, which {said}"):
            open_logs(folder)
        (folder / name).rmdir()


def test_sources_without_files_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/_SUCCESS").touch()
    with pytest.raises(
        RequestError, match="found the folder .*empty without files of rows, expected some, or a folder"
    ):
        open_logs(tmp_path / "empty")
    with pytest.raises(RequestError, match=r"found no file that matches .*day\*\.csv"):
        open_logs(f"{tmp_path}/day*.csv")
    with pytest.raises(RequestError, match="found no file .*nothing.csv; expected a file or folder of rows"):
        open_logs(tmp_path / "nothing.csv")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match="found .*pipe to be a pipe or a device; expected a file, or - for stdin"):
        open_logs(tmp_path / "pipe")


@pytest.mark.parametrize("family", ["wide-deep", "dcn-v2"])
def test_a_missing_file_to_train_on_is_no_matter_of_formats(tmp_path, family):
    pytest.importorskip("torch", reason="needs the train extra")
    with pytest.raises(RequestError, match=r"^found no file \S*nothing; expected a file or folder of rows"):
        zoo.train(family, tmp_path / "nothing", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_column_that_a_file_lacks_is_ignored_with_the_reason(tmp_path):
    first = written(tmp_path / "a.csv", **rows(0))
    second = written(tmp_path / "b.csv", **rows(1), device=["phone", "tv"] * 30)
    (column,) = (column for column in infer(open_logs([first, second])).columns if column.name == "device")
    assert column.kind == "ignored" and column.why == f"{first} lacks it"
    third = written(tmp_path / "c.csv", user_id=["a", "b"], price=[1, 2])
    with pytest.raises(RequestError, match="c.csv lacks the column click, which is the label"):
        infer(open_logs([first, third]), "click")
    with pytest.raises(RequestError, match="c.csv lacks the column click, which is the label"):
        infer(open_logs([first, third]))


def test_rows_without_a_header_come_from_folders_too(tmp_path):
    from zoo.recommenders import criteo

    line = "\t".join(["1"] + [str(i) for i in range(13)] + [f"{i:08x}" for i in range(26)])
    (tmp_path / "days").mkdir()
    for day in range(2):
        (tmp_path / f"days/day_{day}").write_text(f"{line}\n" * (day + 1))
    features = Features(criteo.schema(tmp_path / "days"))
    assert len(Rows.concatenate(list(features.read(tmp_path / "days")))) == 3
