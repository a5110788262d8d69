"""Shortlists learned from translated sentences, or read, for models of the zoo."""

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, write_json
from pipelines.kernels import extension
from zoo.cli import app as cli
from zoo.translation.data.tokens import END
from zoo.translation.search.shortlist import MISS_RATE, MULTIPLE, Shortlist, learn_shortlist

WORDS = 400


def text(count: int, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sentences whose token s is translated by s + 150, in reverse, and by 5 now and then; of each the end last."""
    sources, targets = [], []
    for _ in range(count):
        source = rng.integers(10, 150, rng.integers(3, 9))
        target = [*(source[::-1] + 150), *([5] if rng.random() < 0.5 else [])]
        sources.append(np.array([*source, END], np.int32))
        targets.append(np.array([*target, END], np.int32))
    return sources, targets


def test_words_that_come_together_are_found_and_frequent_ones_are_everywhere():
    sources, targets = text(3000, np.random.default_rng(0))
    shortlist = learn_shortlist(sources, targets, (WORDS, WORDS), best=1, shared=False)
    for token in range(10, 150):
        assert shortlist.targets[shortlist.offsets[token] : shortlist.offsets[token + 1]].tolist() == [token + 150]
    assert shortlist.first == MULTIPLE and {5, END} <= {*shortlist.common_tokens.tolist()}
    assert {*shortlist.allowed([20, 30, END]).tolist()} >= {170, 180, 5, END}
    again = Shortlist.from_bytes(shortlist.to_bytes())
    assert all(np.array_equal(vars(again)[name], array) for name, array in vars(shortlist).items())


def test_so_many_are_frequent_that_few_words_of_unseen_sentences_are_missing():
    """A third of all words are translated by any of 100, with which no source token goes."""
    rng = np.random.default_rng(1)
    sources, targets = text(3000, rng)
    for sentence in targets:
        sentence[:-1] = np.where(
            rng.random(len(sentence) - 1) < 1 / 3, rng.integers(300, 400, len(sentence) - 1), sentence[:-1]
        )
    shortlist = learn_shortlist(sources[:2900], targets[:2900], (WORDS, WORDS), best=2, shared=False)
    lists = [{*shortlist.allowed(source.tolist()).tolist()} for source in sources[2900:]]
    missing = [token not in allowed for allowed, target in zip(lists, targets[2900:], strict=True) for token in target]
    assert np.mean(missing) < 4 / MISS_RATE
    assert 80 <= shortlist.first <= WORDS  # those hundred have to be everywhere


def test_a_token_brings_along_itself_where_vocabularies_are_one():
    sources, targets = text(200, np.random.default_rng(2))
    shortlist = learn_shortlist(sources, targets, (WORDS, WORDS), best=1)
    assert 399 in shortlist.allowed([399])


def test_too_little_text_is_refused():
    sources, targets = text(9, np.random.default_rng(3))
    with pytest.raises(ValueError, match="9 pairs"):
        learn_shortlist(sources, targets, (WORDS, WORDS))


@pytest.fixture
def listed(translator, language, tmp_path):
    """A translator with the shortlist of sentences whose translations are of one word alone."""
    word = language.pairs(1)[0][1].split()[0]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{source}\t{word}\n" for source, _ in language.pairs(40)))
    report = zoo.freeze(translator, shortlist=str(pairs), output=tmp_path / "listed")
    assert report["path"] == str(tmp_path / "listed" / "fp32.onnx")
    return tmp_path / "listed"


@pytest.mark.parametrize("engine", ["onnxruntime", *(["native"] if extension.isas() else [])])
def test_a_frozen_model_says_only_the_words_of_its_shortlist(translator, listed, language, engine):
    texts = [source for source, _ in language.pairs(12, seed=5)]
    limited, whole = (zoo.pipeline(folder, "int8", engine) for folder in (listed, translator))
    allowed = [{*limited.shortlist.allowed(ids.tolist()).tolist()} for ids in limited.vocabulary.encode(texts)]
    said, unlisted = (
        [hypotheses[0].tokens for hypotheses in p.translate(p.vocabulary.encode(texts))] for p in (limited, whole)
    )
    assert all({*tokens} <= words for tokens, words in zip(said, allowed, strict=True))
    assert not all({*tokens} <= words for tokens, words in zip(unlisted, allowed, strict=True))


def test_what_is_known_of_a_model_names_its_shortlist(listed, translator, tmp_path):
    info = zoo.info(listed)
    assert info["preprocessing"]["shortlist"] == "shortlist.npz" in info["files"]
    assert "shortlist" not in zoo.info(translator)["preprocessing"]
    (listed / "shortlist.npz").write_bytes(b"other")
    with pytest.raises(RequestError, match="not the file that its card lists"):
        zoo.pipeline(listed, "fp32")


@pytest.mark.slow
def test_a_model_that_goes_on_or_is_cut_keeps_its_shortlist_and_its_search(listed, language, tmp_path):
    pytest.importorskip("torch", reason="needs the train extra")
    card = read_json(listed / "card.json")
    card["preprocessing"]["search"] = {"beam": 2}
    write_json(listed / "card.json", card)
    pairs = str(language.write(tmp_path / "on.tsv", 120, seed=3))
    settings = {"epochs": "1", "batch_size": "400", "validation": "30", "precision": "fp32"}
    zoo.finetune(listed, pairs, tmp_path / "on", settings=settings)
    zoo.finetune(listed, pairs, tmp_path / "cut", prune="ratio=.3", drop=100, settings=dict(settings))
    for name in ("on", "cut"):
        assert (tmp_path / name / "shortlist.npz").read_bytes() == (listed / "shortlist.npz").read_bytes()
        pipeline = zoo.pipeline(tmp_path / name, "int8", "onnxruntime")
        assert pipeline.beam == 2 and pipeline.folder.preprocessing["shortlist"] == "shortlist.npz"
        texts = pipeline.vocabulary.encode([source for source, _ in language.pairs(12, seed=5)])
        allowed = [{*pipeline.shortlist.allowed(ids.tolist()).tolist()} for ids in texts]
        said = [hypotheses[0].tokens for hypotheses in pipeline.translate(texts)]
        assert all({*tokens} <= words for tokens, words in zip(said, allowed, strict=True))


def test_a_model_takes_a_text_shortlist_in_place(listed, tmp_path):
    pieces = zoo.pipeline(listed, "fp32").vocabulary.pieces
    lex = tmp_path / "lex.s2t"
    lex.write_text(f"{pieces[-1]} {pieces[-2]} 0.5\nNULL {pieces[-2]} 0.4\n")
    before = read_json(listed / "card.json")["files"]["shortlist.npz"]["sha256"]
    zoo.freeze(listed, shortlist=str(lex))
    shortlist = zoo.pipeline(listed, "fp32").shortlist
    assert read_json(listed / "card.json")["files"]["shortlist.npz"]["sha256"] != before
    assert len(pieces) - 1 in shortlist.targets and shortlist.first == min(100, len(pieces))


def test_what_cannot_have_a_shortlist_is_refused(translator, tmp_path, capsys):
    before = read_json(translator / "card.json")
    (tmp_path / "pairs.tsv").write_text("one\tpair\n")
    (tmp_path / "lex.s2t").write_text("no shortlist\n")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    for arguments, why in (
        (["multi30k-en-de", "--shortlist", "pairs.tsv"], "-o FOLDER"),
        ([translator, "--shortlist", tmp_path / "pairs.tsv"], "1 pairs are too few"),
        ([translator, "--shortlist", tmp_path / "lex.s2t"], "line 1 is no target, source and probability"),
        ([translator, "--shortlist", tmp_path / "pairs.tsv", "-o", tmp_path / "used"], "in use"),
        ([translator, "--shortlist", tmp_path / "pairs.tsv", "--data", "x"], "no other option"),
        ([translator, "--shortlist", tmp_path / "none.tsv"], "zoo: found no "),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.call(["freeze", *map(str, arguments)])
        assert why in (line := capsys.readouterr().err) and line.count("\n") == 1
    assert read_json(translator / "card.json") == before and not (translator / "shortlist.npz").exists()
