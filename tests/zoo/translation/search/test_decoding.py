"""The forms for decoding, derived from the naive graph: a step with caches, and the whole search in one graph."""

import logging

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from helpers.tiers import one_in

import zoo
from pipelines.core.errors import RequestError, ZooError
from pipelines.graph import edit, io, reference_session
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.rewrites.driver import rewrite
from zoo.translation.data.tokens import END, PAD, POSITIONS, START, pad
from zoo.translation.export.rewrites import passes
from zoo.translation.models.transformer import TRANSFORMER_MT
from zoo.translation.search.beam_search import beam_search, hypotheses, naive_step
from zoo.translation.search.config import SearchConfig, limit
from zoo.translation.search.kv_cache import cached_step, incremental_model
from zoo.translation.search.loop_graph import search

torch = pytest.importorskip("torch")
from zoo.translation.export import freeze as freezing  # noqa: E402
from zoo.translation.models import transformer as models  # noqa: E402

torch.set_num_threads(1)
WORDS = 40
FORMS = {
    "pre": (models.ModelConfig(2, 2, 32, 64, 4), True),
    "post": (models.ModelConfig(2, 2, 32, 64, 4), False),
    "one layer, one head": (models.ModelConfig(1, 1, 16, 24, 1), True),
    "three layers": (models.ModelConfig(1, 3, 24, 40, 2), False),
}
OTHERS = {
    "simple recurrent units": (models.ModelConfig(1, 2, 32, 48, 2, decoder_hidden=64, autoregression="ssru"), False),
    "average attention": (models.ModelConfig(1, 2, 32, 48, 2, autoregression="average", average_hidden=40), False),
    "average attention, pre": (
        models.ModelConfig(1, 1, 24, 48, 2, autoregression="average", average_activation="gelu"),
        True,
    ),
    "trained positions": (
        models.ModelConfig(1, 2, 32, 48, 4, scaled=False, embedding_norm=True, output_bias=True, positions=(600, 530)),
        True,
    ),
    "normalized embeddings": (
        models.ModelConfig(1, 1, 24, 48, 2, embedding_norm=True, target_norm_first=True, positions=(600, 530)),
        False,
    ),
    "gelu": (models.ModelConfig(1, 1, 32, 48, 4, activation="gelu", decoder_heads=2, shared_source=False), False),
    "swish": (models.ModelConfig(1, 1, 32, 48, 4, activation="swish", head_size=12, tied_output=False), True),
}


def network(name):
    """Untrained, but with biases and norms that do something, and sentences that end."""
    form, pre_norm = {**FORMS, **OTHERS}[name]
    torch.manual_seed(0)
    model = models.Transformer(form, WORDS, pre_norm=pre_norm, dropout=0).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.1 * torch.randn_like(tensor))
        for tensor in model.buffers():
            tensor.add_(0.1 * torch.randn_like(tensor))
        model.embedding.weight[END] *= 1.4
    return model


def quantized_of(model):
    """The int8 form of a rewritten graph, by random sentences."""
    random = np.random.default_rng(2)
    samples = [{name: random.integers(END + 1, WORDS, (8, 7)) for name in ("source", "target")}]
    return quantize(model, TRANSFORMER_MT.recipe, calibrate(model, samples, "minmax"))[0]


@pytest.fixture(scope="module", params=FORMS)
def naive(request):
    return freezing.export(network(request.param))


@pytest.fixture(scope="module")
def rewritten(naive):
    model = naive.clone()
    rewrite(model, passes())
    return model


@pytest.fixture(scope="module")
def sentences():
    random = np.random.default_rng(0)
    return [np.array([*random.integers(END + 1, WORDS, length), END], np.int32) for length in (6, 2, 9, 1, 4, 12)]


def options(beam=1, best=1, penalty=1.0, growth=(2, 10)):
    return {
        "beam": np.array([beam]),
        "best": np.array([best]),
        "length_penalty": np.array([penalty], np.float32),
        "growth": np.array(growth),
    }


