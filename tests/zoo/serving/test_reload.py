"""`--watch`: files from elsewhere are opened or named, never written over, and a model that was served stays served."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.serving import TSV, Server, own_folder, wait_until

import zoo
from pipelines.core.files import sha256, write_bytes

ROWS = "/v1/models/mine:run"


def test_another_int8_file_is_served_and_a_damaged_one_is_not(
    start: Callable[..., Server], home: Path, tmp_path: Path, lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_HOME", str(home))
    folder, other = own_folder(tmp_path / "mine", lines), tmp_path / "other"
    shutil.copytree(folder, other)
    zoo.quantize(other, keep_float=["deep.*"])
    expected = zoo.pipeline(other, engine="onnxruntime")(lines[:5])
    file, content = folder / "int8.onnx", (other / "int8.onnx").read_bytes()
    server = start(folder, "--workers", "1", "--watch")
    body = b"\n".join(lines[:5])
    before = server.json(ROWS, body, TSV)["results"]
    write_bytes(file, b"no model")
    wait_until(lambda: any("not served" in line and "int8.onnx is damaged" in line for line in server.said))
    assert server.json(ROWS, body, TSV)["results"] == before and file.read_bytes() == b"no model"
    write_bytes(file, content)
    wait_until(lambda: any("the new files of mine are served" in line for line in server.said))
    results = server.json(ROWS, body, TSV)["results"]
    assert [row["probability"] for row in results] == pytest.approx([row["probability"] for row in expected], abs=1e-5)
    assert results != before and file.read_bytes() == content
    assert server.json("/v1/models/mine")["version"] == "2" and server.end() == 0


@pytest.mark.slow
def test_a_tokenizer_that_panics_is_not_switched_to(start: Callable[..., Server], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the train extra")
    pytest.importorskip("transformers", reason="needs the test extra")
    from helpers.text_models import built

    folder = built(tmp_path, 0)
    server = start(folder, "--workers", "1", "--watch")
    status, _, vectors = server.ask("/v1/models/texts-0:run", b"a text", "text/plain")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {"SpecialToken": {"id": "[NOPE]", "type_id": 0}}
    tokenizer["post_processor"]["single"].insert(0, special)
    card = json.loads((folder / "card.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    card["files"]["tokenizer.json"] |= {
        "size": (folder / "tokenizer.json").stat().st_size,
        "sha256": sha256(folder / "tokenizer.json"),
    }
    (folder / "card.json").write_text(json.dumps(card))
    os.utime(folder / "int8.onnx")
    wait_until(lambda: any("are not served" in line for line in server.said))
    said = [line for line in server.said if "zoo:" not in line or "not served" in line]
    assert len(said) == 1 and "tokenizer.json (no entry found for key)" in said[0]
    assert server.ask("/v1/models/texts-0:run", b"a text", "text/plain")[::2] == (status, vectors)
    assert server.end() == 0
