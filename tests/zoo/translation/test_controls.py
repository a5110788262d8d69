"""Controls of translation: prefixes, phrases that must not come, penalties; in every engine, of `run`, and their checks."""

import re

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from zoo.translation.search.controls.glossary import Glossary
from zoo.translation.search.controls.words import BEGINS, ENDS, word_marks
from zoo.translation.search.options import OPTIONS, checked_options

pytestmark = pytest.mark.usefixtures("shared_home")

ENGINES = ("onnxruntime", "native") if extension.isas() else ("onnxruntime",)


@pytest.fixture(scope="module")
def texts(language):
    return [a for a, _ in language.pairs(12, seed=5)]


@pytest.fixture(scope="module", params=ENGINES)
def opened(request, translator):
    return zoo.pipeline(translator, engine=request.param)


@pytest.mark.parametrize("beam", [1, 4])
def test_controls_are_followed_in_every_engine(opened, texts, beam, tmp_path):
    plain = [result["translation"] for result in opened(texts, beam=beam)]
    words = [sentence.split(" ") for sentence in plain]
    prefixes = [sentence[-1] if i % 2 else "" for i, sentence in enumerate(words)]
    translated = [result["translation"] for result in opened(texts, beam=beam, target_prefix=prefixes)]
    assert translated[::2] == plain[::2]
    assert all(sentence.startswith(prefix) for sentence, prefix in zip(translated, prefixes, strict=True))
    (tmp_path / "in.txt").write_text("".join(f"{a}\t{b}\n" for a, b in zip(texts, prefixes, strict=True)))
    opened.run(tmp_path / "in.txt", tmp_path / "out.txt", beam=beam, target_prefixes=True)
    assert (tmp_path / "out.txt").read_text().splitlines() == translated
    banned = [" ".join(words[0][:2]), words[1][0]]
    (tmp_path / "banned.txt").write_text("\n".join(banned))
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in texts))
    opened.run(tmp_path / "in.txt", tmp_path / "out.txt", beam=beam, bad_words=str(tmp_path / "banned.txt"))
    without = (tmp_path / "out.txt").read_text().splitlines()
    assert without == [result["translation"] for result in opened(texts, beam=beam, bad_words=banned)] != plain
    assert not any(f" {phrase} " in f" {sentence} " for phrase in banned for sentence in without)
    longer = opened(texts, beam=beam, min_tokens=30, repetition_penalty=1.5)
    tokens = opened.vocabulary.encode_target([result["translation"] for result in longer])
    assert np.median([len(ids) for ids in tokens]) > max(map(len, words))
    assert [result["translation"] for result in opened(texts, beam=beam)] == plain


@pytest.mark.skipif(len(ENGINES) < 2, reason="no kernels for this CPU")
@pytest.mark.parametrize("beam", [1, 4])
def test_engines_follow_controls_alike(translator, texts, beam):
    options = {"beam": beam, "repetition_penalty": 1.3, "min_tokens": 4, "target_prefix": texts[0].split(" ")[0]}
    results = [zoo.pipeline(translator, engine=engine)(texts, **options) for engine in ENGINES]
    same = sum(a["translation"] == b["translation"] for a, b in zip(*results, strict=True))
    assert same >= len(texts) - 1  # they round differently


