"""Long texts in chunks of whole words."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the test extra")
from helpers.text_models import tokenizer as letters

from pipelines.core.errors import RequestError
from zoo.texts.data import chunks as chunks_module
from zoo.texts.data.chunks import Chunking, divide
from zoo.texts.data.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    letters().save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path / "tokenizer.json", 64, 80)


def pieces(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text).ids)


@pytest.mark.parametrize("stride", [0, 1, 3, 7])
@pytest.mark.parametrize("size", [10, 13, 80])
@pytest.mark.parametrize("prompt", ["", "a "])
def test_chunks_hold_all_words_in_whole(tokenizer: Tokenizer, size: int, stride: int, prompt: str) -> None:
    text = "  the cat sat, zebra! and  the zoo ran over there. " * 6
    if stride >= size - 2 - len(prompt.split()):
        return
    chunks = divide(tokenizer, [text, "a", ""], Chunking(size, stride), prompt)
    own = [chunk for chunk, row in zip(chunks.texts, chunks.rows, strict=True) if row == 0]
    assert chunks.texts[-2:] == ["a", ""] and chunks.counts.tolist() == [len(own), 1, 1]
    words, position = text.split(), 0
    for chunk, (start, end) in zip(own, chunks.spans, strict=False):
        assert text[start:end] == chunk and pieces(tokenizer, prompt + chunk) <= size
        parts = chunk.replace(",", " , ").replace("!", " !").replace(".", " .").split()
        assert parts and {*parts} <= {*text.replace(",", " , ").replace("!", " !").replace(".", " .").split()}
        assert start <= position or not text[position:start].strip()  # nothing is left out
        position = max(position, int(end))
    assert not text[position:].strip() and words
    if stride == 7:  # more than the tokens of a word
        assert any(start < end for (start, _), (_, end) in zip(chunks.spans[1:-2], chunks.spans, strict=False))


def test_a_word_longer_than_a_chunk_is_divided(tokenizer: Tokenizer) -> None:
    chunks = divide(tokenizer, ["abcdefghij" * 3], Chunking(7, 2))  # without an overlap in it
    assert "".join(chunks.texts) == "abcdefghij" * 3
    assert all(pieces(tokenizer, text) <= 7 for text in chunks.texts)


def test_letters_that_become_two_in_lower_case_move_no_chunk(tmp_path: Path) -> None:
    """Of Turkish texts: the characters of chunks were those of the lowercased text."""
    letters().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", 64, 80, lower=True)
    text = "\u0130ab \u0130cd the cat sat over there"
    chunks = divide(tokenizer, [text], Chunking(10)).texts
    assert len(chunks) > 2 and " ".join(chunks) == text


def test_means_are_of_the_chunks_of_a_text(tokenizer: Tokenizer) -> None:
    chunks = divide(tokenizer, ["a b c d e", "a"], Chunking(4))
    vectors = np.arange(8, dtype=np.float32).reshape(4, 2) + 1
    assert chunks.rows.tolist() == [0, 0, 0, 1]
    assert np.allclose(chunks.mean(vectors, normalize=False), [vectors[:3].mean(axis=0), vectors[3]])
    assert np.allclose(np.linalg.norm(chunks.mean(vectors, normalize=True), axis=1), 1)


@pytest.mark.parametrize(
    "chunking", [Chunking(2), Chunking(81), Chunking(10, 8), Chunking(10, -1), Chunking(10, 0, "max"), Chunking(3.0)]
)
def test_sizes_out_of_range_are_refused(tokenizer: Tokenizer, chunking: Chunking) -> None:
    with pytest.raises(RequestError, match="expected"):
        divide(tokenizer, ["a b c"], chunking)


def test_too_many_chunks_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="more than 5 chunks"):
        divide(tokenizer, ["a " * 100], Chunking(10, 7), max_chunks=5)
    assert len(divide(tokenizer, ["a " * 8] * 5, Chunking(10), max_chunks=5).texts) == 5


def test_long_texts_are_tokenized_in_segments(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "SEGMENT", 100)
    text = "the cat sat, zebra! and  the zoo ran over there. " * 9 + "z" * 250
    chunks = divide(tokenizer, [text, "a"], Chunking(80, 7))
    assert [text[start:end] for start, end in chunks.spans[:-1]] == chunks.texts[:-1] and chunks.texts[-1] == "a"
    position = 0
    for start, end in chunks.spans[:-1]:
        assert not text[position:start].strip()  # nothing is left out, no word is cut
        position = max(position, int(end))
    assert position == len(text)
    words = " ".join(chunks.texts).replace(",", " ,").replace("!", " !").replace(".", " .").split()
    whole = {"the", "cat", "sat", ",", "zebra", "!", "and", "zoo", "ran", "over", "there", ".", "a"}
    assert all(word in whole or set(word) == {"z"} for word in words)
