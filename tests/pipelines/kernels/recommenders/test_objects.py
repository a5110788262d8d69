"""Native click layers as objects: validated, used from many threads, their arrays kept and never followed outside; where
there are no kernels.
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
from helpers.click_layers import DENSE, GOOD, LAYER, RNG, dense, embedding, feeds, network, same

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.recommenders import native as kernels
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.operators import FIELDS

pytestmark = pytest.mark.skipif(extension.native() is None, reason=extension.missing())


def test_a_version_that_is_not_there_is_refused():
    for name in ("neon", "AVX512", " ", "avx512\0"):
        with pytest.raises(ValueError, match="no kernels for"):
            kernels.parallel_embedding(LAYER, name)
        with pytest.raises(ValueError, match="no kernels for"):
            kernels.linear(DENSE, name)


def test_networks_whose_layers_do_not_follow_one_another_are_refused(isa):
    first = kernels.parallel_embedding(LAYER, isa)
    last, wide, middle = (kernels.linear(each, isa) for each in (dense(9, 1, None), dense(9, 2, None), DENSE))
    for layers in ([], [middle], [last], [middle, middle, last], [middle, wide], [middle, last, last], [last, middle]):
        with pytest.raises(ValueError, match="follow"):
            kernels.click_network(first, layers, False)
    for layers in ([middle, None], [None], [1], ["x"], [first]):
        with pytest.raises(TypeError):
            kernels.click_network(first, layers, False)
    for other in (None, middle, 1):
        with pytest.raises(TypeError):
            kernels.click_network(other, [middle, last], False)
    assert kernels.click_network(first, [middle, last], False)(*GOOD).shape == (5, 1)


def test_the_extension_itself_refuses_arrays_that_do_not_fit():
    """Beneath `EmbeddingLayer` and `LinearLayer`, which check more."""
    module = extension.native()
    names = ("table", "columns", "offsets", "rows", "weight", "scale", "bias", "number_scale", "shift", "wide")
    right = {name: getattr(LAYER, name) for name in names} | {"isa": ""}
    module.ParallelEmbedding(**right)
    for name in names[:8] + names[9:]:
        array = right[name]
        for wrong in (array[:-1], array.astype(np.float64), array[..., None], np.repeat(array, 2, axis=0)[::2]):
            with pytest.raises((TypeError, ValueError)):
                module.ParallelEmbedding(**(right | {name: wrong}))
    for name, wrong in (
        ("shift", -1),
        ("shift", 15),
        ("columns", np.array([-1, 0, 1], np.int32)),
        ("offsets", np.array([-1, 7, 14], np.int32)),
        ("offsets", np.array([0, 7, 15], np.int32)),
        ("rows", np.array([0, 7, 7], np.int32)),
        ("rows", np.array([7, 7, 2**31 - 1], np.int32)),
        ("columns", np.zeros(0, np.int32)),
    ):
        with pytest.raises(ValueError, match="fit"):
            module.ParallelEmbedding(**(right | {name: wrong}))
    weight, bias, scale = np.ones((3, 2), np.int8), np.ones(2, np.int32), np.ones(2, np.float32)
    for wrong in (
        (weight, bias[:1], scale),
        (weight, bias, scale[:1]),
        (weight[:0], bias, scale),
        (weight[:, :0], bias[:0], scale[:0]),
    ):
        with pytest.raises(ValueError, match="fit"):
            module.Linear(*wrong, None, 0, "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"table": np.zeros((21, 40), np.uint8)}, "table uint8 [21, 40]; wanted uint8 [21, 64]"),
        ({"table": np.zeros((21, 64), np.int8)}, "table int8"),
        ({"scale": np.ones(40)}, "scale float64"),
        ({"wide": np.zeros(20, np.float32)}, "wide float32 [20]; wanted float32 [21]"),
        ({"rows": np.full(3, 8, np.int32)}, "fields outside its table of 21 rows"),
        ({"offsets": np.array([-1, 7, 14], np.int32)}, "fields outside"),
        ({"columns": np.array([-1, 0, 0], np.int32)}, "fields outside"),
        ({"shift": 15}, "shifts by 15; wanted 0 to 14"),
        ({"shift": -1}, "shifts by -1"),
        ({"bias": np.full(40, np.nan, np.float32)}, "not finite"),
        ({"number_scale": np.full(4, np.inf, np.float32)}, "not finite"),
        ({"scale": np.full(40, 1e5, np.float32)}, "beyond 32 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_embedding_layers_are_validated(changes, said):
    with pytest.raises(RequestError) as found:
        replace(LAYER, **changes)
    assert said in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize("fields", [0, FIELDS + 1])
def test_embedding_layers_of_too_many_fields_are_refused(fields):
    none = np.zeros(fields, np.int32)
    with pytest.raises(RequestError, match=f"{fields} fields; an int16 sum holds 1 to {FIELDS}"):
        replace(LAYER, columns=none, offsets=none, rows=none + 1)


def test_embedding_layers_that_could_overflow_are_refused():
    heavy = np.full((33, 40), 32767, np.int16)
    with pytest.raises(RequestError, match="overflow 32 bits; use a smaller shift"):
        replace(LAYER, weight=heavy, number_scale=np.ones(33, np.float32))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": np.zeros(3, np.int8)}, "wanted [inputs, outputs]"),
        ({"weight": np.zeros((0, 9), np.int8)}, "wanted [inputs, outputs]"),
        ({"weight": np.zeros((40, 9), np.uint8)}, "weight uint8"),
        ({"bias": np.zeros(9, np.int64)}, "bias int64"),
        ({"scale": np.zeros(8, np.float32)}, "scale float32 [8]; wanted float32 [9]"),
        ({"zero_point": 256}, "zero point 256"),
        ({"low": -1}, "lower bound -1"),
        ({"bias": np.full(9, 2**31 - 1, np.int32)}, "overflow 32 bits"),
        ({"scale": np.full(9, np.inf, np.float32)}, "overflow"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_linear_layers_are_validated(changes, said):
    with pytest.raises(RequestError) as found:
        replace(DENSE, **changes)
    assert said in str(found.value) and "\n" not in str(found.value)


def test_arrays_of_a_layer_may_lie_in_any_way(isa):
    """All but the table's are copied in any case."""
    layer = replace(
        LAYER,
        weight=np.asfortranarray(LAYER.weight),
        scale=np.repeat(LAYER.scale, 2)[::2],
        bias=next(unaligned(LAYER.bias)),
    )
    same(kernels.parallel_embedding(layer, isa)(*GOOD), reference.parallel_embedding(LAYER, *GOOD))
    x = RNG.integers(0, 256, (5, 40), np.uint8)
    same([kernels.linear(replace(DENSE, weight=np.asfortranarray(DENSE.weight)), isa)(x)], [reference.linear(DENSE, x)])


