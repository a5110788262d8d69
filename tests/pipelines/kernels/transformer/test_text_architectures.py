"""Graphs of encoders since 2020 as native programs: near onnxruntime, and with the reference's bits on every instruction set."""

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from pipelines.graph import edit, io, reference_session
from pipelines.kernels import extension
from pipelines.kernels.transformer import native
from pipelines.kernels.transformer.operations import Linear, Neighbours, QuantizedAttention
from pipelines.kernels.transformer.text import reference
from pipelines.kernels.transformer.text.from_graph import text_program
from pipelines.quantization.qdq.scales import weight_qparams
from zoo.texts.export.freeze import export
from zoo.texts.models.config import Attention, Dense, Disentangled, ModelConfig, Norm, Rotary
from zoo.texts.models.weights import shapes

pytestmark = pytest.mark.skipif(not extension.isas(), reason="there are no kernels")
LINEAR = ("query", "key", "value", "output", "gate", "up", "down")
GATED = {"absolute": False, "gated": True, "unbiased": LINEAR}
SIZES = {"layers": 3, "width": 64, "heads": 4, "hidden": 90, "vocabulary": 64, "positions": 400}
CASES = {
    "modernbert": {
        **GATED,
        "rotary": Rotary(1000.0, 16, 100.0),
        "attention": Attention(local=(1, 2), window=20),
        "norm": Norm(place="pre", bias=False, first=False, final=True),
    },
    "qwen3": {
        **GATED,
        "activation": "swish",
        "pooling": "last",
        "normalize": True,
        "rotary": Rotary(1e4, 24),
        "attention": Attention(head_size=24, key_heads=2, causal=True, norm=True),
        "norm": Norm(kind="rms", place="pre", embedding=False, final=True),
    },
    "gemma": {
        **GATED,
        "heads": 3,
        "activation": "gelu_tanh",
        "embedding_scale": 8.0,
        "dense": (Dense(80, "identity", False), Dense(48, "tanh")),
        "truncate_dim": 20,
        "renormalize": True,
        "normalize": True,
        "rotary": Rotary(1e4, 32, 100.0),
        "attention": Attention(head_size=32, key_heads=1, norm=True, local=(0, 1), window=30),
        "norm": Norm(kind="rms", place="sandwich", embedding=False, final=True),
    },
    "part of a head rotated": {**GATED, "rotary": Rotary(100.0, 10, scaling="ntk", factor=2.0), "pooling": "cls+mean"},
    "types without positions": {**GATED, "types": 2, "labels": 1, "rotary": Rotary(100.0, 16)},
    "relative bias in windows": {
        "buckets": 8,
        "attention": Attention(local=(1,), window=16),
        "pooling": "weighted_mean",
    },
    "deberta": {
        "absolute": False,
        "disentangled": Disentangled(30, buckets=16),
        "attention": Attention(scale=48**0.5),
    },
    "content to position alone": {
        "absolute": False,
        "disentangled": Disentangled(30, to_content=False, shared=True),
        "attention": Attention(scale=32**0.5),
    },
    "a convolution over tokens": {
        "absolute": False,
        "convolution": 3,
        "disentangled": Disentangled(30, buckets=16),
        "attention": Attention(scale=48**0.5),
    },
    "jina code": {
        **GATED,
        "alibi": True,
        "attention": Attention(row_norm=True),
        "norm": Norm(place="repeated"),
    },
    "narrow embeddings": {"embedding": 32, "pooling": "mean_sqrt_len", "distinct_layers": 1},
}


def graph(case):
    config = ModelConfig("modernbert", epsilon=1e-6, **{**SIZES, **CASES[case]})
    rng = np.random.default_rng(5)
    weights = {}
    for name, shape in shapes(config).items():
        spread = 0.1 if len(shape) == 1 else 1.2 / (shape[-1] ** 0.5 if name != "relative.weight" else 1)
        centre = 1 if len(shape) == 1 and "bias" not in name else 0
        weights[name] = (rng.standard_normal(shape) * spread + centre).astype(np.float32)
    if config.convolution:  # as `adapt` of the architecture makes it
        weights["convolution.weight"] = weights["convolution.weight"].reshape(config.width, -1)
    return export(config, weights)


