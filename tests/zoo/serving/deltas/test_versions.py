"""`zoo serve --deltas`: each delta in order, in whole requests, with the results of the newer model; faults leave it."""

import itertools
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.click_logs import log_of_ages
from helpers.serving import Server, wait_until
from helpers.tiers import one_in

import zoo
from pipelines.core.errors import RequestError
from pipelines.deltas.application import apply_in_place
from pipelines.deltas.delta import model_digest, open_delta
from pipelines.deltas.transport import open_transport
from pipelines.engines.catalog import base_engine, chosen_form
from zoo.serving.deltas.versions import Versions
from zoo.serving.workers.model_loader import ServedModel

pytest.importorskip("torch", reason="needs the train extra")
TINY = {"epochs": "1", "hidden": "8", "embedding_size": "8", "batch_size": "64"}
CSV = "text/csv"
FORM = "native:int16"  # a server may time another form as the fastest, whose bits differ
MODELS = ("monday", "tuesday", "wednesday")


class Days:
    """Models of three days, their deltas, a row and the answer of every model."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.row = folder, b"user_id,item_id,age\nu25,i3,33\n"
        zoo.train(
            "deepfm", log_of_ages(folder / "0.csv", range(20), seed=0), folder / MODELS[0], settings=TINY, label="click"
        )
        for number, (old, new) in enumerate(itertools.pairwise(MODELS), 1):
            log = log_of_ages(folder / f"{number}.csv", range(10 * number, 10 * number + 20), seed=number)
            zoo.finetune(folder / old, log, folder / new, settings={"epochs": "1", "batch_size": "64"})
            self.made = zoo.api.delta(folder / old, folder / new, folder / f"{number}.zoo")
        (folder / "row.csv").write_bytes(self.row)
        answers = [zoo.pipeline(folder / name, engine=FORM)(folder / "row.csv") for name in MODELS]
        self.expected = [[np.float32(row["probability"]) for row in rows] for rows in answers]
        self.digests = [model_digest(folder / name) for name in MODELS]

    def version(self, number: int) -> str:
        return f"{number}-{self.digests[number][:12]}"


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Days:
    return Days(tmp_path_factory.mktemp("days"))


def ask(server: Server, days: Days) -> tuple[str, Any]:
    status, headers, body = server.ask("/v1/models/monday:run", days.row, CSV)
    assert status == 200, body
    return headers["model-version"], [np.float32(row["probability"]) for row in json.loads(body)["results"]]


def is_served(server: Server, days: Days, number: int) -> bool:
    version, results = ask(server, days)
    if version != days.version(number):
        return False
    assert results == days.expected[number]
    return True


@pytest.mark.parametrize("engine", one_in(3, [FORM, "auto", "onnxruntime"]))
def test_deltas_are_applied_in_order_and_taken_back(
    start: Callable[..., Server], days: Days, tmp_path: Path, engine: str
) -> None:
    place = tmp_path / "place"
    server = start(days.folder / "monday", "--workers", "1", "--deltas", place, "--engine", engine)
    if engine == FORM:
        assert is_served(server, days, 0)
        assert server.json("/v1/models/monday")["version"] == days.version(0)
    place.mkdir()
    for day in (1, 2):
        shutil.copy(days.folder / f"{day}.zoo", place / f"{day}.zoo")
        wait_until(lambda day=day: ask(server, days)[0] == days.version(day))
        assert engine != FORM or is_served(server, days, day)
    (place / "2.zoo").unlink()
    wait_until(lambda: ask(server, days)[0] == days.version(1))
    wait_until(lambda: any(message.endswith("1 delta taken back") for message in server.said))
    shutil.copy(days.folder / "2.zoo", place / "2.zoo")
    wait_until(lambda: ask(server, days)[0] == days.version(2))
    for day in (1, 2):
        (place / f"{day}.zoo").unlink()
    wait_until(lambda: ask(server, days)[0] == days.version(0))
    assert engine != FORM or is_served(server, days, 0)
    assert server.end() == 0


def test_every_request_sees_one_version(start: Callable[..., Server], days: Days, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    shutil.copy(days.folder / "1.zoo", place)
    server = start(days.folder / "monday", "--workers", "2", "--deltas", place, "--engine", FORM)
    assert is_served(server, days, 1)  # a server starts with the deltas that are there
    stop, answers = threading.Event(), list[tuple[str, Any]]()

    def repeat() -> None:
        while not stop.is_set():
            answers.append(ask(server, days))

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            shutil.copy(days.folder / "2.zoo", place / ".2.zoo")
            (place / ".2.zoo").rename(place / "2.zoo")
            wait_until(lambda: ask(server, days)[0] == days.version(2))
            (place / "2.zoo").unlink()
            wait_until(lambda: ask(server, days)[0] == days.version(1))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    expected = {days.version(number): days.expected[number] for number in (1, 2)}
    assert {version for version, _ in answers} == set(expected)
    assert all(results == expected[version] for version, results in answers)
    assert server.end() == 0


def test_faults_are_one_line_and_the_served_version_stays(
    start: Callable[..., Server], days: Days, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    server = start(days.folder / "monday", "--workers", "1", "--deltas", place, "--engine", FORM)
    shutil.copy(days.folder / "2.zoo", place / "2.zoo")  # a gap
    wait_until(lambda: any("2.zoo changes the model" in message for message in server.said))
    assert is_served(server, days, 0)
    (place / "1.zoo").write_bytes((days.folder / "1.zoo").read_bytes()[:5000])  # a copy that is not finished
    wait_until(lambda: any("1.zoo is no whole delta" in message for message in server.said))
    assert is_served(server, days, 0)
    shutil.copy(days.folder / "1.zoo", place / "1.zoo")
    wait_until(lambda: is_served(server, days, 2))
    shutil.copy(days.folder / "1.zoo", place / "3.zoo")  # another parent
    wait_until(lambda: any("3.zoo changes the model" in message for message in server.said))
    assert is_served(server, days, 2)
    assert all(message.startswith("zoo: ") for message in server.said)
    assert server.end() == 0


def test_a_restart_from_a_later_model_skips_the_deltas_that_lead_to_it(
    start: Callable[..., Server], days: Days, tmp_path: Path
) -> None:
    place, base = tmp_path / "place", tmp_path / "monday"
    place.mkdir()
    zoo.api.delta(days.folder / "monday", days.folder / "tuesday", tmp_path / "whole.zoo", whole=True)
    zoo.api.apply_delta(days.folder / "monday", tmp_path / "whole.zoo", base)
    for day in (1, 2):
        shutil.copy(days.folder / f"{day}.zoo", place)
    server = start(base, "--workers", "1", "--deltas", place, "--engine", FORM)
    status, headers, body = server.ask("/v1/models/tuesday:run", days.row, CSV)
    assert status == 200 and headers["model-version"] == f"1-{days.digests[2][:12]}"
    assert [np.float32(row["probability"]) for row in json.loads(body)["results"]] == days.expected[2]
    assert server.end() == 0


def test_all_versions_run_in_the_form_of_the_model(days: Days, tmp_path: Path) -> None:
    model = ServedModel("monday", str(days.folder / "monday"))
    versions = Versions(model, open_transport(tmp_path), tmp_path / "scratch")
    assert versions.first().engine == chosen_form(days.folder / "monday" / "native.onnx")
    assert base_engine(versions.engine) == "native" != versions.engine
    pinned = Versions(replace(model, engine=FORM), open_transport(tmp_path), tmp_path / "scratch")
    assert pinned.first().engine == FORM


def test_versions_leave_no_files(start: Callable[..., Server], home: Path, days: Days, tmp_path: Path) -> None:
    server = start(days.folder / "monday", "--workers", "1", "--deltas", tmp_path, "--engine", FORM)
    shutil.copy(days.folder / "1.zoo", tmp_path)
    wait_until(lambda: is_served(server, days, 1))
    own = f"{server.process.pid}-*"
    assert len([*(home / "versions").glob(own)]) == 1
    assert server.end() == 0
    wait_until(lambda: not [*(home / "versions").glob(own)])


def test_a_delta_that_only_changes_rows_is_written_in_place(days: Days, tmp_path: Path) -> None:
    new, file = tmp_path / "swapped", tmp_path / "d.zoo"
    shutil.copytree(days.folder / "monday", new)
    content = bytearray((new / "int8.onnx").read_bytes())
    content[-40:] = bytes(reversed(content[-40:]))
    (new / "int8.onnx").write_bytes(content)
    from pipelines.deltas.delta import write_delta

    write_delta(days.folder / "monday", new, file, "deepfm")
    target = tmp_path / "int8"
    target.mkdir()
    shutil.copy(days.folder / "monday" / "int8.onnx", target)
    inode = (target / "int8.onnx").stat().st_ino
    with open_delta(file) as delta:
        apply_in_place(delta, target, ["int8.onnx"])
    assert (target / "int8.onnx").read_bytes() == bytes(content) and (target / "int8.onnx").stat().st_ino == inode


def test_columns_of_a_delta_count_new_changed_and_evicted_ids(days: Days) -> None:
    assert days.made["columns"]["user_id"]["new"] == 10 and days.made["columns"]["item_id"]["new"] == 0
    assert days.made["columns"]["user_id"]["evicted"] == 0
    assert zoo.api.info(days.folder / "2.zoo")["columns"] == days.made["columns"]


def test_a_delta_has_the_files_that_a_server_runs(days: Days, tmp_path: Path) -> None:
    with open_delta(days.folder / "1.zoo") as delta:
        assert set(delta.files) == {"card.json", "int8.onnx", "native.onnx", "native.onnx.data"} and not delta.whole
        shutil.copy(days.folder / "monday" / "rewritten.onnx", tmp_path)
        with pytest.raises(RequestError, match=r"1\.zoo has no rewritten\.onnx; make it with: .* --all"):
            apply_in_place(delta, tmp_path, ["rewritten.onnx"])
    with pytest.raises(RequestError, match="expected all files of the model"):
        zoo.api.apply_delta(days.folder / "monday", days.folder / "1.zoo", tmp_path / "new")
    made = zoo.api.delta(days.folder / "monday", days.folder / "tuesday", tmp_path / "all.zoo", whole=True)
    assert made["whole"] and made["digest"] == days.made["parent"] and made["bytes"] > days.made["bytes"]


def test_requests_that_cannot_be_answered(days: Days, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="expected two models of one"):
        zoo.api.delta(days.folder / "monday", "wide-deep-criteo", tmp_path / "d.zoo")
    with pytest.raises(RequestError, match="expected the model that it was made from"):
        zoo.api.delta(days.folder / "tuesday", days.folder / "1.zoo", tmp_path / "new", apply=True)
    assert not any(tmp_path.iterdir())


def test_fine_tuning_writes_a_small_delta_behind_the_last(days: Days, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    settings = {"epochs": "1", "batch_size": "64", "freeze_towers": "true"}
    log = log_of_ages(tmp_path / "log.csv", range(4), seed=7)  # a part of the users
    made = zoo.finetune(days.folder / "monday", log, tmp_path / "new", settings=settings, delta=f"{place}/")["delta"]
    assert made["path"] == f"{place}/000001.zoo" and made["columns"]["user_id"]["new"] == 0
    again = zoo.finetune(tmp_path / "new", log, tmp_path / "newer", settings=settings, delta=place)["delta"]
    assert again["path"].endswith("place/000002.zoo") and again["parent"] == made["digest"]
    with open_delta(place / "000002.zoo") as delta:
        tables = {piece.table: (piece.given, piece.rows) for piece in delta.files["native.onnx"].pieces if piece.given}
    assert tables and all(changed < rows for changed, rows in tables.values())  # the scales are kept
    with pytest.raises(RequestError, match="neither --prune nor --strategy"):
        zoo.finetune(days.folder / "monday", log, tmp_path / "x", prune="rows=5", delta=place)
