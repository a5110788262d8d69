"""The engine native: one small folded model in all its ways, the shipped model through the verbs, and everything that
can be missing.
"""

import gzip
import itertools
import json
import multiprocessing
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from rewriting import EXACT, model, run

import zoo
from pipelines.analysis.benchmark import Configuration, benchmark
from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import mapped
from pipelines.engines import quickest
from pipelines.engines.catalog import load
from pipelines.engines.native_clicks import CHUNK, SMALL
from pipelines.engines.timing import Choice
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.clicks import reference
from pipelines.kernels.clicks.from_graph import dense_layers, embedding_layer
from pipelines.models.folder import NATIVE
from pipelines.models.pipeline import choose_engine
from pipelines.models.stages import build
from pipelines.quantization.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from zoo.clicks.fold import fold
from zoo.clicks.rewrites import FuseParallelEmbedding, FuseParallelSum

NAME = "wide-deep-criteo"
ROWS = (20_000, 3, 200)  # so many that the table lies in native.onnx.data
PLAN = Choice("", 1, 1, {}, "")
COUNTS = (1, 2, 31, 32, 33, 127, 128, 129, 300, 512)
needs_kernels = pytest.mark.skipif(extension.native() is None, reason=extension.missing())


def folded(*, dense=True, wide=True, sigmoid=False, outputs=1, middle="Relu", ids="int32"):
    """A click model of `ROWS` as fold makes it for the kernels, and its float form."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    fields, width = len(ROWS), 8 * len(ROWS) + (4 if dense else 0)
    weights = {f"E{f}": normal(rows, 8) for f, rows in enumerate(ROWS)} | {f"c{f}": np.int64(f) for f in range(fields)}
    weights |= {
        "W": normal(width, 64) / np.float32(width**0.5),
        "b": normal(64),
        "V": normal(64, 16) / np.float32(8),
        "d": normal(16),
    }
    weights |= {"U": normal(16, outputs) / np.float32(4), "t": normal(outputs)}
    lines = [f"i{f} = Gather<axis=1>(ids, c{f}) e{f} = Gather(E{f}, i{f})" for f in range(fields)]
    parts = [*(f"e{f}" for f in range(fields)), *(["x"] if dense else [])]
    lines.append(
        f"v = Concat<axis=1>({', '.join(parts)}) g = Gemm(v, W, b) h = Relu(g) m = Gemm(h, V, d) r = {middle}(m) z = "
        "Gemm(r, U, t)"
    )
    last = "z"
    if wide:
        weights |= {f"S{f}": normal(rows, 1) for f, rows in enumerate(ROWS)}
        for f in range(fields):
            lines.append(f"j{f} = Gather<axis=1>(ids, c{f}) k{f} = Gather(S{f}, j{f}) s{f} = Add({last}, k{f})")
            last = f"s{f}"
    lines.append(f"y = {'Sigmoid' if sigmoid else 'Identity'}({last})")
    inputs = f"{ids}[n,{fields}] ids{', float[n,4] x' if dense else ''}"
    float32 = model(f"({inputs}) => (float[n,{outputs}] y) {{ {' '.join(lines)} }}", **weights)
    rewrite(float32, [FuseParallelEmbedding(), FuseParallelSum()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "caches", lambda: {"L1d": 2**15, "L2": 2**22, "L3": 2**25})
        result, report = fold(float32, calibrate(float32, [feeds(1000, dense=dense, ids=ids)]), QuantRecipe())
    assert report["fold"], report
    return result, float32


def feeds(count, *, dense=True, ids="int32", seed=1):
    rng = np.random.default_rng(seed)
    found = {"ids": rng.integers(0, ROWS, (count, len(ROWS)), np.dtype(ids))}
    return found | ({"x": rng.uniform(-1, 1, (count, 4)).astype(np.float32)} if dense else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """native.onnx of the small model, and float.onnx."""
    path = tmp_path_factory.mktemp("native")
    result, float32 = folded()
    io.save_mapped(result, path / NATIVE)
    io.save(float32, path / "float.onnx")
    assert mapped(path / NATIVE).stat().st_size > 1 << 20
    return path


@pytest.fixture
def session(folder):
    return load(folder / NATIVE, "native", 1)


def way(name):
    """The option of `native_clicks.options` that runs the layers in `name`."""
    return name if name == "native" else f"native+{name}"


def only(name):
    """A stand-in for `choose` that always takes one way."""
    return lambda digest, candidates, batch, threads: replace(
        PLAN, engine=way(name) if way(name) in candidates else min(candidates)
    )


@pytest.fixture
def mild(monkeypatch):
    """The quickest way is not timed: all batches run in native code."""
    monkeypatch.setattr(quickest, "choose", only("native"))


def by_reference(path, batch):
    """The logits in numpy."""
    first = next(node for node in io.load_mapped(path).graph if node.domain)
    layers, sigmoid = dense_layers(first)
    assert not sigmoid
    value, wide = reference.parallel_embedding(embedding_layer(first), batch["ids"], batch["x"])
    for each in layers:
        value = reference.linear(each, value)
    return value + wide, layers


def one_line(error, *words):
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


# --- results


@needs_kernels
def test_the_native_way_is_the_reference_and_near_float(session, folder):
    batch = feeds(2000)
    found = session._open("native").run(batch)["y"]
    expected, _ = by_reference(folder / NATIVE, batch)
    assert found.dtype == np.float32 and found.tobytes() == expected.tobytes()
    float32 = run(io.load(folder / "float.onnx"), **batch)["y"]
    assert 0 < np.abs(found - float32).max() < 0.03 * np.ptp(float32)


@needs_kernels
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_the_ways_differ_by_one_step_of_a_hidden_value_at_most(session, folder, name):
    batch = feeds(1000)
    expected, layers = by_reference(folder / NATIVE, batch)
    found = session._open(way(name)).run(batch)["y"]
    assert found.shape == expected.shape
    step = layers[-1].scale.max() * np.abs(layers[-1].weight.astype(np.int32)).max()
    difference = np.abs(found - expected)
    assert difference.max() <= step * 1.01
    assert (difference < 1e-5).mean() > 0.95


@needs_kernels
@pytest.mark.parametrize("name", ["native", *EXACT])
def test_batches_of_all_sizes_in_any_order_give_the_rows_results(session, monkeypatch, name):
    """A row's result depends neither on its batch nor on the batches before it."""
    monkeypatch.setattr(quickest, "choose", only(name))
    batch = feeds(max(COUNTS))
    whole = session._open(way(name)).run(batch)["y"]
    small = session._open("native").run(batch)["y"]
    for count in np.random.default_rng(2).permutation([*COUNTS, *COUNTS]):
        found = session.run({key: array[:count] for key, array in batch.items()})["y"]
        assert found.tobytes() == (small if count <= SMALL else whole)[:count].tobytes()