def is_layer(node):
    return node.op_type == "MatMul" and node.inputs[1].const_value is not None


def with_int8_layers(model, float_layers):
    """The graph with int8 weights, but for the layers of these numbers."""
    for number, node in enumerate([node for node in model.graph if is_layer(node)]):
        if number in float_layers:
            continue
        scale, integers = weight_qparams(node.inputs[1].const_value.numpy(), 1)
        name = str(node.outputs[0].name)
        inputs = [
            edit.initializer(model.graph, f"{name}.{key}", value) for key, value in (("w", integers), ("s", scale))
        ]
        dequantize = edit.node("DequantizeLinear", inputs, f"{name}.dequantized", axis=1)
        model.graph.insert_before(node, dequantize)
        node.replace_input_with(1, dequantize.outputs[0])
    return model


# Number of layers of a graph whose others are int8
FLOAT_LAYERS = {
    "a float value, output and down": ("deberta", (2, 3, 5)),
    "a float gate": ("qwen3", (4, 8, 13)),
    "all layers but one are float": ("modernbert", range(1, 99)),
}


@pytest.fixture(scope="module")
def programs():
    """Graph and program of a case, made once."""
    made = {}

    def get(case):
        if case not in made:
            whole, float_layers = FLOAT_LAYERS.get(case, (case, None))
            model = graph(whole)
            if float_layers is not None:
                model = with_int8_layers(model, float_layers)
            made[case] = model, text_program(model)
        return made[case]

    return get


