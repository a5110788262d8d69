"""A frozen graph becomes the programs of the native encoder and decoder: by structure, or is refused with the operator
and the reason.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

pytest.importorskip("torch", reason="needs the train extra")
import torch
from helpers.translation_networks import FORMS, WORDS, network

from pipelines.core.errors import RequestError, ZooError
from pipelines.engines.native.translation import NativeTranslator
from pipelines.graph import edit, io, query, reference_session
from pipelines.kernels import extension
from pipelines.kernels.transformer import native, reference
from pipelines.kernels.transformer.mapping.from_graph import GraphMapper, decoder_program, encoder_program, programs
from pipelines.kernels.transformer.operations import (
    Activation,
    Attention,
    CrossAttention,
    Embedding,
    Gate,
    LayerNorm,
    Linear,
    Recurrence,
    RunningMean,
    SelfAttention,
    StaticQParams,
    Vocabulary,
)
from pipelines.kernels.transformer.program import DecoderProgram
from pipelines.quantization.calibrator import Calibrator
from pipelines.quantization.qdq import embedding_tables
from pipelines.quantization.qdq.scales import weight_qparams
from pipelines.rewrites.driver import rewrite
from zoo.translation.data.tokens import END, START
from zoo.translation.export.freeze import export
from zoo.translation.export.rewrites import passes
from zoo.translation.models.config import ModelConfig
from zoo.translation.models.transformer import TRANSFORMER_MT, Transformer
from zoo.translation.search.beam_search import beam_search
from zoo.translation.search.config import limit


def sentences(count, rng, longest=12):
    return [rng.integers(4, WORDS, length) for length in rng.integers(1, longest, count)]


def memories(model, sources):
    session = reference_session.session(edit.extract(model, ["source"], ["memory"]), "the test needs")
    return [reference_session.run(session, {"source": source[None]})[0][0] for source in sources]


def logits_of(model, source, target):
    [logits] = reference_session.run(
        reference_session.session(model, "the test needs"), {"source": source[None], "target": target[None]}
    )
    return logits[0]


def calibrated(model, path):
    """The model in int8, as it is saved at `path`."""
    calibrator, rng = Calibrator(model, TRANSFORMER_MT.recipe), np.random.default_rng(0)
    calibrator.feed({"source": rng.integers(4, WORDS, (8, 7)), "target": rng.integers(4, WORDS, (8, 6))})
    calibrator.save(path)
    return io.load(path)


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("pre", [True, False])
def test_a_frozen_graph_is_mapped(form, pre):
    model = export(network(form, pre))
    decoder = decoder_program(model)
    kinds = [type(operation) for operation in decoder.operations]
    layers, recurrent = FORMS[form].decoder, FORMS[form].autoregression == "ssru"
    assert (kinds[0], kinds[-1]) == (Embedding, Vocabulary)
    assert kinds.count(Recurrence if recurrent else SelfAttention) == kinds.count(CrossAttention) == layers
    last = pre if FORMS[form].final_norm is None else FORMS[form].final_norm
    norms = FORMS[form].embedding_norm and not FORMS[form].target_norm_first  # else the table has normalized rows
    assert kinds.count(LayerNorm) == 3 * layers + last + norms
    assert kinds.count(Activation) == layers * (FORMS[form].activation != "relu")
    # queries, keys and values are one, and so are gates; residuals and ReLUs are in them
    assert kinds.count(Linear) == (6 - recurrent) * layers
    assert max(operation.out for operation in decoder.operations[:-1]) < 4
    rng = np.random.default_rng(0)
    for source in sentences(5, rng):
        target = np.array([START, *rng.integers(4, WORDS, 6)])
        step = reference.Decoding(decoder, memories(model, [source]))
        for position in range(len(target)):
            logits = step(target[position : position + 1], np.zeros(1, np.int64))[0]
        exact = logits_of(model, source, target)
        assert np.corrcoef(logits, exact)[0, 1] > 0.995
        np.testing.assert_allclose(logits, exact, atol=np.ptp(exact) * 0.1)


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("pre", [True, False])
def test_a_frozen_encoder_is_mapped(form, pre):
    model = export(network(form, pre))
    encoder = encoder_program(model)
    layers = FORMS[form].encoder
    kinds = [type(operation) for operation in encoder.operations]
    assert [kinds.count(kind) for kind in (Embedding, Attention, LayerNorm, Linear)] == [
        1,
        layers,
        2 * layers + (pre if FORMS[form].final_norm is None else FORMS[form].final_norm) + FORMS[form].embedding_norm,
        4 * layers,
    ]
    assert max(operation.out for operation in encoder.operations) < 4
    for source in sentences(5, np.random.default_rng(0)):
        [exact] = memories(model, [source])
        computed = reference.encode(encoder, source)
        assert np.corrcoef(computed.ravel(), exact.ravel())[0, 1] > 0.995
        np.testing.assert_allclose(computed, exact, atol=np.ptp(exact) * 0.1)


@pytest.mark.parametrize(("form", "pre"), [("small", False), ("odd heads", True)])
def test_rewritten_and_quantized_graphs_are_mapped_to_the_same(form, pre, tmp_path):
    model = export(network(form, pre))
    wanted, encoding = decoder_program(model), encoder_program(model)
    rewritten = model.clone()
    rewrite(rewritten, passes())
    half = model.clone()
    edit.compress_fp16(half)
    small = {"rewritten": 0, "half": 0.009, "int8": 0.03}  # of the largest weight: a step, a few steps
    quantized = calibrated(model, tmp_path / "int8.onnx")
    for kind, other in (("rewritten", rewritten), ("half", half), ("int8", quantized)):
        decoded, encoded = decoder_program(other), encoder_program(other)
        for one, two in zip(
            [*encoded.operations, *decoded.operations], [*encoding.operations, *wanted.operations], strict=True
        ):
            assert type(one) is type(two)
            for name, value in vars(one).items():
                same = getattr(two, name)
                if name == "layer":
                    assert isinstance(value.qparams, StaticQParams if kind == "int8" else type(None))
                    exact = same.weight * same.scale
                    np.testing.assert_allclose(
                        value.weight * value.scale, exact, atol=np.abs(exact).max() * small[kind] + 1e-7
                    )
                elif isinstance(value, np.ndarray) and value.dtype == np.float32:
                    np.testing.assert_allclose(value, same, rtol=0.002, atol=1e-3)
                elif not isinstance(value, np.ndarray):
                    assert value == same
    last = quantized.graph.outputs[0].producer()
    integers, scale, _ = query.dequantized(last.inputs[1])
    np.testing.assert_array_equal(decoded.operations[-1].layer.weight, integers)  # as the graph has them
    np.testing.assert_array_equal(decoded.operations[-1].layer.scale, scale)


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize("beam", [1, 4])
def test_translations_are_those_of_the_reference_and_near_the_float_model(pre, beam):
    net = network("small", pre, sharp=4.0, seed=beam)
    model = export(net)
    rng = np.random.default_rng(1)
    sources = [np.append(sentence, END) for sentence in sentences(30, rng)]
    limits = [limit(len(source), 20) for source in sources]
    options = {"start": START, "end": END, "beam": beam}
    translated = NativeTranslator(model, threads=2).translate(sources, limits, **options)
    mapped, encoder = decoder_program(model), encoder_program(model)
    encoded = [reference.encode(encoder, source) for source in sources]
    emulated = beam_search(reference.Decoding(mapped, encoded), np.array(limits), **options)
    assert np.mean([one[0][0] == two[0].tokens for one, two in zip(translated, emulated, strict=True)]) >= 0.995
    if beam == 1:
        decoding = [net.begin(torch.from_numpy(source[None])) for source in sources]
        with torch.inference_mode():
            exact = [
                beam_search(state, np.array([most]), **options)[0] for state, most in zip(decoding, limits, strict=True)
            ]
        first = [one[0][0][:1] == two[0].tokens[:1] for one, two in zip(translated, exact, strict=True)]
        assert np.mean(first) > 0.9  # of random weights: int8 changes the rest of a translation after any close call


def pairs_of(model, value):
    """The scale and zero point of the QuantizeLinear of a value."""
    [node] = [node for node in model.graph if node.op_type == "QuantizeLinear" and node.inputs[0].name == value]
    return StaticQParams(*(query.constant(qparam).item() for qparam in node.inputs[1:]))


@pytest.mark.parametrize("pre", [True, False])
def test_layers_take_their_input_as_the_graph_quantizes_it(pre, tmp_path):
    model = calibrated(export(network(pre=pre)), tmp_path / "int8.onnx")
    encoder, decoder = programs(model)
    crosses = [operation for operation in decoder.operations if isinstance(operation, CrossAttention)]
    assert {cross.layer.qparams for cross in crosses} == {pairs_of(model, "memory")}
    assert decoder.vocabulary.layer.qparams == pairs_of(model, "last")
    assert pairs_of(model, "encoder.0.feed.relu").zero_point == 0
    inner = [operation.layer.qparams for operation in encoder.operations if isinstance(operation, Linear)]
    assert pairs_of(model, "encoder.0.feed.relu") in inner
    assert pairs_of(model, "encoder.0.attention.found") in inner  # quantized before its heads are joined
    qparams = [
        block.layer.qparams for program in (encoder, decoder) for block in program.operations if hasattr(block, "layer")
    ]
    quantized = [node for node in model.graph if node.op_type == "QuantizeLinear"]
    assert None not in qparams and len(set(qparams)) == len(quantized)


def test_rows_that_layers_take_by_other_levels_go_by_their_own_ranges(tmp_path):
    model = calibrated(export(network(pre=True)), tmp_path / "int8.onnx")
    product = next(
        node
        for node in model.graph
        if node.op_type == "MatMul" and node.inputs[0].name.startswith("memory.dequantized")
    )
    product.replace_input_with(0, product.inputs[0].producer().inputs[0].producer().inputs[0])  # not quantized
    decoder = decoder_program(model)
    qparams = [operation.layer.qparams for operation in decoder.operations if isinstance(operation, CrossAttention)]
    assert len(qparams) == 2 and (qparams == [None, None])
    assert decoder.vocabulary.layer.qparams is not None


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
@pytest.mark.parametrize("form", ["small", "odd heads"])
@pytest.mark.parametrize("pre", [True, False])
def test_translations_of_an_int8_graph_are_those_of_onnxruntime(form, pre, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding_tables, "MIN_BYTES", 0)
    monkeypatch.setattr(embedding_tables, "MIN_COLUMNS", 0)
    net = network(form, pre)
    model = calibrated(export(net), tmp_path / "int8.onnx")
    scale, integers = weight_qparams(net.embedding.weight.detach().numpy(), 0)
    encoder, decoder = programs(model)
    for embedding in (encoder.embedding, decoder.embedding):
        np.testing.assert_array_equal(embedding.table, integers)
        np.testing.assert_allclose(embedding.scale, scale * np.float32(net.config.width**0.5), rtol=1e-6)
    sources = sentences(30, np.random.default_rng(1))
    translated = NativeTranslator(model).translate(sources, [12] * 30, start=START, end=END, beam=1)
    session, same = reference_session.session(model, "the test needs"), 0
    for source, [(tokens, _)] in zip(sources, translated, strict=True):
        target = [START]
        while len(target) < 13 and END not in target:
            [logits] = reference_session.run(session, {"source": source[None], "target": np.array([target])})
            target.append(int(logits[0].argmax()))
        same += [token for token in target[1:] if token != END] == tokens
    assert same >= 27  # native code rounds keys and values to float16, which turns a token now and then


def changed(change):
    model = export(network())
    nodes = {node.name: node for node in model.graph}
    change(model, nodes)
    return model


def op(model, before, kind, inputs, **attributes):
    node = edit.node(kind, inputs, f"new.{kind}", **attributes)
    model.graph.insert_before(before, node)
    return node.outputs[0]


def no_mask(model, nodes):
    softmax, masked = nodes["decoder.0.attention.weights"], nodes["decoder.0.attention.masked"]
    softmax.replace_input_with(0, masked.inputs[0])


def no_relu(model, nodes):
    relu = nodes["decoder.0.feed.relu"]
    relu.outputs[0].replace_all_uses_with(op(model, relu, "Tanh", [relu.inputs[0]]))


def other_norm(model, nodes):
    nodes["decoder.1.around_cross.norm"].attributes["axis"] = ir.AttrInt64("axis", 1)


def first_token(model, nodes):
    last = nodes["last"]
    last.replace_input_with(1, edit.initializer(model.graph, "zero", np.zeros((1, 1), np.int64)))


def crossed_heads(model, nodes):
    shape = edit.initializer(model.graph, "other", np.array([0, 0, 4, -1]))
    nodes["decoder.0.cross.key.heads"].replace_input_with(1, shape)


def memory_read_otherwise(model, nodes):
    nodes["decoder.0.cross.sum"].replace_input_with(0, model.graph.node("encoder_norm").outputs[0])


def position_by_token(model, nodes):
    add = nodes["target.embedded"]
    add.replace_input_with(1, op(model, add, "Mul", [add.inputs[1], nodes["target.rows"].outputs[0]]))


def masked_source(model, nodes):
    nodes["encoder.0.attention.masked"].replace_input_with(1, nodes["target.mask"].outputs[0])


def other_encoder(model, nodes):
    relu = nodes["encoder.0.feed.relu"]
    relu.outputs[0].replace_all_uses_with(op(model, relu, "Tanh", [relu.inputs[0]]))


@pytest.mark.parametrize(
    ("change", "named", "why"),
    [
        (no_mask, "decoder.0.attention.joined", "later tokens"),
        (no_relu, "Tanh", "neither swish nor gelu"),
        (other_norm, "decoder.1.around_cross.norm", "last axis"),
        (first_token, "last", "other rows"),
        (crossed_heads, "decoder.0.cross.joined", "other heads"),
        (memory_read_otherwise, "encoder_norm", "read otherwise"),
        (position_by_token, "target.embedded", "table of positions"),
        (masked_source, "encoder.0.attention.joined", "more than the tokens"),
        (other_encoder, "Tanh", "neither swish nor gelu"),
    ],
)
def test_what_cannot_be_mapped_is_refused_with_the_operator_and_the_reason(change, named, why):
    with pytest.raises(RequestError, match=why) as refused:
        NativeTranslator(changed(change))
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_average_attention_is_read_for_other_engines_alone():
    form = ModelConfig(1, 1, 32, 48, 2, autoregression="average")
    model = export(Transformer(form, WORDS, pre_norm=False, dropout=0.0))
    with pytest.raises(RequestError, match="native kernels cannot map Mul decoder.0.attention.own"):
        decoder_program(model)
    mapper = GraphMapper(model, ("source", "target"), "memory", for_kernels=False)
    operations = mapper.decoder_operations("logits")
    kinds = [type(operation) for operation in operations]
    assert (kinds.count(RunningMean), kinds.count(Gate)) == (1, 2)
    first, last = decoder_program(export(network())).embedding, decoder_program(export(network())).vocabulary
    with pytest.raises(RequestError, match=r"step 1 \(RunningMean\)"):
        DecoderProgram([first, RunningMean(first.out, 1), replace(last, input=1)], form.width)


def test_a_graph_that_is_no_decoder_is_refused():
    model = export(network())
    with pytest.raises(RequestError, match="no value"):
        decoder_program(edit.extract(model, ["source"], ["memory"]))
    with pytest.raises(RequestError, match="cannot map"):
        GraphMapper(model, ("source", "target"), "elsewhere").decoder("logits")


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
def test_what_the_native_translator_cannot_take_is_refused_in_one_line():
    translator = NativeTranslator(export(network()))
    options = {"start": START, "end": END}
    assert translator.translate([], [], **options) == []
    assert translator.isa == extension.isas()[0]
    for wrong, why in (
        ({"beam": 40}, "beam"),
        ({"limits": [translator.positions + 1]}, "limit"),
        ({"sources": [[5, WORDS]]}, "token"),
        ({"sources": [[5, -1]]}, "token"),
        ({"sources": [[5.0]]}, "token"),
        ({"sources": [[5] * (translator.longest + 1)]}, "source of"),
        ({"sources": [[]]}, "token|source of"),
    ):
        with pytest.raises(RequestError, match=why):
            translator.translate(**({"sources": [[5, 6, 7]], "limits": [3]} | wrong), **options)
    with pytest.raises(RequestError, match="threads"):
        NativeTranslator(export(network()), threads=0)


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
def test_an_encoder_whose_result_is_no_number_is_named():
    net = network()
    with torch.no_grad():
        net.encoder_norm.weight.fill_(3e38)
        net.encoder_norm.bias.fill_(3e38)
    with pytest.raises(ZooError, match="not finite"):
        NativeTranslator(export(net)).translate([[5, 6]], [3], start=START, end=END)


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
@pytest.mark.parametrize("isa", extension.isas())
def test_the_vocabulary_serves_as_the_table_of_embeddings_where_its_weights_are_the_same(isa):
    model = export(network())
    encoder, decoder = programs(model)
    assert np.may_share_memory(decoder.embedding.table, decoder.vocabulary.layer.weight)
    assert np.may_share_memory(encoder.embedding.table, decoder.vocabulary.layer.weight)
    sources = sentences(20, np.random.default_rng(0))
    tokens, lengths = np.concatenate(sources).astype(np.int32), np.array([len(source) for source in sources])
    shared = native.compile_program(decoder, isa)
    both = [
        native.compile_program(encoder, isa, (decoder, shared)),
        native.compile_program(encoder_program(model), isa),
    ]
    one, two = (coder.encode(tokens, lengths) for coder in both)
    assert one.tobytes() == two.tobytes()
    other = native.compile_program(decoder_program(model), isa)
    translated = [
        coder.translate(both[0], tokens, lengths, lengths + 9, START, END, 4, 1, 1.0, 8, 1) for coder in (shared, other)
    ]
    assert translated[0] == translated[1]
    with pytest.raises(ValueError, match="shares"):
        native.compile_program(encoder, isa, (decoder, both[1]))