@needs_kernels
@pytest.mark.parametrize(
    "changes",
    [{"dense": False}, {"wide": False}, {"dense": False, "wide": False}, {"sigmoid": True}, {"ids": "int64"}],
    ids=str,
)
def test_models_without_numbers_or_a_wide_part(tmp_path, mild, changes):
    result, float32 = folded(**changes)
    path = io.save_mapped(result, tmp_path / NATIVE)
    batch = feeds(300, **{key: value for key, value in changes.items() if key in ("dense", "ids")})
    opened = load(path, "native", 1)
    found = opened.run(batch)["y"]
    stock = opened._open(way("onnxruntime")).run(batch)["y"]
    expected = run(float32, **batch)["y"]
    assert found.shape == (300, 1)
    assert np.abs(found - expected).max() < 0.03 * np.ptp(expected)
    assert np.abs(found - stock).max() < 0.01 * np.ptp(expected)
    assert set(opened.inputs) == set(batch)


@needs_kernels
@pytest.mark.parametrize("changes", [{"outputs": 2, "wide": False}, {"middle": "Tanh"}], ids=str)
def test_other_layers_run_in_a_stock_engine_at_all_sizes(tmp_path, changes):
    result, float32 = folded(**changes)
    opened = load(io.save_mapped(result, tmp_path / NATIVE), "native", 1)
    for count in (1, 300):
        batch = feeds(count)
        expected = run(float32, **batch)["y"]
        assert np.abs(opened.run(batch)["y"] - expected).max() < 0.05 * max(np.ptp(expected), 1)
    assert set(opened._sessions) <= {way("onnxruntime"), way("openvino")} and len(opened.executed(batch)) > 1


