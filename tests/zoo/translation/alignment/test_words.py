"""Alignments of words and their scores: in Python, in files, of lines in pieces and with copied words."""

import json

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.data import sample_texts
from pipelines.kernels import extension
from zoo.translation.alignment.forced import AttentionHeads, attention_graph
from zoo.translation.alignment.spans import piece_spans, source_spans, target_spans
from zoo.translation.alignment.words import Alignment, Sentence
from zoo.translation.data.lines import Line
from zoo.translation.data.tokens import END

pytestmark = pytest.mark.usefixtures("shared_home")

MODEL = "multi30k-en-de-student"
TEXT = "A man in a red jacket is riding a bicycle down the street."


@pytest.fixture(scope="module")
def opened():
    return zoo.pipeline(MODEL, engine="onnxruntime")


def words(text, found):
    pairs = [map(int, pair.split("-")) for pair in found["alignment"].split()]
    return {(text.split()[a], found["translation"].split()[b]) for a, b in pairs}


def test_words_are_aligned_with_their_translations(opened):
    (result,) = opened(TEXT, alignments=True)
    certain = {("man", "Mann"), ("red", "roten"), ("jacket", "Jacke"), ("bicycle", "Fahrrad"), ("street.", "Straße")}
    assert certain <= words(TEXT, result)
    assert "alignment" not in opened(TEXT)[0]


def test_every_target_word_is_aligned_and_copied_words_to_themselves(opened):
    text = "Two dogs run on \u96ea \u96ea and a {0} jumps. See https://example.com/page for it."
    (result,) = opened(text, alignments=True, word_scores=True)
    assert {("\u96ea", "\u96ea"), ("{0}", "{0}"), ("https://example.com/page",) * 2} <= words(text, result)
    targets = {int(pair.split("-")[1]) for pair in result["alignment"].split()}
    assert targets == set(range(len(result["translation"].split()))) == set(range(len(result["word_scores"])))


def test_scores_of_words_sum_to_the_score_of_the_search(opened):
    texts = [TEXT, "Two children are playing with a dog on the beach."]
    sources = opened.vocabulary.encode(texts)
    best = [hypotheses[0] for hypotheses in opened.translate(sources)]
    scores = opened.token_scores(sources, [[*hypothesis.tokens, END] for hypothesis in best])
    assert [row.mean() for row in scores] == pytest.approx(
        [hypothesis.score for hypothesis in best], abs=0.02
    )  # int8 rounds
    for result, values in zip(opened(texts, word_scores=True), scores, strict=True):
        assert sum(result["word_scores"]) == pytest.approx(values[:-1].sum(), abs=1e-6)
        assert len(result["word_scores"]) == len(result["translation"].split())


