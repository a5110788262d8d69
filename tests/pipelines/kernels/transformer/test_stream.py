"""Sentences that come at any time are translated to the same bits as in one call."""

import threading
import time

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
import torch
from helpers.translation_networks import WORDS, network

from pipelines.core.errors import RequestError, ZooError
from pipelines.engines.native.translation import NativeTranslator
from pipelines.kernels import extension
from pipelines.kernels.transformer import program_file
from pipelines.kernels.transformer.mapping.from_graph import programs
from zoo.translation.data.tokens import END, START
from zoo.translation.export.freeze import export

pytestmark = pytest.mark.skipif(extension.native() is None, reason=extension.missing())
COUNT, LIMIT = 60, 25


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """The file of the programs of a graph."""
    path = tmp_path_factory.mktemp("programs") / "programs.zoo"
    program_file.save(path, programs(export(network())))
    return path


@pytest.fixture(scope="module")
def sources():
    rng = np.random.default_rng(0)
    return [rng.integers(4, WORDS, rng.integers(1, 12)).astype(np.int32) for _ in range(COUNT)]


def shortlists(sources):
    rng = np.random.default_rng(1)
    return [np.unique([END, *rng.choice(np.arange(4, WORDS), 30, replace=False)]).astype(np.int32) for _ in sources]


@pytest.mark.parametrize("isa", extension.isas())
@pytest.mark.parametrize(("threads", "listed"), [(1, False), (2, True)])
def test_sentences_that_come_one_by_one_are_translated_as_in_one_call(graph, sources, isa, threads, listed):
    translator = NativeTranslator(graph, threads, isa)
    words = shortlists(sources) if listed else None
    options = {"start": START, "end": END, "beam": 3, "best": 2}
    wanted = translator.translate(sources, [LIMIT] * COUNT, words=words, **options)
    stream = translator.stream(slots=4, **options)
    numbers, results = {}, {}
    for i, source in enumerate(sources):
        (number,) = stream.submit([source], [LIMIT], None if words is None else [words[i]])
        numbers[number] = i
        if i % 7 == 0:
            time.sleep(0.001)
        results |= {result[0]: result[1:] for result in stream.finished(0.0)}
    while len(results) < COUNT:
        results |= {result[0]: result[1:] for result in stream.finished(10.0)}
    stream.close()
    assert {numbers[number]: translations for number, (translations, _) in results.items()} == dict(enumerate(wanted))
    assert not any(error for _, error in results.values())


def test_sentences_of_different_prefixes_share_a_stream(graph, sources):
    translator = NativeTranslator(graph)
    options = {"start": START, "end": END, "beam": 3}
    kinds = {(7,): {"prefix": (7,)}, (9, 12): {"prefix": (9, 12)}, (): {}, None: {"prefix": (30,)}}
    stream = translator.stream(slots=4, **options, rules={"kind": "transformers", "prefix": (30,)})
    numbers = {prefix: stream.submit(sources[:9], [LIMIT] * 9, prefix=prefix) for prefix in kinds}
    results = {}
    while len(results) < 9 * len(kinds):
        results |= {number: translations for number, translations, _ in stream.finished(10.0)}
    stream.close()
    for prefix, rules in kinds.items():
        wanted = translator.translate(sources[:9], [LIMIT] * 9, **options, rules={"kind": "transformers", **rules})
        assert [results[number] for number in numbers[prefix]] == wanted
        assert prefix is None or all(one[0][0][: len(prefix)] == [*prefix] for one in wanted)


def test_a_cancelled_sentence_never_comes_and_the_others_do(graph, sources):
    translator = NativeTranslator(graph)
    options = {"start": START, "end": None}  # all go on to their limit
    wanted = translator.translate(sources, [LIMIT] * COUNT, **options)
    stream = translator.stream(slots=4, **options)
    numbers = stream.submit(sources, [LIMIT] * COUNT)
    kept = numbers[::3]
    for number in set(numbers) - set(kept):
        stream.cancel(number)
    results = {}
    while not set(kept) <= set(results):
        results |= {number: translations for number, translations, _ in stream.finished(10.0)}
    left = set(results) - set(kept)  # done before they were cancelled and told: none, for nobody asked meanwhile
    assert not left
    assert [results[number] for number in kept] == [wanted[number] for number in kept]
    assert stream.finished(0.05) == []
    stream.close()


def test_what_does_not_fit_is_refused_and_a_closed_stream_takes_nothing(graph, sources):
    stream = NativeTranslator(graph).stream(start=START, end=END)
    for prefix, why in (([WORDS], "none of the vocabulary"), ([5, 6], "leaves no token")):
        with pytest.raises(RequestError, match=why):
            stream.submit([np.array([5])], [2], prefix=prefix)
    for wrong, limit, why in (([5, WORDS], 3, "token"), ([[]], 3, "tokens"), ([5], 0, "limit"), ([5.0], 3, "tokens")):
        with pytest.raises(RequestError, match=why):
            stream.submit([np.array(wrong)], [limit])
    with pytest.raises(RequestError, match="beam"):
        NativeTranslator(graph).stream(start=START, end=END, beam=100)
    waiting = threading.Thread(target=lambda: stream.finished(60.0))
    waiting.start()
    stream.submit(sources, [LIMIT] * COUNT)  # they are lost
    stream.close()
    waiting.join(10)
    assert not waiting.is_alive()
    with pytest.raises(ZooError, match="closed"):
        stream.submit(sources, [LIMIT] * COUNT)


def test_results_that_are_no_numbers_are_named_and_the_stream_goes_on():
    net = network()
    with torch.no_grad():
        net.encoder_norm.weight.fill_(3e38)
        net.encoder_norm.bias.fill_(3e38)
    stream = NativeTranslator(export(net)).stream(start=START, end=END)
    for _ in range(2):
        (number,) = stream.submit([np.array([5, 6])], [3])
        assert [(result[0], "not finite" in result[2]) for result in stream.finished(10.0)] == [(number, True)]
    stream.close()
