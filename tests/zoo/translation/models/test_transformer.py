"""The Transformer in torch, its frozen form, and that all ways to decode find the same words."""

import math

import numpy as np
import onnx
import onnxruntime
import pytest

from pipelines.core.errors import RequestError
from pipelines.engines import catalog, stock
from pipelines.graph import edit, io
from zoo.translation.data.tokens import END, PAD, POSITIONS, START, pad
from zoo.translation.search.beam_search import beam_search, naive_step
from zoo.translation.search.config import limit

torch = pytest.importorskip("torch")
from zoo.translation.export import freeze as freezing  # noqa: E402
from zoo.translation.models import checkpoints, decoding  # noqa: E402
from zoo.translation.models import transformer as models  # noqa: E402
from zoo.translation.search import sessions  # noqa: E402

torch.set_num_threads(1)
FORM = models.ModelConfig(2, 2, 32, 64, 4)
WORDS = 40


@pytest.fixture(scope="module", params=[True, False], ids=["pre", "post"])
def network(request):
    """Untrained, but with biases and norms that do something."""
    torch.manual_seed(0)
    model = models.Transformer(FORM, WORDS, pre_norm=request.param, dropout=0.1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def sentences():
    random = np.random.default_rng(0)
    return [np.array([*random.integers(END + 1, WORDS, length), END], np.int32) for length in (6, 2, 9, 1, 4)]


@pytest.fixture(scope="module")
def batch(sentences):
    """(source, target), padded."""
    targets = [[START, *np.random.default_rng(1).integers(END + 1, WORDS, length)] for length in (3, 5, 1, 4, 7)]
    return pad(sentences), pad(targets)


def test_positions_are_sines_then_cosines():
    table = models.sinusoids(50, 8)
    assert table[0].tolist() == [0] * 4 + [1] * 4
    assert table[7, 0] == pytest.approx(math.sin(7))
    assert table[7, 7] == pytest.approx(math.cos(7 / 10_000))


def test_presets_have_the_published_sizes():
    sizes = {}
    for name in models.ARCHITECTURES:
        with torch.device("meta"):
            sizes[name] = sum(
                parameter.numel()
                for parameter in models.Transformer(
                    models.ARCHITECTURES[name], 32_000, pre_norm=False, dropout=0
                ).parameters()
            )
    assert sizes["base"] == pytest.approx(60.5e6, rel=0.01)  # 65 M with the 37,000 pieces of Vaswani et al. 2017
    assert sizes["big"] == pytest.approx(209e6, rel=0.01)  # 213 M
    assert sizes["deep-shallow"] > sizes["tiny"]
    with pytest.raises(RequestError, match=r"'huge'; choose one of tiny, base, big, deep-shallow"):
        models.Transformer.of("huge", WORDS)


@torch.no_grad()
def test_a_step_with_caches_computes_what_teacher_forcing_does(network, batch):
    source, target = map(torch.from_numpy, batch)
    whole, decoding = network(source, target), network.begin(source)
    for t in range(target.shape[1]):
        np.testing.assert_allclose(decoding.step(target[:, t]), whole[:, t], atol=1e-5)


@torch.no_grad()
def test_padding_changes_nothing_and_no_word_sees_the_next(network, batch):
    source, target = map(torch.from_numpy, batch)
    whole = network(source, target)
    for i in range(len(source)):
        s, t = source[i : i + 1, source[i] != PAD], target[i : i + 1, target[i] != PAD]
        np.testing.assert_allclose(network(s, t)[0], whole[i, : t.shape[1]], atol=1e-5)
    changed = target.clone()
    changed[:, 2:] = 7
    np.testing.assert_allclose(network(source, changed)[:, :2], whole[:, :2], atol=1e-5)


@pytest.fixture(scope="module")
def frozen(network, tmp_path_factory):
    return io.save(freezing.export(network), tmp_path_factory.mktemp("frozen") / "fp32.onnx")


@torch.no_grad()
def wanted(network, batch) -> np.ndarray:
    """Logits after the last word of each target."""
    source, target = map(torch.from_numpy, batch)
    last = (target != PAD).sum(1) - 1
    return network(source, target)[torch.arange(len(source)), last].numpy()


@pytest.mark.parametrize("name", stock.STOCK)
def test_the_frozen_graph_computes_what_torch_does(network, frozen, batch, name):
    logits = catalog.load(frozen, name).run(dict(zip(("source", "target"), batch, strict=True)))["logits"]
    np.testing.assert_allclose(logits, wanted(network, batch), atol=2e-5)


@pytest.mark.parametrize("name", stock.STOCK)
def test_cut_at_the_memory_it_is_an_encoder_and_a_decoder(network, frozen, batch, name):
    encoder, decoder = sessions.split_sessions(frozen, name)
    memory = encoder.run({"source": batch[0]})["memory"]
    assert memory.shape == (*batch[0].shape, FORM.width)
    logits = decoder.run({"source": batch[0], "memory": memory, "target": batch[1]})["logits"]
    np.testing.assert_allclose(logits, wanted(network, batch), atol=2e-5)
    with pytest.raises(RequestError, match="no part from target to logits"):
        edit.extract(io.load(frozen), ["target"], ["logits"])


def test_the_frozen_graph_is_stock_onnx_with_weights_alone_under_their_names(network, frozen, tmp_path):
    model = onnx.load(frozen)
    onnx.checker.check_model(model, full_check=True)
    assert {opset.domain for opset in model.opset_import} == {""}
    names = {tensor.name for tensor in model.graph.initializer}
    assert set(network.state_dict()) <= names
    parameters = sum(parameter.numel() for parameter in network.parameters())
    assert frozen.stat().st_size < 4 * (parameters + POSITIONS * FORM.width) + 60_000
    assert io.save(freezing.export(network), tmp_path / "again.onnx").read_bytes() == frozen.read_bytes()


def test_training_can_start_from_the_frozen_weights_also_rounded_to_float16(network, frozen, tmp_path):
    for half in (False, True):
        loaded = io.load(frozen)
        if half:
            edit.compress_fp16(loaded)
        state = checkpoints.read_weights(io.save(loaded, tmp_path / "fp32.onnx"), network)
        assert state.keys() == network.state_dict().keys()
        for name, tensor in network.state_dict().items():
            rounded = tensor.half().float() if half and tensor.numel() >= 64 else tensor
            assert torch.equal(state[name], rounded), name


@torch.no_grad()
def torch_reference(network, sentence, beam: int, penalty: float = 1.0):
    """Beam search of one sentence in torch, every step computed anew, as simple as can be."""
    source, most = torch.from_numpy(sentence.astype(np.int64))[None], limit(len(sentence), POSITIONS)
    beams, scores, done = torch.tensor([[START]]), torch.zeros(1), []
    for length in range(1, most + 1):
        logs = network(source.expand(len(beams), -1), beams)[:, -1].log_softmax(1) + scores[:, None]
        values, flat = logs.flatten().topk(2 * beam)
        grown = torch.cat([beams[flat // WORDS], (flat % WORDS)[:, None]], 1)
        ended = grown[:, -1] == END
        for k in range(beam):
            if ended[k] or length == most:
                tokens = grown[k, 1 : length + 1 - int(ended[k])].tolist()
                done.append((tokens, float(values[k]) / length**penalty))
        if len(done) >= beam:
            break
        beams, scores = grown[~ended][:beam], values[~ended][:beam]
    return max(done, key=lambda pair: pair[1])


@pytest.mark.parametrize("beam", [1, 4])
def test_all_ways_to_decode_find_the_same_tokens(network, frozen, sentences, beam):
    encoder, decoder = sessions.split_sessions(frozen, "onnxruntime")
    source = pad(sentences)
    step = naive_step(decoder, source, encoder.run({"source": source})["memory"])
    limits = np.array([limit(len(sentence), POSITIONS) for sentence in sentences])
    naive = beam_search(step, limits, start=START, end=END, beam=beam)
    cached = decoding.translate(network, sentences, beam=beam)
    for sentence, a, b in zip(sentences, naive, cached, strict=True):
        tokens, score = torch_reference(network, sentence, beam)
        assert a[0].tokens == b[0].tokens == tokens
        assert a[0].score == pytest.approx(score, abs=1e-4)
        assert b[0].score == pytest.approx(score, abs=1e-4)


def test_the_batch_and_both_lengths_are_free(frozen):
    inputs = {argument.name: argument.shape for argument in onnxruntime.InferenceSession(frozen).get_inputs()}
    assert inputs == {"source": ["batch", "source_length"], "target": ["batch", "target_length"]}
