"""Arrays of programs in files lie within the file, whatever sizes its header gives."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from pipelines.kernels import program_file


@dataclass(frozen=True)
class Program:
    table: np.ndarray


@pytest.mark.parametrize(
    ("shape", "offset"),
    [
        pytest.param([2**62, 64], 0, id="more elements than 64 bits count: the product wraps around to 0"),
        pytest.param([2**31, 2**31, 4], 0, id="bytes that wrap around to 0"),
        pytest.param([3, 64], 0, id="a row more than there are"),
        pytest.param([2, 64], -8192, id="before the file"),
        pytest.param([2, 64], 2**62, id="far behind the file"),
        pytest.param([-1, 64], 0, id="a negative size"),
    ],
)
def test_an_array_outside_its_file_is_refused(tmp_path, shape, offset):
    path = tmp_path / "m.zoo"
    program_file.save(path, [Program(np.ones((2, 64), np.int32))], {"Program": Program}, 1)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["programs"][0]["Program"]["table"]["array"][1:] = [shape, offset]
    changed = json.dumps(header).encode()
    arrays = content[program_file.PAGE :]
    path.write_bytes((len(changed).to_bytes(8, "little") + changed).ljust(program_file.PAGE, b"\0") + arrays)
    with pytest.raises(RequestError, match=r"m\.zoo is not readable.*it is rebuilt"):
        program_file.load(path, {"Program": Program}, 1)


def test_arrays_are_views_of_their_file(tmp_path):
    path = tmp_path / "m.zoo"
    table = np.arange(12, dtype=np.int16).reshape(3, 4)
    program_file.save(path, [Program(table.T)], {"Program": Program}, 1)
    (program,) = program_file.load(path, {"Program": Program}, 1)
    np.testing.assert_array_equal(program.table, table.T)
    assert not program.table.flags.owndata