@needs_kernels
def test_two_threads_give_the_results_of_one(folder, mild):
    one, two = (load(folder / NATIVE, "native", threads) for threads in (1, 2))
    for count in (*COUNTS, 2 * CHUNK - 1, 4 * CHUNK + 1):
        batch = feeds(count)
        for name in ("native", "onnxruntime"):
            assert one._open(way(name)).run(batch)["y"].tobytes() == two._open(way(name)).run(batch)["y"].tobytes()


@needs_kernels
def test_one_session_in_many_threads(session, mild):
    batches = [feeds(count, seed=count) for count in COUNTS]
    expected = [session.run(batch)["y"] for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda batch: session.run(batch)["y"], batches * 10)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected * 10, strict=True))


@needs_kernels
def test_the_quickest_way_is_timed_once_a_size_and_kept_for_shorter_batches(folder, monkeypatch):
    asked = []

    def choose(digest, candidates, batch, threads):
        asked.append(len(batch["ids"]))
        assert list(candidates) == ["native", *map(way, EXACT)]
        return replace(PLAN, engine=way("onnxruntime"))

    monkeypatch.setattr(quickest, "choose", choose)
    opened = load(folder / NATIVE, "native")
    for count in (1, SMALL, 512, 500, 300, 40, 512, 33, 600, 64):
        opened.run(feeds(count))
    assert asked == [512, 600]
    assert [each.type for each in opened.executed(feeds(8))] == [
        f"{kind} {extension.isas()[0]}" for kind in ("ParallelEmbedding", "Linear")
    ]
    assert "QLinearMatMul" in {each.type for each in opened.executed(feeds(64))} or len(opened.executed(feeds(64))) > 2


@needs_kernels
def test_the_timed_choice_is_remembered(folder, zoo_home):
    batch = feeds(256)
    found = load(folder / NATIVE, "native", 1).run(batch)["y"]
    kept = [json.loads(each.read_text()) for each in (zoo_home / "plans").iterdir()]
    assert (
        len(kept) == 1 and set(kept[0]["milliseconds"]) == {"native", *map(way, EXACT)} and kept[0]["batch_size"] == 256
    )
    again = load(folder / NATIVE, "native", 1)
    assert again.run(batch)["y"].tobytes() == found.tobytes()
    assert list(again._sessions) == [kept[0]["engine"]]


# --- wrong input


@needs_kernels
@pytest.mark.parametrize("name", ["native", "onnxruntime", "openvino"])
@pytest.mark.parametrize("count", [1, 300])
def test_ids_out_of_range_are_refused_before_anything(session, monkeypatch, name, count):
    monkeypatch.setattr(quickest, "choose", only(name))
    right = feeds(count)
    session.run(right)
    for wrong, dtype in ((-1, "int32"), (3, "int32"), (2**32 + 1, "int64"), (2**31 - 1, "int32")):
        ids = right["ids"].astype(dtype)
        ids[-1, 1] = wrong
        with pytest.raises(RequestError) as error:
            session.run({**right, "ids": ids})
        one_line(error, f"found id {wrong} in row {count - 1}, column 1; wanted 0 to 2")
    assert session.run(right)["y"].shape == (count, 1)


@needs_kernels
def test_ids_out_of_range_are_refused_in_every_thread_and_while_timing(folder):
    for threads in (1, 2):
        opened = load(folder / NATIVE, "native", threads)
        batch = feeds(300)
        batch["ids"][299, 0] = ROWS[0]
        with pytest.raises(RequestError, match="found id 20000 in row 299"):  # not the row of its thread's part
            opened.run(batch)