def unaligned(array):
    yield np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


def test_the_table_stays_in_its_file_and_all_else_is_copied(isa, tmp_path):
    path = tmp_path / "table"
    LAYER.table.tofile(path)
    table = np.memmap(path, np.uint8, "r+", shape=LAYER.table.shape)
    arrays = {
        name: getattr(LAYER, name).copy()
        for name in ("columns", "offsets", "rows", "weight", "scale", "bias", "number_scale", "wide")
    }
    shown = np.memmap(path, np.uint8, "r", shape=LAYER.table.shape)
    native = kernels.parallel_embedding(replace(LAYER, table=shown, **arrays), isa)
    del shown
    for array in arrays.values():
        array[:] = 0
    gc.collect()
    same(native(*GOOD), reference.parallel_embedding(LAYER, *GOOD))
    table[:, :40] = 77  # what is written to the file is what the kernel sees
    assert not np.array_equal(native(*GOOD)[0], reference.parallel_embedding(LAYER, *GOOD)[0])
    same(native(*GOOD), reference.parallel_embedding(replace(LAYER, table=np.asarray(table)), *GOOD))


def test_what_an_object_needs_lives_as_long_as_it_does(isa):
    net = network(isa, (40, 9, 1), 3, 4)[1]
    expected = net(*GOOD)
    hidden, wide = kernels.parallel_embedding(replace(LAYER, table=LAYER.table.copy()), isa)(
        *GOOD
    )  # outlive their kernel
    gc.collect()
    kept = [np.full(1 << size, 255, np.uint8) for size in range(6, 20)]  # takes what was freed
    same([net(*GOOD)], [expected])
    same((hidden, wide), reference.parallel_embedding(LAYER, *GOOD))
    hidden[:] = kept[0][0]  # results are the caller's own


# --- threads


def test_one_object_in_many_threads_gives_the_same_bits(isa):
    first, native, expected = network(isa, (130, 70, 9, 1), 6, 3)
    kernel = kernels.parallel_embedding(first, isa)
    batches = [feeds(first, count) for count in (1, 300, 17, 600, 256, 5)]
    wanted = [(expected(*each), reference.parallel_embedding(first, *each)) for each in batches]

    def work(number):
        for turn in range(12):
            place = (number + turn) % len(batches)
            same([native(*batches[place])], wanted[place][:1])
            same(kernel(*batches[place]), wanted[place][1])
            with pytest.raises(IndexError):
                native(batches[place][0] - 8, batches[place][1])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_other_threads_run_during_a_call():
    """While the lock is held, no Python code runs: a thread that counts would stand still for the whole call."""
    layer = dense(1024, 512)
    native = kernels.linear(layer, "portable")
    x = RNG.integers(0, 256, (2000, 1024), np.uint8)
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
    native(x)
    end = time.perf_counter()
    over.set()
    thread.join()
    during = sum(begin < each < end for each in counted)
    assert during >= 3


# --- where there are no kernels


def test_without_the_extension_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pipelines.kernels._native", None)
    assert extension.native() is None and extension.isas() == []
    assert "install a C++17 compiler" in extension.missing() and "\n" not in extension.missing()
    with pytest.raises(RequestError, match="there are no native kernels here: .*; install a C"):
        kernels.linear(DENSE)


def test_the_extension_is_found_from_another_process_in_any_folder(tmp_path):
    code = "from pipelines.kernels import extension as found; print(found.missing() or found.isas()[-1])"
    found = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "portable"


@pytest.mark.skipif(not extension.isas(), reason=extension.missing())
def test_ids_that_change_during_a_call_are_never_followed(isa):
    """Another thread writes rows that do not exist into the batch between the check of the whole of it and the reading
    of a part.
    """
    kernel = kernels.parallel_embedding(embedding(3, 5, 64, 0), isa)
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
            kernel(ids, None)
            outcomes.add("right")
        except IndexError:
            outcomes.add("refused")
    done.set()
    other.join()
    assert outcomes
