"""Parallel text: reading, cleaning, vocabulary, batches."""

import gzip
import zipfile

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from zoo.translation.data import parallel_text
from zoo.translation.data.parallel_text import Vocabulary, learn_vocabulary, load_parallel_text
from zoo.translation.data.text_files import Faults, read_pairs
from zoo.translation.data.tokens import END, UNKNOWN, batch_by_tokens

PAIRS = [("one two", "eins zwei"), ("three", "drei"), ("four five six", "vier fünf sechs")]


def write(path, text: str):
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture(scope="module")
def vocabulary(language):
    return Vocabulary(learn_vocabulary(language.pairs(300), 60, 0))


def test_vocabularies_from_1024_pieces_on_write_unknown_characters_as_bytes(language, vocabulary):
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefghijklmnop"), 6)) for _ in range(3000)]
    with_bytes = Vocabulary(learn_vocabulary([(word, word[::-1]) for word in words], 1024, 0))
    assert sum(piece.startswith("<0x") for piece in with_bytes.pieces) == 256
    for text in ("abcdef \U0001fae8", "\u96ea\u72d7 50% {0}", "C# \u20ac"):
        (tokens,) = with_bytes.encode([text])
        assert UNKNOWN not in tokens and with_bytes.decode([tokens[:-1].tolist()]) == [text]
        assert UNKNOWN in vocabulary.encode([text])[0]
    assert not any(piece.startswith("<0x") for piece in vocabulary.pieces)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_two_files_and_a_table_give_the_same_pairs(tmp_path, suffix):
    table = write(tmp_path / f"pairs.tsv{suffix}", "".join(f"{a}\t{b}\tCC-BY\r\n" for a, b in PAIRS))
    first = write(tmp_path / f"a.en{suffix}", "\ufeff" + "\n".join(a for a, _ in PAIRS))
    second = write(tmp_path / f"a.de{suffix}", "\n".join(b for _, b in PAIRS))
    assert list(read_pairs(table)) == PAIRS
    assert list(read_pairs(f"{first},{second}")) == PAIRS
    assert list(read_pairs([table, f"{first},{second}"])) == PAIRS * 2


def test_only_a_line_feed_ends_a_line(tmp_path):
    path = write(tmp_path / "pairs.tsv", "a\u2028b\x0bc\td\n")
    assert list(read_pairs(path)) == [("a\u2028b\x0bc", "d")]


def test_the_table_in_an_archive_is_found(tmp_path):
    with zipfile.ZipFile(tmp_path / "pairs.zip", "w") as archive:
        archive.writestr("_about.txt", "no table\n")
        archive.writestr("deu.txt", "".join(f"{a}\t{b}\n" for a, b in PAIRS))
    assert list(read_pairs(tmp_path / "pairs.zip")) == PAIRS
    with zipfile.ZipFile(tmp_path / "none.zip", "w") as archive:
        archive.writestr("_about.txt", "no table\n")
    with pytest.raises(RequestError, match="found 0 files"):
        list(read_pairs(tmp_path / "none.zip"))
    (tmp_path / "broken.zip").write_bytes(b"PK")
    with pytest.raises(RequestError, match=r"cannot read .*broken.zip"):
        list(read_pairs(tmp_path / "broken.zip"))