def test_pairs_of_a_batch_are_those_alone(opened):
    sources = opened.vocabulary.encode([TEXT, "A dog.", "Two men sit."])
    targets = [[*hypotheses[0].tokens] for hypotheses in opened.translate(sources)]
    for kind in ("attention", "scores"):
        together = getattr(opened.forced, kind)(sources, [*targets[:2], []])
        alone = [getattr(opened.forced, kind)([a], [b])[0] for a, b in zip(sources[:2], targets[:2], strict=True)]
        for one, other in zip(together[:2], alone, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
        assert not together[2].size


@pytest.mark.skipif(not extension.isas(), reason="no kernels for this CPU")
def test_native_passes_are_near_those_of_onnxruntime(opened):
    native = zoo.pipeline(MODEL, engine="native")
    sources = opened.vocabulary.encode([*sample_texts.evaluation_texts()[:24], TEXT, ""])
    targets = [[*hypotheses[0].tokens] for hypotheses in opened.translate(sources)]
    attention = [pipeline.forced.attention(sources, targets) for pipeline in (native, opened)]
    for ours, theirs in zip(*attention, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.05)
    same = [ours.argmax(1) == theirs.argmax(1) for ours, theirs in zip(*attention, strict=True) if len(ours)]
    assert np.concatenate(same).mean() > 0.98
    scores = [np.concatenate(pipeline.token_scores(sources, targets)) for pipeline in (native, opened)]
    assert np.corrcoef(*scores)[0, 1] > 0.999 and np.abs(scores[0] - scores[1]).max() < 0.3
    pairs = [pipeline([TEXT], alignments=True, word_scores=True)[0] for pipeline in (native, opened)]
    assert pairs[0]["alignment"] == pairs[1]["alignment"]
    np.testing.assert_allclose(pairs[0]["word_scores"], pairs[1]["word_scores"], atol=0.3)


@pytest.mark.parametrize("output", ["out.txt", "out.jsonl"])
def test_files_have_alignments_and_scores_of_words(opened, tmp_path, output):
    (tmp_path / "in.txt").write_text(f"{TEXT}\n\nA dog.\n")
    opened.run(str(tmp_path / "in.txt"), tmp_path / output, alignments=True, word_scores=True)
    lines = (tmp_path / output).read_text().splitlines()
    if output == "out.jsonl":
        results = [json.loads(line) for line in lines]
        assert [len(result["word_scores"].split()) for result in results] == [13, 0, 2]
        assert "5-5" in results[0]["alignment"].split()
    else:
        assert [line.count("\t") for line in lines] == [2, 2, 2]
        assert "5-5" in lines[0].split("\t")[1].split()


def test_a_layer_that_the_decoder_lacks_is_refused(opened):
    from pipelines.graph import io

    with pytest.raises(RequestError, match="found the alignment layer 2, expected -2 to 1"):
        attention_graph(io.load(opened.folder.path / "int8.onnx"), AttentionHeads(layer=2))
    with pytest.raises(RequestError, match="in card.json, expected"):
        AttentionHeads.from_json({"head": 1})


def test_tokens_have_their_characters(opened):
    text = "Fran\u00e7ois \u2026 rides\u2126 {x}"  # NFKC: three dots, another omega
    spans = source_spans(opened.vocabulary, text)
    assert len(spans) == len(opened.vocabulary.encode([text])[0])
    covered = {i for a, b in spans for i in range(a, b)}
    assert covered == {i for i, char in enumerate(text) if char != " "}
    tokens = opened.vocabulary.encode(["Zwei Hunde, \u96ea!"])[0][:-1].tolist()
    (written,) = opened.vocabulary.decode([tokens])
    parts = [written[a:b] for a, b in target_spans(opened.vocabulary, tokens, written)]
    assert "".join(parts) == written.replace(" ", "")
    joined = piece_spans(
        ["\u0120a", "b", "\u0120c"], "ab c", lambda pieces: "".join(pieces).replace("\u0120", " ").strip()
    )
    assert joined == [(0, 1), (1, 2), (3, 4)]


def test_lines_in_pieces():
    def sentence(source, target):
        spans = [[(i, i + 1) for i, char in enumerate(text) if char != " "] for text in (source, target)]
        return Sentence(source, spans[0], target, spans[1], np.eye(len(spans[1]), len(spans[0]), dtype=np.float32))

    line = Line("", "a b x c \u00ad d e", "", (None, None), ((), "c", ((0.5, "x"),)), texts=("a b", "d e"))
    line = line._replace(text="a b c d x e", pieces=((), "c", ((0.5, "x"),)))
    alignment = Alignment(line, [sentence("a b", "A B"), sentence("d e", "D E")])
    assert alignment.target == line.join(["A B", "D E"]) == "A B c D x E"
    assert alignment.pairs() == [(i, i) for i in range(6)]
    assert alignment.shares(0, 3).tolist() == [1, 1, 0, 0, 0, 0]
    assert alignment.shares(8, 9).tolist() == [0, 0, 0, 0, 1, 0]
    assert alignment.word_scores() == [0] * 6
