"""The native text encoder: the bits of its reference on every instruction set, whatever stands beside a text."""

import math

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
import text_models

import zoo
from pipelines.core.errors import RequestError
from pipelines.engines.native_texts import NativeTexts, store
from pipelines.graph import edit, io
from pipelines.kernels import extension
from pipelines.kernels.transformer import native as programs
from pipelines.kernels.transformer import program_file, reference, text_reference
from pipelines.kernels.transformer.from_text_graph import text_program
from pipelines.kernels.transformer.program import Embedding, EncoderProgram, Linear, QuantizedAttention, RowLinear
from pipelines.kernels.transformer.text_program import TextProgram

pytestmark = pytest.mark.skipif(not extension.isas(), reason="there are no kernels")
RNG = np.random.default_rng(0)
CASES = {
    "bert mean": {"kind": "bert"},
    "bert cls": {"kind": "bert", "pooling": "cls", "normalize": False},
    "heads of 8 columns": {"kind": "bert", "num_attention_heads": 4, "pooling": "max"},
    "bert pairs": {"kind": "bert", "labels": 1},
    "distilbert pairs": {"kind": "distilbert", "labels": 3},
    "mpnet": {"kind": "mpnet"},
    "relu": {"kind": "roberta", "hidden_act": "relu"},
    "swish": {"kind": "bert", "hidden_act": "silu"},
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """The rewritten graph of a case, made once."""
    made = {}

    def get(case):
        if case not in made:
            folder = tmp_path_factory.mktemp("model")
            (folder / "theirs").mkdir()
            text_models.write(folder / "theirs", **CASES[case])
            zoo.import_model(folder / "theirs", folder / "ours")
            made[case] = zoo.load(folder / "ours").ensure("rewritten.onnx")
        return made[case]

    return get


def tokens(program, lengths):
    """(tokens, types, lengths) of random texts."""
    total = int(sum(lengths))
    ids = RNG.integers(0, 64, total).astype(np.int32)
    return ids, RNG.integers(0, program.types, total).astype(np.int32), np.array(lengths, np.int64)


@pytest.mark.parametrize("isa", extension.isas())
@pytest.mark.parametrize("case", CASES)
def test_every_instruction_set_returns_the_bits_of_the_reference(graph, case, isa):
    program = text_program(io.load(graph(case)))
    ids, types, lengths = tokens(program, [1, 2, 7, 16, 17, 33])
    ends = np.cumsum(lengths)
    wanted = [text_reference.compute(program, ids[a:b], types[a:b]) for a, b in zip(ends - lengths, ends, strict=True)]
    found = NativeTexts(graph(case), isa=isa).compute(ids, types, lengths)
    assert np.array_equal(found, np.stack(wanted))
    assert np.ptp(found) > 0


def attention_alone(size, scale=1.0, biased=False, longest=200):
    """A program of one attention of two heads on random rows."""
    width = 2 * size
    rows = RNG.standard_normal((longest, width)).astype(np.float32)
    rows[7] = 0
    weight = RNG.integers(-127, 128, (width, 3 * width)).astype(np.int8)
    scales = RNG.uniform(0.2, 1, 3 * width).astype(np.float32) * np.float32(0.03 * scale / width**0.5)
    bias = RNG.standard_normal((2, 2 * longest - 1)).astype(np.float32) if biased else None
    table = np.zeros((64, width), np.int8)
    steps = [
        Embedding(table, np.ones(64, np.float32), rows, 0),
        Linear(0, RowLinear(weight, scales, RNG.standard_normal(3 * width).astype(np.float32) * np.float32(scale)), 1),
        QuantizedAttention(1, 2, 0, bias),
    ]
    return TextProgram(EncoderProgram(steps), 1, "mean", False)


@pytest.mark.parametrize("isa", extension.isas())
@pytest.mark.parametrize("scale", [1e-33, 1.0, 30.0])
@pytest.mark.parametrize("size", [16, 32, 48])
def test_attention_of_any_length_has_the_bits_of_the_reference(isa, size, scale):
    program = attention_alone(size, scale, biased=size == 32)
    native = programs.compile_texts(program, isa)
    for length in (1, 3, 15, 16, 31, 32, 33, 49, 130):
        none = np.zeros(length, np.int32)
        found = native.compute(none, none, np.array([length]), 1)[0]
        assert found.tobytes() == text_reference.compute(program, none, none).tobytes()


def test_attention_in_integers_is_close_to_that_in_floats():
    rows = RNG.standard_normal((180, 3 * 64)).astype(np.float32)
    found = reference.quantized_attention(rows, 2)
    wanted = reference.attention(*np.split(rows, 3, axis=1), 2)
    assert 0 < np.linalg.norm(found - wanted) < 0.03 * np.linalg.norm(wanted)


def test_gelu_is_near_what_it_is_of_all_numbers():
    x = np.concatenate([np.linspace(-9, 9, 4001), [-1e30, -100, 100, 1e30]]).astype(np.float32)
    exact = np.array([each * 0.5 * (1 + math.erf(each / math.sqrt(2))) for each in x.tolist()])
    error = np.abs(reference.activate("gelu", x) - exact)
    assert (error < 7e-5 + 3e-6 * np.abs(x)).all()


def test_attention_whose_sums_could_overflow_is_refused():
    program = attention_alone(16, longest=65537)
    with pytest.raises((RequestError, ValueError), match="overflow"):
        programs.compile_texts(program)


@pytest.mark.parametrize("case", ["bert mean", "bert pairs", "mpnet"])
def test_a_text_does_not_depend_on_batch_order_or_threads(graph, case):
    native = NativeTexts(graph(case))
    program = text_program(io.load(graph(case)))
    ids, types, lengths = tokens(program, RNG.integers(1, 70, 40))
    together = native.compute(ids, types, lengths)
    assert np.array_equal(NativeTexts(graph(case), threads=3).compute(ids, types, lengths), together)
    ends = np.cumsum(lengths)
    places = [np.arange(a, b) for a, b in zip(ends - lengths, ends, strict=True)]
    for i, each in enumerate(places[:8]):
        assert np.array_equal(native.compute(ids[each], types[each], lengths[i : i + 1])[0], together[i])
    back = np.concatenate(places[::-1])
    assert np.array_equal(native.compute(ids[back], types[back], lengths[::-1])[::-1], together)


def test_a_stored_program_is_the_same(graph, tmp_path):
    store(graph("mpnet"), tmp_path / f"model{program_file.SUFFIX}")
    ids, types, lengths = tokens(text_program(io.load(graph("mpnet"))), [5, 9])
    one, other = (NativeTexts(path) for path in (graph("mpnet"), tmp_path / f"model{program_file.SUFFIX}"))
    assert np.array_equal(one.compute(ids, types, lengths), other.compute(ids, types, lengths))


def test_smoothing_goes_into_what_is_before_the_layer(graph):
    model = io.load(graph("bert mean"))
    plain = text_program(io.load(graph("bert mean")))
    for node in [each for each in model.graph if each.op_type in ("MatMul", "Gemm")]:
        weight = node.inputs[1].const_value
        if weight is None:
            continue
        factors = RNG.uniform(0.5, 1, weight.shape[0]).astype(np.float32)
        mul = edit.node("Mul", [node.inputs[0], edit.initializer(model.graph, "k", factors)], f"{node.name}.smoothed")
        model.graph.insert_before(node, mul)
        node.replace_input_with(0, mul.outputs[0])
        scaled = edit.initializer(model.graph, "w", weight.numpy() / factors[:, None])
        node.replace_input_with(1, scaled)
    ids, types, lengths = tokens(plain, [3, 20, 8])
    found = NativeTexts(model).compute(ids, types, lengths)
    wanted = NativeTexts(graph("bert mean")).compute(ids, types, lengths)
    assert np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()
    assert not np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("ids", "types", "lengths", "why"),
    [
        ([64], [0], [1], "found 64"),
        ([-1], [0], [1], "found -1"),
        ([1], [2], [1], "found 2"),
        ([1, 2], [0, 0], [1], "not those of the tokens"),
        ([1], [0, 0], [1], "not those of the tokens"),
        ([], [], [0], "a text of 0 tokens"),
        ([1] * 81, [0] * 81, [81], "a text of 81 tokens"),
    ],
)
def test_tokens_that_are_none_are_refused(graph, ids, types, lengths, why):
    native = NativeTexts(graph("bert pairs"))
    with pytest.raises(RequestError, match=why):
        native.compute(np.array(ids, np.int32), np.array(types, np.int32), np.array(lengths, np.int64))


def test_no_texts_are_no_rows(graph):
    none = np.zeros(0, np.int32)
    assert NativeTexts(graph("bert mean")).compute(none, none, none.astype(np.int64)).shape == (0, 32)


def test_a_graph_that_pools_otherwise_is_refused(graph):
    model = io.load(graph("bert cls"))
    (result,) = model.graph.outputs
    twice = edit.node("Add", [result, result], "twice")
    model.graph.append(twice)
    twice.outputs[0].shape, twice.outputs[0].type = result.shape, result.type
    model.graph.outputs[0] = twice.outputs[0]
    with pytest.raises(RequestError, match="neither of mean, cls, max"):
        text_program(model)