def cosine(a, b):
    return float(a.ravel() @ b.ravel() / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("case", CASES)
def test_results_are_near_those_of_the_float_graph(rng, programs, case):
    model, program = programs(case)
    session = reference_session.session(model, "the test needs")
    for length in (1, 5, 90):
        ids, types = rng.integers(0, 64, length), rng.integers(0, program.types, length)
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": types}
        feed = {x.name: feed[x.name][None] for x in model.graph.inputs}
        (expected,) = reference_session.run(session, feed)
        output = reference.compute(program, ids, types)
        if expected.size > 1:
            assert cosine(output, expected[0]) > 0.998
        assert np.abs(output - expected[0]).max() < 0.08 * max(np.abs(expected).max(), 1)


@pytest.mark.parametrize("case", [*CASES, *FLOAT_LAYERS])
def test_every_instruction_set_returns_the_bits_of_the_reference(rng, programs, case):
    _, program = programs(case)
    lengths = np.array([1, 3, 17, 70])
    ids = rng.integers(0, 64, lengths.sum()).astype(np.int32)
    types = rng.integers(0, program.types, len(ids)).astype(np.int32)
    outputs = [native.compile_texts(program, isa).compute(ids, types, lengths, 1) for isa in extension.isas()]
    for length, end, *rows in zip(lengths, np.cumsum(lengths), *outputs, strict=True):
        expected = reference.compute(program, ids[end - length : end], types[end - length : end])
        assert {row.tobytes() for row in rows} == {expected.tobytes()}


@pytest.mark.parametrize("case", ["qwen3", "types without positions", "deberta", "content to position alone"])
def test_long_texts_beside_short_ones_have_the_bits_of_the_reference(rng, programs, case):
    _, program = programs(case)
    lengths = np.array([2, 250, 1, 200])
    ids = rng.integers(0, 64, lengths.sum()).astype(np.int32)
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    expected = [reference.compute(program, part, 0 * part).tobytes() for part in parts]
    for isa in extension.isas():
        vectors = native.compile_texts(program, isa).compute(ids, 0 * ids, lengths, 1)
        assert [row.tobytes() for row in vectors] == expected, isa


@pytest.mark.parametrize("case", ["deberta", "content to position alone"])
def test_distances_that_a_model_does_not_tell_apart_share_a_row(programs, case):
    _, program = programs(case)
    for op in program.encoder.operations:
        if isinstance(op, QuantizedAttention):
            middle = len(op.positions.rows) // 2
            assert len({*op.positions.rows[middle + 30 :]}) == 1 == len({*op.positions.rows[: middle - 30]})


def test_float_layers_of_an_int8_graph_stay_float(rng, programs):
    def error(case):
        (whole, _), (_, program) = programs("modernbert"), programs(case)
        ids = rng.integers(0, 64, 40)
        feed = {"input_ids": ids[None], "attention_mask": np.ones((1, 40), np.int64)}
        feed = {x.name: feed[x.name] for x in whole.graph.inputs}
        (expected,) = reference_session.run(reference_session.session(whole, "the test needs"), feed)
        return 1 - cosine(reference.compute(program, ids, 0 * ids), expected[0])

    _, program = programs("all layers but one are float")
    layers = [op.layer.quantizes for op in program.encoder.operations if isinstance(op, Linear)]
    assert sum(layers) == 0 and len(layers) == 12  # the int8 query joins its float key and value
    assert error("all layers but one are float") < 0.5 * error("modernbert")


@pytest.mark.parametrize("case", CASES)
def test_threads_share_the_rows_of_a_long_text(rng, programs, case):
    _, program = programs(case)
    encoder = native.compile_texts(program)
    for lengths in ([390], [24], [5, 390, 7]):
        ids = rng.integers(0, 64, sum(lengths)).astype(np.int32)
        types = rng.integers(0, program.types, len(ids)).astype(np.int32)
        alone = encoder.compute(ids, types, np.array(lengths), 1)
        for threads in (2, 3, 5):
            assert encoder.compute(ids, types, np.array(lengths), threads).tobytes() == alone.tobytes()


def test_layers_share_tables_and_texts_are_as_long_as_these(programs):
    _, program = programs("modernbert")
    attention = [op for op in program.encoder.operations if isinstance(op, QuantizedAttention)]
    assert [(op.before, op.after) for op in attention] == [(None, None), (20, 20), (20, 20)]
    assert attention[1].rotary is attention[2].rotary is not attention[0].rotary
    assert program.longest == 400
    _, causal = programs("qwen3")
    assert {op.after for op in causal.encoder.operations if isinstance(op, QuantizedAttention)} == {0}


def test_a_graph_of_rows_has_results_for_tokens(tmp_path, rng):
    model = graph("modernbert")
    hidden = next(value for node in model.graph for value in node.outputs if value.name == "hidden")
    model.graph.outputs[0] = hidden
    program = text_program(io.load(io.save(model, tmp_path / "model.onnx")))
    assert (program.pooling, program.width) == ("none", 64)
    ids = rng.integers(0, 64, 30)
    feed = {"input_ids": ids[None], "attention_mask": np.ones((1, 30), np.int64)}
    (expected,) = reference_session.run(reference_session.session(model, "the test needs"), feed)
    assert cosine(reference.compute(program, ids, np.zeros_like(ids)), expected) > 0.99


@pytest.mark.parametrize("value", [7, 0])
def test_a_convolution_of_bytes_is_padded_with_their_zero_point(value):
    model = graph("a convolution over tokens")
    pad = next(node for node in model.graph if node.op_type == "Pad")
    scale, zero, padding = (
        edit.initializer(model.graph, name, array)
        for name, array in (("s", np.float32(0.05)), ("zero", np.uint8(7)), ("padding", np.uint8(value)))
    )
    quantize = edit.node("QuantizeLinear", [pad.inputs[0], scale, zero], "bytes")
    dequantize = edit.node("DequantizeLinear", [pad.outputs[0], scale, zero], "floats")
    for reader, index in list(pad.outputs[0].uses()):
        if reader is not dequantize:
            reader.replace_input_with(index, dequantize.outputs[0])
    model.graph.insert_before(pad, quantize)
    model.graph.insert_after(pad, dequantize)
    pad.outputs[0].type = None
    pad.resize_inputs(3)
    pad.replace_input_with(0, quantize.outputs[0])
    pad.replace_input_with(2, padding)
    if value:
        assert sum(isinstance(op, Neighbours) for op in text_program(model).encoder.operations) == 1
    else:
        with pytest.raises(RequestError, match="cannot map Concat convolution.joined"):
            text_program(model)


def test_a_rotation_of_neighbouring_columns_is_refused():
    model = graph("modernbert")
    for node in list(model.graph):
        if node.op_type == "Concat" and node.outputs[0].name.endswith("query.turned"):
            node.replace_input_with(0, node.inputs[1])
    with pytest.raises(RequestError, match="no rotation of two halves"):
        text_program(model)