@needs_kernels
@pytest.mark.parametrize("count", [5, 300])
def test_arrays_that_are_not_aligned_or_contiguous_are_copied(session, count):
    right = feeds(count)
    wanted = session.run(right)["y"]
    raw = np.zeros(right["x"].nbytes + 1, np.uint8)
    odd = raw[1:].view(np.float32).reshape(right["x"].shape)
    odd[:] = right["x"]
    assert not odd.flags.aligned
    np.testing.assert_array_equal(session.run({**right, "x": odd})["y"], wanted)
    np.testing.assert_array_equal(session.run({**right, "ids": np.asfortranarray(right["ids"])})["y"], wanted)


@needs_kernels
@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {"ids": batch["ids"]},
        lambda batch: {"x": batch["x"]},
        lambda batch: {},
        lambda batch: {**batch, "x": batch["x"][:-1]},
        lambda batch: {**batch, "x": batch["x"].astype(np.float64)},
        lambda batch: {**batch, "ids": batch["ids"].astype(np.float32)},
        lambda batch: {**batch, "ids": batch["ids"][:, :2]},
        lambda batch: {**batch, "ids": batch["ids"][:, 0]},
        lambda batch: {**batch, "x": None},
    ],
)
@pytest.mark.parametrize("count", [5, 300])
def test_a_wrong_batch_is_refused_in_one_line(session, mild, change, count):
    with pytest.raises(RequestError) as error:
        session.run(change(feeds(count)))
    one_line(error, "cannot run")
    session.run(feeds(count))


# --- files


@pytest.mark.parametrize("text", ["ids = Identity(x)", "h = Relu(x) ids = Neg(h)"])
def test_a_graph_without_the_operator_is_refused(tmp_path, text):
    path = io.save(model(f"(float[n,4] x) => (float[n,4] ids) {{ {text} }}"), tmp_path / "native.onnx")
    with pytest.raises(RequestError) as error:
        load(path, "native")
    one_line(error, "no ParallelEmbedding or ClickProgram operator", "native.onnx")
    with pytest.raises(RequestError) as error:  # of another name: it may be an image classifier
        load(path.rename(tmp_path / "int8.onnx"), "native")
    one_line(error, "the input x has the shape", "wanted [n, C, H, W]")


def test_engines_and_threads_are_checked(tmp_path):
    for wrong in ("tvm", "", "Native"):
        with pytest.raises(RequestError, match="choose auto, onnxruntime, openvino or native"):
            load(tmp_path / NATIVE, wrong)
    with pytest.raises(RequestError, match="1 or more"):
        load(tmp_path / NATIVE, "native", 0)
    with pytest.raises(RequestError) as error:
        load(tmp_path / NATIVE, "native")
    one_line(error, NATIVE)


@pytest.fixture
def copy(folder, tmp_path):
    for name in (NATIVE, f"{NATIVE}.data"):
        shutil.copy(folder / name, tmp_path / name)
    return tmp_path / NATIVE


def test_data_that_is_missing_or_too_short_is_refused(copy):
    data = mapped(copy)
    for size in (data.stat().st_size - 1, 4096, 0):
        with data.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(RequestError) as error:
            load(copy, "native")
        one_line(error, NATIVE, "made anew")
    data.unlink()
    with pytest.raises(RequestError) as error:
        load(copy, "native")
    one_line(error, NATIVE, "made anew")


