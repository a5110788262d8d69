"""Graphs of encoders people have in the native text encoder: the bits of its reference on every instruction set."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
from helpers import text_models
from helpers.text_programs import check_independence, check_reference, tokens

import zoo
from pipelines.core.errors import RequestError
from pipelines.engines.native.texts import NativeTexts, store
from pipelines.graph import edit, io
from pipelines.kernels import extension
from pipelines.kernels.transformer import program_file
from pipelines.kernels.transformer.text.from_graph import text_program

pytestmark = pytest.mark.skipif(not extension.isas(), reason="there are no kernels")
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


@pytest.mark.parametrize("case", CASES)
def test_every_instruction_set_returns_the_bits_of_the_reference(rng, graph, case):
    check_reference(rng, graph(case), text_program(io.load(graph(case))), [1, 2, 7, 16, 17, 33])


@pytest.mark.parametrize("case", ["bert mean", "bert pairs", "mpnet"])
def test_a_text_does_not_depend_on_batch_order_or_threads(rng, graph, case):
    check_independence(rng, graph(case), text_program(io.load(graph(case))), 3)


def test_a_stored_program_is_the_same(rng, graph, tmp_path):
    store(graph("mpnet"), tmp_path / f"model{program_file.SUFFIX}")
    ids, types, lengths = tokens(rng, text_program(io.load(graph("mpnet"))), [5, 9])
    one, other = (NativeTexts(path) for path in (graph("mpnet"), tmp_path / f"model{program_file.SUFFIX}"))
    assert np.array_equal(one.compute(ids, types, lengths), other.compute(ids, types, lengths))


def test_smoothing_goes_into_what_is_before_the_layer(rng, graph):
    model = io.load(graph("bert mean"))
    plain = text_program(io.load(graph("bert mean")))
    for node in [node for node in model.graph if node.op_type in ("MatMul", "Gemm")]:
        weight = node.inputs[1].const_value
        if weight is None:
            continue
        factors = rng.uniform(0.5, 1, weight.shape[0]).astype(np.float32)
        mul = edit.node("Mul", [node.inputs[0], edit.initializer(model.graph, "k", factors)], f"{node.name}.smoothed")
        model.graph.insert_before(node, mul)
        node.replace_input_with(0, mul.outputs[0])
        scaled = edit.initializer(model.graph, "w", weight.numpy() / factors[:, None])
        node.replace_input_with(1, scaled)
    ids, types, lengths = tokens(rng, plain, [3, 20, 8])
    vectors = NativeTexts(model).compute(ids, types, lengths)
    wanted = NativeTexts(graph("bert mean")).compute(ids, types, lengths)
    assert np.abs(vectors - wanted).max() < 0.1 * np.abs(wanted).max()
    assert not np.array_equal(vectors, wanted)


def test_a_graph_that_pools_otherwise_is_refused(graph):
    model = io.load(graph("bert cls"))
    (result,) = model.graph.outputs
    twice = edit.node("Add", [result, result], "twice")
    model.graph.append(twice)
    twice.outputs[0].shape, twice.outputs[0].type = result.shape, result.type
    model.graph.outputs[0] = twice.outputs[0]
    with pytest.raises(RequestError, match="neither of mean, cls, max"):
        text_program(model)