@pytest.mark.parametrize("nested", [False, True])
def test_a_data_set_is_read_by_the_names_of_its_languages(tmp_path, nested):
    datasets = pytest.importorskip("datasets")
    rows = [{"translation": {"en": a, "de": b}} if nested else {"de": b, "en": a} for a, b in PAIRS]
    splits = {"train": datasets.Dataset.from_list(rows[:2]), "validation": datasets.Dataset.from_list(rows[2:])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    assert list(read_pairs(tmp_path / "set", "en-de")) == PAIRS[:2]
    assert list(read_pairs(tmp_path / "set", "de-en", held_out=True)) == [PAIRS[2][::-1]]
    with pytest.raises(RequestError, match="expected en-fr"):
        list(read_pairs(tmp_path / "set", "en-fr"))


def test_what_is_no_pair_is_named_by_its_line_or_left_out(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"a\tb\n\xff\tb\nno tab\nc\td\n")
    with pytest.raises(RequestError, match=r"pairs.tsv, line 2: not UTF-8"):
        list(read_pairs(path))
    faults = Faults()
    assert list(read_pairs(path, on_error="skip", faults=faults)) == [("a", "b"), ("c", "d")]
    assert faults == {"not UTF-8": 1, "no TAB between source and target": 1}
    assert faults.shown[1].endswith("line 3: no TAB between source and target")


def test_bad_sources_are_refused(tmp_path, monkeypatch):
    first, second = write(tmp_path / "a", "1\n2\n"), write(tmp_path / "b", "1\n")
    with pytest.raises(RequestError, match="another number of lines"):
        list(read_pairs(f"{first},{second}"))
    (tmp_path / "cut.tsv.gz").write_bytes(gzip.compress(b"a\tb\n" * 1000)[:30])
    with pytest.raises(RequestError, match=r"cannot read .*cut.tsv.gz"):
        list(read_pairs(tmp_path / "cut.tsv.gz"))
    with pytest.raises(RequestError, match="source TAB target"):
        list(read_pairs(tmp_path / "nothing.tsv"))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(RequestError, match="ZOO_OFFLINE"):
        list(read_pairs("someone/something"))
    with pytest.raises(RequestError, match="--data"):
        list(read_pairs([]))


def test_cleaning_tidies_and_counts_what_it_leaves_out():
    faults = Faults()
    cleaned = parallel_text.clean(
        [(" a  b\u00a0c ", "d"), ("a b c", "d"), ("", "x"), ("x", "  "), ("bell\x07", "x"), ("x", "\ue000")], faults
    )
    assert list(cleaned) == [("a b c", "d")]
    assert faults == {"repeated": 1, "empty": 2, "strange characters": 2}


def test_a_vocabulary_is_the_same_for_the_same_text_and_gives_it_back(language, vocabulary):
    assert learn_vocabulary(language.pairs(300), 60, 0) == vocabulary.content
    texts = [a for a, _ in language.pairs(20)]
    tokens = vocabulary.encode(texts)
    assert all(
        sentence.dtype == np.int32 and sentence[-1] == END and not (sentence[:-1] == END).any() for sentence in tokens
    )
    assert vocabulary.decode([sentence[:-1].tolist() for sentence in tokens]) == texts
    assert len(vocabulary) <= 60
    assert vocabulary.encode(["", "ж"])[0].tolist() == [END]
    assert UNKNOWN in vocabulary.encode(["", "ж"])[1]
    with pytest.raises(RequestError, match="no vocabulary of sentencepiece"):
        Vocabulary(b"broken")
    with pytest.raises(RequestError, match="no vocabulary of 3 pieces"):
        learn_vocabulary(language.pairs(5), 3, 0)


def test_pairs_too_long_or_too_unequal_are_left_out(vocabulary):
    pairs = [("balan", "lanxba"), ("balan " * 30, "lanxba " * 30), ("balan", "lanxba " * 12)]
    faults = Faults()
    corpus, kept = parallel_text.corpus(pairs, vocabulary, faults, max_length=30, max_ratio=2.0)
    assert (kept, len(corpus)) == ([0], 1)
    assert faults == {"too long": 1, "lengths differ too much": 1} or faults == {"too long": 2}
    assert parallel_text.corpus(pairs, vocabulary)[1] == [0, 1, 2]
    assert [sentence.tolist() for sentence in corpus.pair(0)] == [
        vocabulary.encode([text])[0].tolist() for text in pairs[0]
    ]


def test_batches_hold_every_pair_once_and_no_more_tokens_than_allowed(language, vocabulary):
    corpus, _ = parallel_text.corpus(language.pairs(400), vocabulary)
    longest = np.maximum(*corpus.lengths)
    for seed in (None, [0, 1]):
        parts = parallel_text.batches(corpus, 256, seed)
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(corpus)))
        assert all(longest[part].max() * len(part) <= 256 for part in parts)
        used = longest.sum() / sum(longest[part].max() * len(part) for part in parts)
        assert used > 0.8  # like lengths lie together: little is padding
    again, other = parallel_text.batches(corpus, 256, [0, 1]), parallel_text.batches(corpus, 256, [0, 2])
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=False))


def test_batches_by_tokens_keep_order_and_limits():
    assert batch_by_tokens([], 10) == []
    assert batch_by_tokens([20, 1, 1, 4, 4], 8) == [(0, 1), (1, 3), (3, 5)]
    assert batch_by_tokens([1] * 5, 100, rows=2) == [(0, 2), (2, 4), (4, 5)]


def test_held_out_pairs_are_not_trained_on(language, tmp_path):
    pairs = list(dict.fromkeys(language.pairs(200)))
    path = write(tmp_path / "pairs.tsv", "".join(f"{a}\t{b}\n" for a, b in pairs))
    learn = lambda lines: Vocabulary(learn_vocabulary(lines, 60, 0))  # noqa: E731
    text = load_parallel_text(path, learn, languages="en-de", validation=30)
    assert len(text.references) == len(text.held_out) == len(pairs) // 10
    assert len(text.train) == len(pairs) - len(text.held_out)
    assert load_parallel_text(path, learn, languages="en-de", validation=30).digest == text.digest
    assert load_parallel_text(path, learn, languages="en-de", validation=30, seed=1).digest != text.digest
    swapped = load_parallel_text(path, learn, languages="de-en", swap=True, validation=30)
    assert swapped.references[0] == text.references[0][::-1]
    named = write(tmp_path / "dev.tsv", "".join(f"{a}\t{b}\n" for a, b in pairs[:5]))
    text = load_parallel_text(path, learn, languages="en-de", validation_data=str(named))
    assert text.references == pairs[:5]
    assert len(text.train) == len(pairs) - 5
    with pytest.raises(RequestError, match="0 pairs to train on"):
        load_parallel_text(named, learn, languages="en-de", validation_data=str(named))
    with pytest.raises(RequestError, match="on_error"):
        load_parallel_text(path, learn, languages="en-de", on_error="ignore")


@pytest.mark.data
def test_the_development_data_is_read(shared):
    folder = shared / "data" / "translation"
    pairs = list(read_pairs(f"{folder}/multi30k/val.en.gz,{folder}/multi30k/val.de.gz"))
    assert len(pairs) == 1014
    assert sum(1 for _ in read_pairs(folder / "tatoeba_deu_eng.zip")) == 169_813