@pytest.mark.parametrize("beam", [2, 4])
def test_terms_of_a_glossary_have_their_translation(opened, texts, language, beam, tmp_path, caplog):
    plain = [result["translation"] for result in opened(texts, beam=beam)]
    others = [b.split(" ")[0] for _, b in language.pairs(12, seed=6)]
    terms = {}
    for text, other in zip(texts, others, strict=True):
        terms.setdefault(text.split(" ")[-1].upper(), other)  # in any case
    (tmp_path / "terms.tsv").write_text("".join(f"{term}\t{other}\n" for term, other in terms.items()))
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in texts))
    options = {"beam": beam, "glossary": str(tmp_path / "terms.tsv")}
    summary = opened.run(tmp_path / "in.txt", tmp_path / "out.txt", **options)
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert summary["unmet"] == 0
    assert [result["translation"] for result in opened(texts, beam=beam, glossary=terms)] == lines != plain
    for text, line in zip(texts, lines, strict=True):
        assert {terms[word.upper()] for word in text.split(" ") if word.upper() in terms} <= set(line.split(" "))
    assert [result["translation"] for result in opened(texts, beam=beam, glossary={"zzz": "yyy"})] == plain
    forced = opened(texts[:2], beam=beam, forced_words=[others[0], "\u4f60\u597d"])
    assert all(others[0] in result["translation"].split(" ") for result in forced)
    assert [result["unmet"] for result in forced] == [["\u4f60\u597d"]] * 2
    (tmp_path / "words.txt").write_text("\u4f60\u597d\n")
    summary = opened.run(tmp_path / "in.txt", tmp_path / "out.txt", forced_words=str(tmp_path / "words.txt"))
    assert summary["unmet"] == len(texts)
    assert "does not contain \u4f60\u597d" in caplog.text
    (tmp_path / "three.tsv").write_text("a\tb\nc\td\te\n")
    for controls, says in (
        ({"beam": 1, "glossary": terms}, "need --beam 2"),
        ({"glossary": {"a": ""}}, "empty text"),
        ({"glossary": tmp_path / "in.txt"}, "line 1 has no TAB"),
        ({"glossary": tmp_path / "three.tsv"}, "line 2 has 2 TABs"),
        ({"glossary": ["a"]}, "expected a mapping of texts"),
    ):
        with pytest.raises(RequestError, match=says):
            opened(texts, **controls)


@pytest.mark.parametrize("engine", ENGINES)
def test_forced_words_are_no_beginning_of_a_longer_word(engine):
    opened = zoo.pipeline("multi30k-en-de-student", engine=engine)
    asked = {  # a word that is the first piece of one that the translation has without it
        "A street vendor sells food.": ("Straßenverkäufer", "Straßen"),
        "The mountain biker rides through the woods.": ("Mountainbiker", "Mountainbike"),
        "A boy with a baseball bat.": ("Baseballschläger", "Baseball"),
    }
    texts = [*asked]
    for text, plain in zip(texts, opened(texts), strict=True):
        longer, word = asked[text]
        tokens = opened.target_tokens(longer)
        assert longer in plain["translation"] and opened.target_tokens(word) == tokens[:1] and len(tokens) > 1
        (result,) = opened([text], forced_words=[word])
        assert "unmet" not in result and re.search(rf"\b{word}\b", result["translation"])


def test_words_begin_and_end_by_the_marks_of_their_vocabulary():
    both = BEGINS | ENDS
    pieces = ["", "</s>", "▁house", "boat", "'s", "▁", ".", "▁U.", "▁हि", "▁न्दी", "漢字", "3"]
    marks = [both, both, BEGINS, 0, BEGINS, both, both, both, BEGINS, BEGINS, both, 0]
    assert [*word_marks(pieces)] == marks
    pieces = ["<pad>", "Ġhouse", "boat", "Ġ", ",", "Ċ", "Ġ(", "Ã¶", "Ã"]  # the last ones: ö, a part of a character
    marks = [both, BEGINS, 0, both, both, both, both, 0, 0]
    assert [*word_marks(pieces, "tokenizers")] == marks
    assert [*word_marks(["</s>", "house", "boat</w>", ".</w>"], "moses")] == [both, 0, ENDS, both]
    assert [*word_marks(["<pad>", "<0x61>", "<0x20>", "<0xC3>"], "bytes")] == [both, 0, both, 0]
    assert [*word_marks(["house", "boat"], "words")] == [both, both]


