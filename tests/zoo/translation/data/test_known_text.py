"""Characters and words that a vocabulary cannot write."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from pipelines.core.errors import RequestError
from zoo.translation.data.known_text import FORMAT, KnownText
from zoo.translation.data.line_splitting import LineSplitter
from zoo.translation.data.parallel_text import Vocabulary

pytestmark = pytest.mark.usefixtures("shared_home")

WRITTEN = frozenset("abcdefgh .:/@,<>e\u00e9")
PAIRS = frozenset(["e\u0301", "a\u0301"])  # known, though the accent alone is not
PUNCTUATION = "()[]{}<>\"';:,.!?*"
CHARS = "abé\u0301e1%[]{}<>.:/@,*雪山\u200d\u00ad🙂"


def can_write(texts):
    return [all(char in WRITTEN for char in text) or text in PAIRS for text in texts]


def is_copied(word):
    """The rule for one word."""

    def known(text):
        return can_write([text])[0]

    missing = [not known(char) and not (i and known(word[i - 1 : i + 1])) for i, char in enumerate(word)]
    if not any(missing) or not FORMAT.sub("", word):
        return False
    letters = sum(not gone and char.isalpha() for char, gone in zip(word, missing, strict=True))
    if not letters or re.fullmatch(r"(\{.*\}|<[^<>]+>)\W*", word) or "://" in word or "@" in word:
        return True
    return sum(not known(char) for char in word.strip(PUNCTUATION)) >= letters


@given(st.lists(st.text(CHARS, max_size=8), min_size=1, max_size=8))
def test_words_together_are_as_words_alone(words):
    assert KnownText(can_write).unknown_words(words) == [is_copied(word) for word in words]


@given(st.text(CHARS + " ", max_size=12))
def test_unknown_characters_in_order(text):
    alphabet = KnownText(can_write)
    assert alphabet.unknown(text) == [char for char in dict.fromkeys(text) if char not in WRITTEN]
    assert all((char in alphabet) == (char in WRITTEN or char == " ") for char in text)


def test_characters_are_asked_for_once():
    asked = []
    alphabet = KnownText(lambda texts: asked.extend(texts) or can_write(texts))
    assert alphabet.unknown("a雪a") == alphabet.unknown("雪a") == ["雪"]
    assert alphabet.unknown_words(["a雪", "雪"]) == [True, True]
    assert asked == ["a", "雪", " ", "a雪"]


@pytest.mark.parametrize("form", ["%d%%", "a \u96ea%d", "%x@"])
def test_different_unknown_words_of_a_line_are_looked_up_together(form, monkeypatch):
    """A vocabulary that was asked word by word took a second and more for 120,000 words."""
    vocabulary = Vocabulary(zoo.pipeline("multi30k-en-de").vocabulary.content)
    asked = []
    can_write = vocabulary.known_text._can_write
    monkeypatch.setattr(vocabulary.known_text, "_can_write", lambda texts: asked.append(len(texts)) or can_write(texts))
    splitter = LineSplitter(vocabulary, 512, "en")
    splitter.line("line 1", " ".join(form % i for i in range(120_000)))
    assert len(splitter.unknown_words) >= 120_000 and len(asked) < 100


def test_lines_of_too_many_sentences_are_refused():
    vocabulary = zoo.pipeline("multi30k-en-de").vocabulary
    with pytest.raises(RequestError, match="line 7 has 3 sentences; expected at most 2"):
        LineSplitter(vocabulary, 512, "en", every=True, most=2).line("line 7", "A man. A dog. A cat.")
    assert len(LineSplitter(vocabulary, 512, "en", every=True, most=3).line("", "A man. A dog. A cat.").parts) == 3