class Opened:
    """A model in onnxruntime, as the pipeline runs it."""

    def __init__(self, model, optimize=True):
        self._session = reference_session.session(model, "the test needs", reference_session.options(quick=optimize))

    def run(self, batch):
        return dict(
            zip([output.name for output in self._session.get_outputs()], self._session.run(None, batch), strict=True)
        )


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert [hypothesis.tokens for hypothesis in one] == [hypothesis.tokens for hypothesis in other]
        assert [hypothesis.score for hypothesis in one] == pytest.approx(
            [hypothesis.score for hypothesis in other], abs=1e-4
        )


@pytest.mark.parametrize("form", ["naive", "rewritten", "int8"])
def test_a_step_computes_what_the_naive_graph_does(naive, rewritten, form):
    model = {"naive": naive, "rewritten": rewritten}.get(form) or quantized_of(rewritten)
    # the bias of a layer of bytes is rounded to a step of its sum, in the derived form alone
    assert_equal_logits(model, 0.05 if form == "int8" else 0)


@pytest.mark.parametrize("form", ["naive", "rewritten", "int8"])
@pytest.mark.parametrize("name", one_in(2, OTHERS))
def test_a_step_of_every_kind_of_decoder_computes_what_the_naive_graph_does(name, form):
    model = freezing.export(network(name))
    if form != "naive":
        rewrite(model, passes())
    if form == "int8":
        model = quantized_of(model)
    assert_equal_logits(model, 0.05 if form == "int8" else 0)