def test_samples_and_diverse_beams_come_in_every_engine(opened, texts, tmp_path):
    options = {"temperature": 2.0, "n_best": 3, "seed": 5}
    sampled = opened(texts, **options)
    assert opened(texts[3:4], **options) == sampled[3:4] and opened(texts, **options) == sampled
    assert opened(texts, **options | {"seed": 6}) != sampled
    assert any(len({one["translation"], *(other["translation"] for other in one["others"])}) > 1 for one in sampled)
    greedy = [result["translation"] for result in opened(texts, beam=1)]
    assert [result["translation"] for result in opened(texts, temperature=3.0, top_k=1)] == greedy
    assert [result["translation"] for result in opened(texts, temperature=1.0, top_p=1e-6)] == greedy
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in texts))
    opened.run(tmp_path / "in.txt", tmp_path / "out.txt", **options)
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 3 * len(texts)
    usual, diverse = (
        opened(texts, beam=4, n_best=4, **settings) for settings in ({}, {"beam_groups": 4, "diversity_penalty": 50.0})
    )
    firsts = [
        sum(len({row["translation"].split(" ")[0] for row in (one, *one["others"])}) for one in results)
        for results in (usual, diverse)
    ]
    assert firsts[1] > firsts[0]
    for wrong, says in (
        ({"top_k": 3}, "found top-k without a temperature"),
        ({"temperature": 1.0, "beam": 2}, "neither beams nor groups"),
        ({"beam": 4, "beam_groups": 3}, "multiple"),
        ({"diversity_penalty": 1.0}, "without groups"),
        ({"temperature": 1.0, "forced_words": ["a"]}, "not for samples"),
        ({"top_p": 0.0, "temperature": 1.0}, "found top-p 0.0; expected a number above 0 to 1"),
    ):
        with pytest.raises(RequestError, match=says):
            opened(texts, **wrong)


def test_terms_are_whole_words_the_longest_first():
    glossary = Glossary({"cat": "Katze", "Big cat": "Raubkatze", "U.S.": "USA", "e-mail": "E-Mail"})
    assert glossary.translations("A big CAT sees a cat.") == ["Raubkatze", "Katze"]
    assert glossary.translations("Cats concatenate; cat-like, cat's cat") == ["Katze"]
    assert glossary.translations("an e-mail to the U.S.") == ["E-Mail", "USA"]
    assert glossary.translations("") == Glossary({}).translations("cat") == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"beam": True}, "found beam True; expected a whole number from 1 to 256"),
        ({"beam": 0}, "found beam 0"),
        ({"min_tokens": -1}, "found min-tokens -1; expected a whole number from 0"),
        ({"repetition_penalty": 0}, "found repetition-penalty 0; expected a number above 0 to 100"),
        ({"repetition_penalty": float("nan")}, "found repetition-penalty nan"),
        ({"length_penalty": "1"}, "found length-penalty '1'"),
        ({"bad_words": "Fahrrad"}, "found bad-words 'Fahrrad'; expected a list of texts"),
        ({"bad_words": ["a", " "]}, "empty text"),
        ({"target_prefix": 3}, "expected a text, or one for each sentence"),
        ({"beams": 3}, "no option 'beams'; expected beam, n_best"),
    ],
    ids=str,
)
def test_wrong_values_are_one_line(options, says):
    with pytest.raises(RequestError, match=says):
        checked_options(options)


def test_what_a_model_cannot_do_is_refused(opened, texts, tmp_path):
    for options, says in (
        ({"target_prefix": ["a"]}, "found 1 texts of target-prefix for 12 sentences"),
        ({"target_prefix": "\u4f60\u597d"}, "found '\u4f60\u597d', which the target vocabulary cannot write"),
        ({"target_prefix": texts[0], "max_tokens": 2}, "expected fewer than the 2 of a translation"),
        ({"bad_words": ["\u4f60"]}, "cannot write"),
        ({"bad_words": tmp_path / "none.txt"}, "found no file"),
    ):
        with pytest.raises(RequestError, match=says):
            opened(texts, **options)
    (tmp_path / "in.txt").write_text(texts[0])
    with pytest.raises(RequestError, match="one text for all lines"):
        opened.run(tmp_path / "in.txt", tmp_path / "out.txt", target_prefix=["a"])
    assert not (tmp_path / "out.txt").exists()


def test_texts_of_a_query_are_numbers():
    assert OPTIONS["beam"].parsed("3") == 3
    assert OPTIONS["length_penalty"].parsed("-0.5") == -0.5
    assert OPTIONS["bad_words"].parsed("a b") == ["a b"]
    for wrong in ("3.0", "0x3", "1_0", "\u0663", ""):
        with pytest.raises(RequestError, match="found beam"):
            OPTIONS["beam"].checked(OPTIONS["beam"].parsed(wrong))
