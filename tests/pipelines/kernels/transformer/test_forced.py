"""Native passes over given translations against the numpy reference of the decoder, step by step."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
from helpers.translation_networks import WORDS, network

from pipelines.core.errors import RequestError
from pipelines.engines.native.translation import NativeTranslator
from pipelines.kernels import extension
from pipelines.kernels.transformer import reference
from pipelines.kernels.transformer.mapping.from_graph import programs
from pipelines.kernels.transformer.operations import CrossAttention
from pipelines.kernels.transformer.reference import program
from zoo.translation.data.tokens import END, START
from zoo.translation.export.freeze import export

pytestmark = pytest.mark.skipif(not extension.isas(), reason="no kernels for this CPU")


class Case:
    """A model, and pairs: one longer than a step, others that share one."""

    def __init__(self, form):
        self.graph = export(network(form, sharp=2.0))
        encoder, self.decoder = programs(self.graph)
        draw = np.random.default_rng(1)
        lengths = [(5, 150), (60, 3), *((3 + i, 1 + 2 * i) for i in range(6))]
        self.sources = [np.array([*draw.integers(4, WORDS, n), END], np.int32) for n, _ in lengths]
        self.targets = [draw.integers(4, WORDS, n).tolist() for _, n in lengths]
        self.memories = [reference.encode(encoder, source) for source in self.sources]

    def logits(self, i):
        """Logits before each target token of a pair, float64 [tokens, WORDS]."""
        step = reference.Decoding(self.decoder, [self.memories[i]])
        fed = [START, *self.targets[i][:-1]]
        return np.stack([step(np.array([token]), np.zeros(1, np.int64))[0] for token in fed]).astype(np.float64)


@pytest.fixture(scope="module", params=["odd heads", "recurrent"])
def case(request):
    return Case(request.param)


def log_probabilities(logits, targets, shared):
    """shared: tokens that share the probability."""
    values = logits[:, shared]
    norm = np.log(np.exp(values - values.max(1, keepdims=True)).sum(1)) + values.max(1)
    return logits[np.arange(len(targets)), targets] - norm


@pytest.mark.parametrize("excluded", [(), (5, 9)])
@pytest.mark.parametrize("listed", [False, True])
def test_log_probabilities_are_those_of_the_reference(case, excluded, listed):
    draw, native = np.random.default_rng(2), NativeTranslator(case.graph, threads=2)
    words = [np.sort(draw.choice(WORDS, 20 + i, replace=False)).astype(np.int32) for i in range(len(case.sources))]
    scores = native.forced_scores(
        case.sources, case.targets, start=START, words=words if listed else None, excluded=excluded
    )
    for i in (0, 1, 4, 7):
        shared = np.setdiff1d(words[i] if listed else np.arange(WORDS), excluded)
        np.testing.assert_allclose(scores[i], log_probabilities(case.logits(i), case.targets[i], shared), atol=1e-5)
    alone = NativeTranslator(case.graph).forced_scores(case.sources[2:3], case.targets[2:3], start=START)
    together = native.forced_scores(case.sources, case.targets, start=START)
    np.testing.assert_array_equal(alone[0], together[2])


@pytest.mark.parametrize("heads", [(), (1,)])
def test_weights_of_attention_are_those_of_the_reference(case, heads, monkeypatch):
    layer = 0
    crosses = [operation for operation in case.decoder.operations if isinstance(operation, CrossAttention)]
    native = NativeTranslator(case.graph)
    assert native.cross_attentions == len(crosses)
    count = crosses[layer].heads
    attention = native.forced_attention(case.sources, case.targets, start=START, layer=layer, heads=heads)
    calls = []

    def attend(queries, keys, values, number):
        if number == count:
            size = keys.shape[1] // count
            parts = [(queries[:, a : a + size], keys[:, a : a + size]) for a in range(0, count * size, size)]
            mean = np.zeros(len(keys), np.float32)
            for head in heads or range(count):  # values are the identity, as many columns at a time as a head has
                blocks = np.array_split(np.eye(len(keys), dtype=np.float32), range(size, len(keys), size), axis=1)
                padded = [np.pad(block, ((0, 0), (0, size - block.shape[1]))) for block in blocks]
                weights = [reference.attention(*parts[head], block, 1)[0] for block in padded]
                mean = mean + np.concatenate(weights)[: len(keys)] / np.float32(len(heads or range(count)))
            calls.append(mean)
        return reference.attention(queries, keys, values, number)

    monkeypatch.setattr(program, "attention", attend)
    for i in (1, 4, 7):
        calls.clear()
        case.logits(i)
        np.testing.assert_array_equal(attention[i], np.stack(calls[layer :: len(crosses)]))
        np.testing.assert_allclose(attention[i].sum(axis=1), 1, atol=1e-5)
    with pytest.raises(RequestError, match="found head 9"):
        native.forced_attention(case.sources, case.targets, start=START, layer=layer, heads=[9])
    with pytest.raises(RequestError, match="no such cross-attention"):
        native.forced_attention(case.sources, case.targets, start=START, layer=7)
    with pytest.raises(RequestError, match="not as many sources"):
        native.forced_scores(case.sources[:1], case.targets[:2], start=START)