@needs_kernels
def test_a_damaged_graph_is_refused_in_one_line_or_runs(copy):
    """Cut anywhere, or with wrong bytes: no traceback and no crash. `ModelFolder.ensure` finds every damage, by its
    digest.
    """
    content = copy.read_bytes()
    rng = np.random.default_rng(4)
    damaged = [content[: len(content) * part // 40] for part in range(40)]
    for _ in range(60):
        wrong = bytearray(content)
        for place in rng.integers(0, len(content), 8):
            wrong[place] = rng.integers(256)
        damaged.append(bytes(wrong))
    refused = 0
    for each in damaged:
        copy.write_bytes(each)
        try:
            load(copy, "native").run(feeds(5))
        except ZooError as error:  # where no engine takes the layers after the operator
            assert "\n" not in str(error)
            refused += 1
    assert refused >= 30


@needs_kernels
def test_the_table_is_the_mapped_file(copy):
    """Loading does not copy it: what is written to the file afterwards is what the kernel reads."""
    opened = load(copy, "native")
    before = opened.run(feeds(8))["y"]
    with mapped(copy).open("r+b") as file:
        file.write(bytes([200]) * mapped(copy).stat().st_size)
    assert not np.array_equal(before, opened.run(feeds(8))["y"])


# --- the shipped model


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The folder of the shipped model with its native.onnx."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_HOME", str(tmp_path_factory.mktemp("home")))
        found = zoo.load(NAME)
        found.ensure(NATIVE)
    return found


@pytest.fixture(scope="module")
def rows(shipped, tmp_path_factory):
    """A file of 600 rows."""
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"
    with gzip.open(shipped.path / "sample.tsv.gz") as file:
        path.write_bytes(b"".join(itertools.islice(file, 600)))
    return path


@needs_kernels
def test_a_damaged_build_is_made_anew(shipped, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(shipped.path, path)
    mine = replace(shipped, path=path)
    made = {name: (path / name).read_bytes() for name in (NATIVE, f"{NATIVE}.data")}
    assert build(mine, until=NATIVE)[NATIVE] == "kept"
    for name, damage in (
        (NATIVE, lambda content: content[:-1]),
        (f"{NATIVE}.data", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        (f"{NATIVE}.data", None),
    ):
        if damage is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(damage(made[name]))
        mine.ensure(NATIVE)
        assert {each: (path / each).read_bytes() for each in made} == made


def _ensure(path, gate):
    gate.wait()
    zoo.load(path).ensure(NATIVE)


def test_two_processes_may_build_at_once(shipped, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(shipped.path, path, ignore=shutil.ignore_patterns("native*"))
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(2)
    both = [context.Process(target=_ensure, args=(path, gate)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(120)
    assert [each.exitcode for each in both] == [0, 0]
    assert (path / NATIVE).read_bytes() == (shipped.path / NATIVE).read_bytes()
    assert mapped(path / NATIVE).read_bytes() == mapped(shipped.path / NATIVE).read_bytes()
    assert not list(path.glob("*tmp*"))


@needs_kernels
def test_the_shipped_model_scores_alike_in_all_engines(shipped, rows):
    found = {}
    for name in ("native", *EXACT):
        opened = zoo.pipeline(shipped.path, engine=name)
        found[name] = opened.predict(opened.preprocess(rows))["probability"]
        assert opened.engine == name
    for name in EXACT:
        assert np.abs(found["native"] - found[name]).max() < 0.02


@needs_kernels
def test_evaluate_and_run_take_the_engine(shipped, rows, tmp_path):
    found = zoo.evaluate(shipped.path, str(rows), engine="native")
    assert found["environment"]["engines"]["int8"] == "native" != found["environment"]["engines"]["fp32"]
    assert found["samples"] == 600 and found["difference"]["max_probability"] < 0.05
    done = zoo.run(shipped.path, str(rows), tmp_path / "scores.csv", engine="native")
    assert (done["engine"], done["rows"]) == ("native", 600)


@needs_kernels
def test_the_engine_is_found_by_the_process_that_measures_memory(folder, monkeypatch):
    monkeypatch.setenv("ZOO_HOME", str(folder / "home"))
    found = benchmark([Configuration("native", "int8", folder / NATIVE)], feeds(16), rounds=2)
    assert found[0]["memory_mb"] > 10 and found[0]["samples_per_second"] > 0


@pytest.mark.parametrize("verb", ["pipeline", "run", "benchmark"])
def test_float_is_refused(shipped, rows, tmp_path, verb):
    calls = {
        "pipeline": lambda: zoo.pipeline(shipped.path, "fp32", "native"),
        "run": lambda: zoo.run(shipped.path, str(rows), tmp_path / "scores.csv", precision="fp32", engine="native"),
        "benchmark": lambda: zoo.benchmark(shipped.path, precisions=["fp32"], engines=["native"]),
    }
    with pytest.raises(RequestError) as error:
        calls[verb]()
    one_line(error, "native computes in int8, not fp32")


# --- without kernels


@pytest.fixture
def bare(monkeypatch):
    """An installation without the extension."""
    monkeypatch.setattr(extension, "native", lambda: None)


def test_without_kernels_auto_takes_a_stock_engine(bare, shipped, rows, tmp_path):
    found = zoo.run(shipped.path, str(rows), tmp_path / "scores.csv")
    assert found["engine"] in ("onnxruntime", "openvino") and found["rows"] == 600
    opened = zoo.pipeline(shipped.path)
    plan = choose_engine(shipped, "int8", opened.preprocess(rows), 1, fresh=True)
    assert set(plan.milliseconds) == (set(EXACT) if len(EXACT) > 1 else set())  # one is not timed


@needs_kernels
def test_with_kernels_auto_times_them(shipped, rows):
    plan = choose_engine(shipped, "int8", zoo.pipeline(shipped.path).preprocess(rows), 1, fresh=True)
    assert set(plan.milliseconds) == {*EXACT, "native", *map(way, EXACT)}
    plan = choose_engine(shipped, "fp32", zoo.pipeline(shipped.path).preprocess(rows), 1, fresh=True)
    assert set(plan.milliseconds) == {"onnxruntime", "openvino"}


def test_without_kernels_the_engine_says_what_is_missing(bare, shipped, rows, tmp_path):
    for call in (
        lambda: zoo.pipeline(shipped.path, engine="native"),
        lambda: zoo.run(shipped.path, str(rows), tmp_path / "scores.csv", engine="native"),
        lambda: zoo.evaluate(shipped.path, str(rows), engine="native"),
        lambda: zoo.benchmark(shipped.path, engines=["native"], rounds=1),
        lambda: load(shipped.path / NATIVE, "native"),
    ):
        with pytest.raises(RequestError) as error:
            call()
        one_line(error, "no native kernels here", "install a C++17 compiler")


def command(*arguments, without=False):
    """(exit code, stdout, stderr) of the command, in a process with kernels or without."""
    hide = "import sys; sys.modules['pipelines.kernels._native'] = None; " if without else ""
    code = f"{hide}from zoo.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_command_says_what_is_missing(shipped):
    code, out, err = command("benchmark", shipped.path, "--engine", "native", "--rounds", "1", without=True)
    *warned, err = err.splitlines()
    assert (code, out, len(warned)) == (2, "", 0 if machine.has_vnni() else 1)
    assert err.startswith("zoo: there are no native kernels here: ") and "install a C++17 compiler" in err


@pytest.mark.parametrize("without", [True, pytest.param(False, marks=needs_kernels)])
def test_the_doctor_knows_the_kernels(without):
    code, out, _ = command("doctor", "--json", without=without)
    said = json.loads(out)["kernels"]
    assert code == 0
    assert ("install a C++17 compiler" in said) if without else (said == f"ok: {', '.join(extension.isas())}")


def test_a_model_that_does_not_fold_says_why(shipped, tmp_path, monkeypatch):
    """On a CPU without caches to speak of, rows cost more than the layer: auto runs what there is, native says so."""
    path = tmp_path / "model"
    shutil.copytree(shipped.path, path, ignore=shutil.ignore_patterns("native*"))
    monkeypatch.setattr("zoo.clicks.fold.LIMIT", 1000)
    with pytest.raises(RequestError) as error:
        zoo.pipeline(path, engine="native")
    one_line(error, "does not run in the native kernels", "it runs in onnxruntime")
    assert not (path / NATIVE).exists()


def test_the_operator_survives_saving(folder):
    loaded = io.load_mapped(folder / NATIVE)
    layer = embedding_layer(next(node for node in loaded.graph if node.domain))
    assert layer.rows.tolist() == list(ROWS) and layer.table.shape == (sum(ROWS), 64)
    assert not layer.table.flags.writeable
    assert ir.to_proto(loaded).opset_import[-1].domain == "int8.zoo"