def assert_equal_logits(model, tolerance):
    """Rows of a sentence stand together; they swap places, double and vanish from step to step. tolerance: of the
    largest logit.
    """
    incremental = incremental_model(model)
    whole, encoder, step = (Opened(graph, optimize=False) for graph in (model, incremental.encoder, incremental.step))
    random, width = np.random.default_rng(3), 3
    source = random.integers(END + 1, WORDS, (4, 6))
    source[1, 4:] = source[3, 1:] = PAD
    search = cached_step(step, encoder.run({"source": source}), incremental.caches)
    history, kept = np.zeros((4, 0), np.int64), np.arange(4)
    for length in range(6):
        alive = np.array([0, 2]) if length == 3 else np.arange(len(kept))  # two sentences leave
        before = len(history) // len(kept)
        parents = (alive[:, None] * before + random.integers(0, before, (len(alive), width if length else 1))).ravel()
        kept = kept[alive]
        tokens = random.integers(END + 1, WORDS, len(parents)) if length else np.full(len(parents), START)
        history = np.concatenate([history[parents], tokens[:, None]], 1)
        logits = search(tokens, parents)
        wanted = whole.run({"source": np.repeat(source[kept], len(parents) // len(kept), 0), "target": history})[
            "logits"
        ]
        np.testing.assert_allclose(logits, wanted, atol=tolerance * np.abs(wanted).max() or 1e-5)


def test_the_caches_of_a_quantized_model_are_float16_and_those_of_a_float_one_float32(rewritten, sentences):
    for model, kind in ((rewritten, ir.DataType.FLOAT), (quantized_of(rewritten), ir.DataType.FLOAT16)):
        incremental = incremental_model(model)
        assert {cache.dtype for cache in incremental.caches} == {kind}
        encoded = Opened(incremental.encoder).run({"source": pad(sentences)})
        floats = [
            array
            for array in encoded.values()
            if array.dtype == np.float32 and array.ndim == 4 and np.ptp(array) < 1000
        ]  # not the mask
        assert len(floats) >= 2
        assert all(np.array_equal(array, array.astype(np.float16)) == (kind == ir.DataType.FLOAT16) for array in floats)


def test_a_step_has_no_trace_of_the_tokens_before(rewritten):
    step = incremental_model(rewritten).step
    assert not {"Trilu", "GatherND", "Expand", "Slice"} & {node.op_type for node in step.graph}
    layers = sum(node.op_type == "Softmax" for node in step.graph) // 2
    gathers = [node for node in step.graph if node.op_type == "Gather" and node.inputs[1].name == "parents"]
    assert len(gathers) == 2 * layers  # one reorder for each cache, on the axis of rows
    assert not any(node.attributes.get_int("axis", 0) for node in gathers)


@pytest.mark.parametrize(("beam", "penalty"), [(1, 1.0), (2, 0.0), (3, 1.0), (4, 0.6), (5, 0.0), (5, 1.0)])
def test_the_search_in_the_graph_finds_what_the_reference_does(rewritten, sentences, beam, penalty):
    model, best = incremental_model(rewritten), max(1, beam // 2)
    encoder, step = Opened(model.encoder), Opened(model.step)
    limits = np.array([limit(len(sentence), POSITIONS) for sentence in sentences])
    encoded = encoder.run({"source": pad(sentences)})
    wanted = beam_search(
        cached_step(step, encoded, model.caches),
        limits,
        start=START,
        end=END,
        beam=beam,
        length_penalty=penalty,
        best=best,
    )
    assert penalty < 1 or len({len(ranked[0].tokens) for ranked in wanted}) > 1
    opened = Opened(search(model))
    outputs = opened.run({"source": pad(sentences), **options(beam, best, penalty)})
    assert outputs["tokens"].dtype == np.int64
    assert outputs["scores"].dtype == np.float32
    assert_same(hypotheses(outputs["tokens"], outputs["scores"]), wanted)
    alone = [
        hypotheses(*opened.run({"source": pad([sentence]), **options(beam, best, penalty)}).values())[0]
        for sentence in sentences
    ]
    assert_same(alone, wanted)


@pytest.mark.parametrize("beam", [1, 3])
def test_banned_tokens_are_never_chosen_and_keep_their_probability(rewritten, sentences, beam):
    model = incremental_model(rewritten)
    encoder, step = Opened(model.encoder), Opened(model.step)
    limits = np.array([limit(len(sentence), POSITIONS) for sentence in sentences])
    memory = encoder.run({"source": pad(sentences)})

    def reference(rules):
        step_function = cached_step(step, memory, model.caches)
        return beam_search(step_function, limits, start=START, end=END, beam=beam, rules=rules)

    free = [token for (best,) in reference(SearchConfig()) for token in best.tokens]
    banned = tuple(sorted(set(free), key=free.count)[-2:])
    expected = reference(SearchConfig(banned=banned))
    assert free and not {token for (best,) in expected for token in best.tokens} & set(banned)
    outputs = Opened(search(model, banned=banned)).run({"source": pad(sentences), **options(beam)})
    assert_same(hypotheses(outputs["tokens"], outputs["scores"]), expected)


def test_the_naive_decoder_finds_the_same(naive, rewritten, sentences):
    encoder, decoder = (
        edit.extract(naive, *ends) for ends in ((["source"], ["memory"]), (["source", "memory", "target"], ["logits"]))
    )
    source = pad(sentences)
    step = naive_step(Opened(decoder), source, Opened(encoder).run({"source": source})["memory"])
    limits = np.array([limit(len(sentence), POSITIONS) for sentence in sentences])
    wanted = beam_search(step, limits, start=START, end=END, beam=3, best=2)
    outputs = Opened(search(incremental_model(rewritten))).run({"source": source, **options(3, 2)})
    assert_same(hypotheses(outputs["tokens"], outputs["scores"]), wanted)


def test_the_search_is_a_valid_model_of_standard_operators_with_one_copy_of_each_weight(rewritten):
    model = search(incremental_model(rewritten))
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in ir.traversal.RecursiveGraphIterator(model.graph)} <= {"", "ai.onnx"}
    weights = sum(tensor.const_value.nbytes for tensor in rewritten.graph.initializers.values())
    positions = (
        POSITIONS
        * next(tensor.shape[1] for name, tensor in rewritten.graph.initializers.items() if name == "positions")
        * 4
    )
    assert proto.ByteSize() < weights + positions + 200_000


def test_lengths_are_forced_for_timing_and_limited_by_the_source(rewritten, sentences):
    model = incremental_model(rewritten)
    outputs = Opened(search(model, end=-1)).run({"source": pad(sentences), **options(2, growth=(0, 7))})
    assert outputs["tokens"].shape == (len(sentences), 1, 7)
    assert (outputs["tokens"] != PAD).all()


def test_logits_that_are_no_numbers_are_told(rewritten, sentences):
    model = rewritten.clone()
    (weight,) = model.graph.outputs[0].producer().inputs[1:2]
    weight.const_value = ir.tensor(np.full(weight.shape.numpy(), np.nan, np.float32))
    outputs = Opened(search(incremental_model(model))).run({"source": pad(sentences), **options(2)})
    with pytest.raises(ZooError, match="NaN"):
        hypotheses(outputs["tokens"], outputs["scores"])


def test_int8_layers_stay_int8_inside_the_loop(rewritten, tmp_path):
    """What onnxruntime makes of it: every linear layer an int8 operator, no weight dequantized at run time."""
    model = search(incremental_model(quantized_of(rewritten)))
    chosen = onnxruntime.SessionOptions()
    chosen.optimized_model_filepath, chosen.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    onnxruntime.InferenceSession(io.serialized(model), chosen, providers=["CPUExecutionProvider"])
    nodes = list(ir.traversal.RecursiveGraphIterator(ir.load(tmp_path / "optimized.onnx").graph))
    made = {
        name: sum(node.op_type == name for node in nodes) for name in ("Gemm", "FusedGemm", "DequantizeLinear", "QGemm")
    }
    layers = sum(node.op_type == "Softmax" for node in incremental_model(rewritten).step.graph) // 2
    assert made == {"Gemm": 0, "FusedGemm": 0, "DequantizeLinear": 0, "QGemm": 6 * layers}


def the(model, kind, number=0):
    return [node for node in model.graph if node.op_type == kind][number]


def see_the_future(model):
    """A mask that hides nothing."""
    the(model, "Trilu").attributes["upper"] = ir.AttrInt64("upper", 0)


def mean_of_all(model):
    """A decoder that looks at all tokens by an operator of its own."""
    norm = the(model, "LayerNormalization", -1)
    norm.attributes["axis"] = ir.AttrInt64("axis", 1)


def unknown_operator(model):
    the(model, "Relu", -1).op_type = "Hardmax"


def first_token(model):
    """Logits of another token than the last."""
    the(model, "Sub").op_type = "Mul"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (see_the_future, "Reshape decoder.0.attention.joined: its mask lets it look at later tokens"),
        (mean_of_all, "LayerNormalization decoder_norm: it normalizes over more than the last axis"),
        (unknown_operator, "Hardmax decoder.1.feed.relu: no step of the decoder computes this"),
        (first_token, "GatherND last: it picks other rows than that of the last token"),
    ],
)
def test_what_cannot_be_computed_token_by_token_is_refused_with_the_operator(change, said):
    model = freezing.export(network("pre"))
    change(model)
    with pytest.raises(RequestError, match=said) as error:
        incremental_model(model)
    assert "\n" not in str(error.value)


