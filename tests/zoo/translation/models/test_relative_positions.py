"""Networks of T5's shape: relative positions, RMS norms and gated units are the same in torch, ONNX and native code."""

import numpy as np
import pytest

from pipelines.engines.native.translation import NativeTranslator
from pipelines.graph import reference_session
from pipelines.kernels import extension
from pipelines.kernels.transformer import reference
from pipelines.kernels.transformer.mapping.from_graph import programs
from pipelines.kernels.transformer.operations import QuantizedAttention, SelfAttention
from pipelines.rewrites.driver import rewrite
from zoo.training.relative_positions import relative_buckets
from zoo.translation.data.tokens import END, START
from zoo.translation.models.config import ModelConfig
from zoo.translation.search.beam_search import beam_search
from zoo.translation.search.kv_cache import cached_step, incremental_model

torch = pytest.importorskip("torch")
from zoo.translation.export.freeze import export  # noqa: E402
from zoo.translation.export.rewrites import passes  # noqa: E402
from zoo.translation.models.transformer import Transformer  # noqa: E402

WORDS, LENGTH = 50, 30
SIZES = {"encoder": 2, "decoder": 2, "width": 32, "hidden": 48, "heads": 4, "head_size": 12, "positions": (64, 40)}
T5 = {
    **SIZES,
    **{"scaled": False, "norm": "rms", "attention_scale": 1.0, "linear_bias": False, "epsilon": 1e-6},
    **{"buckets": 8, "bucket_distance": 20},
}
FORMS = {
    "shared": ModelConfig(**T5, output_scale=32**-0.5),
    "one a layer, gated": ModelConfig(**T5, shared_buckets=False, gated=True, activation="gelu_tanh"),
}


class Run:
    """A session as `cached_step` calls it."""

    def __init__(self, model):
        self.session = reference_session.session(model, "the test needs")
        self.inputs = {value.name for value in model.graph.inputs}
        self.outputs = [value.name for value in model.graph.outputs]

    def run(self, batch):
        results = reference_session.run(
            self.session, {key: array for key, array in batch.items() if key in self.inputs}
        )
        return dict(zip(self.outputs, results, strict=True))


@pytest.fixture(scope="module", params=FORMS)
def network(request):
    torch.manual_seed(0)
    model = Transformer(FORMS[request.param], WORDS, pre_norm=True, dropout=0.0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.embedding.weight *= 3
    return model


@pytest.fixture(scope="module")
def graph(network):
    return export(network)


@pytest.fixture(scope="module")
def tokens():
    random = np.random.default_rng(0)
    source, target = (random.integers(END + 1, WORDS, (3, LENGTH)) for _ in range(2))
    source[1, 20:], target[:, 0] = 0, START
    return source, target


@torch.no_grad()
def test_graph_and_steps_with_caches_compute_what_teacher_forcing_does(network, graph, tokens):
    whole, decoding = network(*map(torch.from_numpy, tokens)).numpy(), network.begin(torch.from_numpy(tokens[0]))
    np.testing.assert_allclose(
        Run(graph).run(dict(zip(("source", "target"), tokens, strict=True)))["logits"], whole[:, -1], atol=1e-4
    )
    changed = graph.clone()
    rewrite(changed, passes())
    steps = []
    for model in (graph, changed):
        incremental = incremental_model(model.clone())
        assert incremental.positions == 40
        encoded = Run(incremental.encoder).run({"source": tokens[0]})
        steps.append(cached_step(Run(incremental.step), encoded, incremental.caches))
    for t in range(LENGTH):
        newest = tokens[1][:, t]
        for logits in (decoding(newest, np.arange(3)), *(step(newest, np.arange(3)) for step in steps)):
            np.testing.assert_allclose(logits, whole[:, t], atol=1e-4)


def test_biases_become_tables_by_distance(network, graph):
    encoder, decoder = programs(graph)
    assert (encoder.positions, decoder.positions) == (64, 40)
    assert (encoder.embedding.longest, decoder.embedding.longest) == (64, 40)
    own = [operation.bias for operation in decoder.operations if isinstance(operation, SelfAttention)]
    both = [operation.bias for operation in encoder.operations if isinstance(operation, QuantizedAttention)]
    shared = network.config.shared_buckets
    assert (own[0] is own[1], both[0] is both[1]) == (shared, shared)
    weight = network.decoder[1 - shared].attention.relative.weight.detach().numpy()
    rows = relative_buckets(np.arange(-39, 1), 8, 20, both_sides=False)
    reach = own[-1].shape[1]
    assert reach < 25  # all tokens further before are alike
    np.testing.assert_array_equal(own[-1], weight[rows].T[:, -reach:])
    assert both[0].shape == (4, 2 * 64 - 1)


@pytest.mark.skipif(not extension.isas(), reason="needs the native kernels")
def test_native_code_finds_the_words_of_the_reference(graph, tokens):
    encoder, decoder = programs(graph)
    sources = [row[row != 0].astype(np.int32) for row in tokens[0]]
    memories = [reference.encode(encoder, source.astype(np.int64)) for source in sources]
    limits = np.array([20, 40, 33])
    wanted = beam_search(reference.Decoding(decoder, memories), limits, start=START, end=END, beam=3)
    for isa in extension.isas():
        translated = NativeTranslator(graph, isa=isa).translate(sources, limits, start=START, end=END, beam=3)
        assert [pairs[0][0] for pairs in translated] == [hypotheses[0].tokens for hypotheses in wanted]
        np.testing.assert_allclose(
            [pairs[0][1] for pairs in translated], [hypotheses[0].score for hypotheses in wanted], atol=1e-5
        )


def test_int8_logits_are_close(network, graph, tokens):
    encoder, decoder = programs(graph)
    with torch.no_grad():
        whole = network(*map(torch.from_numpy, tokens)).numpy()
    step = reference.Decoding(decoder, [reference.encode(encoder, row[row != 0]) for row in tokens[0]])
    logits = np.stack([step(tokens[1][:, t], np.arange(3)) for t in range(LENGTH)], 1)
    assert np.square(logits - whole).mean() < 0.03 * np.square(whole).mean()
