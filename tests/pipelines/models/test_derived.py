"""Other forms of a file, derived once for each source and form."""

import os

import numpy as np
import onnx_ir as ir
import pytest

from pipelines.core import derived
from pipelines.core.files import mapped
from pipelines.graph import io
from pipelines.models.folder import derived_graph
from pipelines.models.stages import build


def test_another_form_of_a_file_is_derived_once_for_each_source_and_form(folder):
    calls = []

    def make(found):
        calls.append(found)
        return found

    path = derived_graph(folder, "int8.onnx", "other", "1", make)
    assert path.parent == folder.path
    assert path.name.startswith("int8.other-")
    assert derived_graph(folder, "int8.onnx", "other", "1", make) == path
    assert len(calls) == 1
    newer = derived_graph(folder, "int8.onnx", "other", "2", make)
    assert not path.exists()  # nobody asks for it again
    (folder.path / "seed.txt").write_text("2")
    assert derived_graph(folder, "int8.onnx", "other", "2", make) != newer
    last = derived_graph(folder, "int8.onnx", "other", "2", make)
    assert sorted(folder.path.glob("int8.other-*")) == [last, mapped(last), derived._identities(last)]


@pytest.mark.parametrize("part", ["graph", "weights", "identities"])
def test_another_form_that_has_changed_since_is_derived_anew(folder, part):
    made = []

    def make(found):
        made.append(found)
        weight = ir.tensor(np.arange(8192, dtype=np.float32), name="large")
        found.graph.initializers["large"] = ir.Value(name="large", const_value=weight)
        found.graph.initializers["large"].const_value = weight
        return found

    def derive():
        return derived_graph(folder, "int8.onnx", "other", "1", make)

    path = derive()
    files = {"graph": path, "weights": mapped(path), "identities": derived._identities(path)}
    content = {name: file.read_bytes() for name, file in files.items()}
    os.utime(files["weights"])  # another time, the same bytes
    assert derive() == path and len(made) == 1
    damaged = bytearray(content[part])
    damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
    files[part].write_bytes(damaged)
    assert derive() == path and len(made) == 2
    assert path.read_bytes() == content["graph"] and mapped(path).read_bytes() == content["weights"]


def test_where_the_folder_may_not_be_written_the_cache_is(folder, monkeypatch, tmp_path):
    build(folder)
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    save = io.save_mapped

    def refuse(found, path, least):
        if path.parent == folder.path:
            raise PermissionError(13, "Permission denied")
        return save(found, path, least)

    monkeypatch.setattr(io, "save_mapped", refuse)
    path = derived_graph(folder, "int8.onnx", "other", "1", lambda model: model)
    assert path.is_relative_to(tmp_path / "home")
    assert derived_graph(folder, "int8.onnx", "other", "1", lambda model: model) == path