def test_other_graphs_are_refused():
    other = ir.from_onnx_text('<ir_version: 9, opset_import: ["": 18]> g (float[n] x) => (float[n] y) { y = Relu(x) }')
    with pytest.raises(
        RequestError, match="found inputs x and outputs y; decoding needs source and target, and logits"
    ):
        incremental_model(other)


def test_a_decoder_without_such_a_form_is_run_the_naive_way_with_one_warning(translator, language, monkeypatch, caplog):
    from zoo.translation.search import sessions

    texts = [a for a, _ in language.pairs(6, seed=5)]
    wanted = zoo.pipeline(translator, precision="fp32")(texts)

    def refuse(*arguments):
        raise RequestError("the decoder has no form with caches: Loop x: it is not known")

    monkeypatch.setattr(sessions, "derived_graph", refuse)
    with caplog.at_level(logging.WARNING):
        results = zoo.pipeline(translator, precision="fp32")(texts)
    assert [result["translation"] for result in results] == [result["translation"] for result in wanted]
    assert [result["score"] for result in results] == pytest.approx([result["score"] for result in wanted], abs=1e-4)
    assert sum("Loop x" in record.getMessage() for record in caplog.records) == 1


def test_an_int8_translation_does_not_depend_on_the_batch(translator, language):
    texts = [a for a, _ in language.pairs(64, seed=4)]
    alone, together = (zoo.pipeline(translator, precision="int8", batch_size=size)(texts) for size in (1, 64))
    assert np.mean([a["translation"] == b["translation"] for a, b in zip(alone, together, strict=True)]) >= 0.97
