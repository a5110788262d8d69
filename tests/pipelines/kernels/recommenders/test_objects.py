"""Native programs as objects: their layers validated, used from many threads, their arrays kept and never followed
outside; where there are no kernels.
"""

import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from helpers.click_layers import check_dense, dense, feeds, first_layer, network, same

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.recommenders import native, reference
from pipelines.kernels.recommenders.steps import Mixed

pytestmark = pytest.mark.skipif(extension.native() is None, reason=extension.missing())


DENSE, NETWORK = dense(np.random.default_rng(0), 40, 9), network(np.random.default_rng(0))


def test_a_version_that_is_not_there_is_refused():
    for name in ("neon", "AVX512", " ", "avx512\0"):
        with pytest.raises(ValueError, match="no kernels for"):
            native.click_program(NETWORK, name)


def test_the_extension_itself_refuses_arrays_that_do_not_fit(rng):
    """Beneath the steps' dataclasses, which check more."""
    module = extension.native()

    def program():
        return module.ClickProgram(np.full(3, 7, np.int32), 4, 0, [("i2", 4), ("u1", 40), ("u1", 9), ("f4", 1)], "")

    step = first_layer(rng, x=0)
    names = ("weight", "scale", "bias", "table", "columns", "offsets", "rows")
    right = {name: getattr(step, name) for name in ("x", "first", *names, "outs", "shift", "added", "ahead")}
    program().mixed(**right)
    for name in names:
        array = right[name]
        shorter = array[:, :-1] if name == "weight" else array[:-1]  # of fewer inputs it would be right
        for wrong in (shorter, array.astype(np.float64), array[..., None], np.repeat(array, 2, axis=0)[::2]):
            with pytest.raises((TypeError, ValueError)):
                program().mixed(**(right | {name: wrong}))
    for name, wrong in (
        ("x", 1),
        ("x", 9),
        ("first", 1),
        ("first", -1),
        ("shift", -1),
        ("shift", 15),
        ("outs", ((1, 39, True),)),
        ("outs", ((9, 40, True),)),
        ("outs", ()),
        ("columns", np.array([-1, 0, 1], np.int32)),
        ("columns", np.array([0, 1, 3], np.int32)),
        ("offsets", np.array([-1, 7, 14], np.int32)),
        ("offsets", np.array([0, 7, 15], np.int32)),
        ("rows", np.array([0, 7, 7], np.int32)),
        ("rows", np.array([7, 7, 2**31 - 1], np.int32)),
        ("columns", np.zeros(0, np.int32)),
        ("table", None),
    ):
        with pytest.raises(ValueError, match="fit"):
            program().mixed(**(right | {name: wrong}))
    weight, bias, scale = DENSE.weight, DENSE.bias, DENSE.scale
    program().dense(1, 2, weight, bias, scale, 0, 0)
    for wrong in (
        (weight, bias[:1], scale),
        (weight, bias, scale[:1]),
        (weight[:0], bias, scale),
        (weight[:, :0], bias[:0], scale[:0]),
    ):
        with pytest.raises(ValueError, match="fit"):
            program().dense(1, 2, *wrong, 0, 0)
    floats = np.zeros(21, np.float32)
    program().lookup_sum(3, floats, step.columns, step.offsets, step.rows)
    for wrong in (floats[:20], floats[:0]):
        with pytest.raises(ValueError, match="fit"):
            program().lookup_sum(3, wrong, step.columns, step.offsets, step.rows)
    with pytest.raises(ValueError, match="fit"):
        program().lookup_sum(1, floats, step.columns, step.offsets, step.rows)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": np.zeros(3, np.int8)}, "expected [inputs, outputs]"),
        ({"weight": np.zeros((0, 9), np.int8)}, "expected [inputs, outputs]"),
        ({"weight": np.zeros((40, 9), np.uint8)}, "weight uint8"),
        ({"bias": np.zeros(9, np.int64)}, "bias int64"),
        ({"scale": np.zeros(8, np.float32)}, "scale float32 [8]; expected float32 [9]"),
        ({"zero_point": 256}, "zero point 256"),
        ({"low": -1}, "lower bound -1"),
        ({"bias": np.full(9, 2**31 - 1, np.int32)}, "overflow 32 bits"),
        ({"scale": np.full(9, np.inf, np.float32)}, "overflow"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_linear_layers_are_validated(changes, said):
    with pytest.raises(RequestError) as caught:
        replace(DENSE, **changes)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def replaced(program, kind, **changes):
    """The program with changes of its steps of this kind."""
    steps = tuple(replace(step, **changes) if isinstance(step, kind) else step for step in program.steps)
    return replace(program, steps=steps)


def test_arrays_of_a_layer_may_lie_in_any_way(rng, isa):
    """All but tables are copied in any case."""
    step = next(step for step in NETWORK.steps if isinstance(step, Mixed))
    changes = {
        "weight": np.asfortranarray(step.weight),
        "scale": np.repeat(step.scale, 2)[::2],
        "bias": np.frombuffer(b"x" + step.bias.tobytes(), np.uint8)[1:].view(np.float32),
    }
    arrays = feeds(rng, NETWORK, 5)
    kernel = native.click_program(replaced(NETWORK, Mixed, **changes), isa)
    same([kernel(*arrays)], reference.run(NETWORK, *arrays))
    layer = replace(DENSE, weight=np.asfortranarray(DENSE.weight))
    check_dense(layer, isa, rng.integers(0, 256, (5, 40), np.uint8))


def test_the_table_stays_in_its_file_and_all_else_is_copied(rng, isa, tmp_path):
    path, arrays = tmp_path / "table", feeds(rng, NETWORK, 5)
    step = next(step for step in NETWORK.steps if isinstance(step, Mixed))
    step.table.tofile(path)
    table = np.memmap(path, np.uint8, "r+", shape=step.table.shape)
    copies = {name: getattr(step, name).copy() for name in ("columns", "offsets", "rows", "weight", "scale", "bias")}
    shown = np.memmap(path, np.uint8, "r", shape=step.table.shape)
    kernel = native.click_program(replaced(NETWORK, Mixed, table=shown, **copies), isa)
    del shown
    for array in copies.values():
        array[:] = 0
    gc.collect()
    expected = reference.run(NETWORK, *arrays)
    same([kernel(*arrays)], expected)
    table[:, :40] = 77  # what is written to the file is what the kernel sees
    output = kernel(*arrays)
    assert not np.array_equal(output, expected[0])
    same([output], reference.run(replaced(NETWORK, Mixed, table=np.asarray(table)), *arrays))


def test_results_outlive_their_kernel(rng, isa):
    arrays = feeds(rng, NETWORK, 5)
    output = native.click_program(NETWORK, isa)(*arrays)
    gc.collect()
    kept = [np.full(1 << size, 255, np.uint8) for size in range(6, 20)]  # takes what was freed
    same([output], reference.run(NETWORK, *arrays))
    output[:] = kept[0][0]  # results are the caller's own


# --- threads


def test_one_object_in_many_threads_gives_the_same_bits(rng, isa):
    program = network(rng, (130, 70, 9, 1), 6, 7, 3)
    kernel = native.click_program(program, isa)
    batches = [feeds(rng, program, count) for count in (1, 300, 17, 600, 256, 5)]
    wanted = [reference.run(program, *batch) for batch in batches]

    def work(number):
        for turn in range(12):
            place = (number + turn) % len(batches)
            same([kernel(*batches[place])], wanted[place])
            with pytest.raises(IndexError):
                kernel(batches[place][0] - 8, *batches[place][1:])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_other_threads_run_during_a_call(rng):
    """While the lock is held, no Python code runs: a thread that counts would stand still for the whole call."""
    program = network(rng, (1024, 512, 1))
    kernel, arrays = native.click_program(program, "portable"), feeds(rng, program, 2000)
    counted, over = [], threading.Event()

    def count():
        while not over.is_set():
            counted.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    while not counted:
        time.sleep(0.001)
    begin = time.perf_counter()
    kernel(*arrays)
    end = time.perf_counter()
    over.set()
    thread.join()
    during = sum(begin < moment < end for moment in counted)
    assert during >= 3


# --- where there are no kernels


def test_without_the_extension_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pipelines.kernels._native", None)
    assert extension.native() is None and extension.isas() == []
    assert "install a C++17 compiler" in extension.missing() and "\n" not in extension.missing()
    with pytest.raises(RequestError, match="the native kernels are not available: .*; install a C"):
        native.click_program(NETWORK)


def test_the_extension_is_found_from_another_process_in_any_folder(tmp_path):
    code = "from pipelines.kernels import extension as found; print(found.missing() or found.isas()[-1])"
    child = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "portable"


@pytest.mark.skipif(not extension.isas(), reason=extension.missing())
def test_ids_that_change_during_a_call_are_never_followed(rng, isa):
    """Another thread writes rows that do not exist into the batch between the check and the reading of a part."""
    kernel = native.click_program(network(rng, (64, 1), rows=5, numbers=0), isa)
    ids, done = np.zeros((4099, 3), np.int32), threading.Event()

    def spoil():
        while not done.is_set():
            ids[:, 1] = 2**31 - 1
            ids[:, 1] = 0

    other = threading.Thread(target=spoil)
    other.start()
    outcomes = set()
    for _ in range(300):
        try:
            kernel(ids, None, None)
            outcomes.add("right")
        except IndexError:
            outcomes.add("refused")
    done.set()
    other.join()
    assert outcomes
