"""Sentences in, sentences out: the pipeline, `zoo run`, `zoo evaluate`, calibration."""

import gzip
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.kernels import extension
from pipelines.models.folder import open_folder
from zoo.cli import app as cli
from zoo.translation import inference
from zoo.translation import translator as translators
from zoo.translation.data.parallel_text import Vocabulary
from zoo.translation.data.sentence_splitting import language_code, split_sentences
from zoo.translation.data.tokens import PAD, UNKNOWN


@pytest.fixture(scope="module")
def opened(translator):
    return zoo.pipeline(translator, precision="fp32")


@pytest.fixture(scope="module")
def texts(language):
    return [a for a, _ in language.pairs(40, seed=3)]


@pytest.fixture
def translate(translator, tmp_path):
    """Runs `zoo.run` on bytes; returns (summary, lines of the output)."""

    def run(content: bytes, name: str = "out.txt", precision: str = "fp32", **options):
        (tmp_path / "in.txt").write_bytes(content)
        summary = zoo.run(translator, tmp_path / "in.txt", tmp_path / name, precision=precision, **options)
        return summary, (tmp_path / name).read_text(encoding="utf-8").split("\n")[:-1]

    return run


def test_the_language_is_translated(opened, language):
    pairs = language.pairs(60, seed=3)
    results = opened([a for a, _ in pairs])
    assert np.mean([result["translation"] == b for result, (_, b) in zip(results, pairs, strict=True)]) > 0.8
    assert all(result["score"] <= 0 for result in results)
    assert opened(pairs[0][0])[0]["translation"] == results[0]["translation"]  # one sentence is a list of one


def test_a_file_is_read_by_its_path_and_nothing_is_refused(opened, texts, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("\n".join(texts[:4]))
    assert opened(tmp_path / "in.txt") == opened(texts[:4])
    monkeypatch.chdir(tmp_path)
    (tmp_path / texts[0]).write_text(texts[1])
    assert opened(texts[0]) == opened([texts[0]]) == opened(texts[:1] * 2)[:1]
    with pytest.raises(RequestError, match="found no sentences"):
        opened([])
    with pytest.raises(RequestError, match="sentence 2 has"):
        opened.preprocess([texts[0], " ".join(texts)])


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_three_parts_chain_to_the_call(translator, texts, precision):
    pipeline = zoo.pipeline(translator, precision=precision, engine="onnxruntime")
    batch = pipeline.preprocess([*texts[:5], ""])
    assert batch["source"].dtype == np.int64
    assert batch["source"].flags.c_contiguous
    out = pipeline.predict(batch)
    assert out["tokens"].shape[:2] == out["scores"].shape == (6, 1)
    results = pipeline.postprocess(out)
    assert results == pipeline([*texts[:5], ""])
    assert results[5] == {"translation": "", "score": 0.0}


def test_n_best_are_other_translations_the_best_first(translator, texts):
    pipeline = zoo.pipeline(translator, precision="fp32")
    (plain,) = pipeline(texts[0])
    pipeline.best = 3
    (result,) = pipeline(texts[0])
    assert result["translation"] == plain["translation"]
    assert len(result["others"]) == 2
    scores = [result["score"], *(other["score"] for other in result["others"])]
    assert scores == sorted(scores, reverse=True)
    pipeline.beam = 2
    with pytest.raises(RequestError, match="beam 2 and n-best 3"):
        pipeline(texts[0])


@pytest.mark.parametrize("engine", ["native", "onnxruntime"])
def test_own_models_never_write_the_unknown_token(translator, texts, engine):
    pipeline = zoo.pipeline(translator, precision="int8", engine=engine)
    assert pipeline.rules.banned == (UNKNOWN,)
    sentences = pipeline.vocabulary.encode([f"{text} \u96ea \u96ea" for text in texts[:20]])
    assert all(np.count_nonzero(tokens == UNKNOWN) for tokens in sentences)
    assert not [best.tokens for (best,) in pipeline.translate(sentences) if UNKNOWN in best.tokens]


def test_a_translation_does_not_depend_on_the_batch(translator, texts):
    alone, together = (zoo.pipeline(translator, precision="fp32", batch_size=size)(texts) for size in (1, 64))
    assert [result["translation"] for result in alone] == [result["translation"] for result in together]
    assert [result["score"] for result in alone] == pytest.approx([result["score"] for result in together], abs=1e-4)


def test_both_engines_translate_alike(translator, texts):
    one, other = (
        zoo.pipeline(translator, precision="fp32", engine=engine)(texts[:6]) for engine in ("onnxruntime", "openvino")
    )
    assert [result["translation"] for result in one] == [result["translation"] for result in other]


@pytest.mark.skipif(not extension.isas(), reason="needs the native kernels")
@pytest.mark.parametrize("beam", [1, 4])
def test_native_code_translates_like_the_graph_and_alike_in_any_batch(translator, texts, beam):
    translated = []
    for engine, size in (("onnxruntime", 32), ("native", 32), ("native", 1)):
        pipeline = zoo.pipeline(translator, engine=engine, batch_size=size)
        pipeline.beam, pipeline.best = beam, min(beam, 2)
        translated.append([result["translation"] for result in pipeline([*texts, ""])])
        assert pipeline.engine == engine
    graph, native, one_by_one = translated
    assert native == one_by_one and native[-1] == ""
    assert (
        np.mean([a == b for a, b in zip(graph, native, strict=True)]) > 0.9
    )  # the table of embeddings is float there, int8 here
    with pytest.raises(RequestError, match="native computes in int8, not fp32"):
        zoo.pipeline(translator, precision="fp32", engine="native")


def test_auto_is_native_code_where_it_can_be(translator, monkeypatch, caplog):
    assert zoo.pipeline(translator).engine == ("native" if extension.isas() else "onnxruntime")
    assert zoo.pipeline(translator, "fp32").engine == "onnxruntime"

    def refuse(*_):
        raise RequestError("no such decoder")

    monkeypatch.setattr(extension, "isas", lambda: ["portable"])
    monkeypatch.setattr(translators, "NativeTranslator", refuse)
    with caplog.at_level("INFO", "pipelines.models.line_pipeline"):
        assert zoo.pipeline(translator).engine == "onnxruntime"
    assert [(record.levelname, record.message) for record in caplog.records if "falling back" in record.message] == [
        ("INFO", "no such decoder; falling back to onnxruntime")
    ]
    with pytest.raises(RequestError, match="no such decoder"):
        zoo.pipeline(translator, engine="native")
    monkeypatch.setattr(extension, "isas", list)  # compiled without
    assert zoo.pipeline(translator).engine == "onnxruntime"


def test_batches_are_of_like_lengths_and_no_larger_than_allowed(translator, texts, monkeypatch):
    pipeline, shapes = zoo.pipeline(translator, precision="fp32", batch_size=4), []
    search = inference.TranslationPipeline._search

    def note(self, sentences, demands):
        shapes.append([len(sentence) for sentence in sentences])
        return search(self, sentences, demands)

    monkeypatch.setattr(inference.TranslationPipeline, "_search", note)
    pipeline(texts)
    assert [length for shape in shapes for length in shape] == sorted(length for shape in shapes for length in shape)
    assert all(len(shape) <= 4 and len(shape) * max(shape) <= 4 * translators.MEAN_TOKENS for shape in shapes)


def test_run_keeps_the_order_and_empty_lines(translate, opened, texts, monkeypatch):
    monkeypatch.setattr(inference, "SORT_WINDOW", 1)  # several windows
    lines = [*texts[:7], "", "  ", *texts[7:30]]
    summary, translated = translate("\n".join(lines).encode(), batch_size=4)
    wanted = [result["translation"] for result in opened([line.strip() for line in lines])]
    assert translated == wanted
    assert translated[7:9] == ["", ""]
    assert (summary["sentences"], summary["skipped"], summary["engine"], summary["precision"]) == (
        30,
        0,
        "onnxruntime",
        "fp32",
    )


def test_bad_lines_are_named_and_the_run_goes_on(translate, texts, caplog):
    russian = "привет мир"
    bad = [b"\xff\xfe", russian.encode()]
    with caplog.at_level(logging.WARNING):
        summary, lines = translate(b"\n".join([texts[0].encode(), *bad, texts[1].encode()]))
    assert lines[1:3] == ["", russian]
    assert lines[0] and lines[3]
    assert (summary["sentences"], summary["skipped"], summary["untranslated"]) == (2, 2, 1)
    messages = [record.getMessage() for record in caplog.records]
    for number, reason in enumerate(["not UTF-8", "does not know"], 2):
        assert any(f"in.txt, line {number} " in message and reason in message for message in messages), reason
    with pytest.raises(RequestError, match="line 3 is in a script or language"):
        translate(b"\n".join([texts[0].encode(), bad[1], bad[0]]).replace(b"\n", b"\n\n", 1), on_error="raise")


def test_a_file_without_a_line_that_can_be_translated_is_refused(translate, tmp_path):
    with pytest.raises(RequestError, match="none of 2 lines could be translated"):
        translate(b"\x89PNG\xff\xfe\n\xff\xff")
    assert not [path for path in tmp_path.rglob("*") if "out" in path.name]


@pytest.mark.parametrize(
    "bad",
    [b"\xff\xfe", b"half \xc3", b"surrogate \xed\xa0\x80"],
    ids=str,
)
def test_a_line_that_is_not_utf8_is_named_by_its_number(translate, texts, caplog, bad):
    with caplog.at_level(logging.WARNING):
        summary, lines = translate(b"\n".join([texts[0].encode(), bad, texts[1].encode()]))
    assert [bool(line) for line in lines] == [True, False, True]
    assert (summary["sentences"], summary["skipped"]) == (2, 1)
    (message,) = (record.getMessage() for record in caplog.records if "in.txt" in record.getMessage())
    assert "in.txt, line 2 is not UTF-8" in message


@pytest.mark.parametrize(
    ("char", "note"),
    [
        ("\uf0b7", "U+F0B7 left out"),
        ("\x07", "U+0007 left out"),
        ("\x7f", "U+007F left out"),
        ("\x00", "U+0000 left out"),
        ("\x81", "U+0081 left out"),
        ("\ufdd0", "U+FDD0 left out"),
        ("\U0001ffff", "U+1FFFF left out"),
        ("\U00100000", "U+100000 left out"),
        ("\x1b[1;31m", "U+001B left out"),
        ("\ud800", "U+D800 left out"),
        ("\u2060", "U+2060 left out"),
        ("\u200b", ""),
        ("\ufeff", ""),
    ],
    ids=ascii,
)
def test_odd_characters_are_left_out_and_named(opened, texts, char, note):
    (plain,) = opened([texts[0]])
    for text in (f"{char} {texts[0]}", f"{texts[0]}{char}", texts[0].replace(" ", f"{char} ", 1)):
        (answer,) = opened([text])
        assert answer["translation"] == plain["translation"], ascii(text)
        assert answer.get("untranslated", "") == note


@pytest.mark.parametrize(
    "emoji", ["\U0001f415", "\U0001fae8", "\U0001fabe", "\U0001f9ff\u200d\U0001f9ff", "$5", "[1]", "50%"]
)
def test_unknown_words_are_copied_at_their_place_whatever_the_version_of_python(opened, texts, emoji):
    words = texts[0].split(" ")
    (plain,) = opened([texts[0]])
    target = plain["translation"].split(" ")
    assert len(target) == len(words)
    for place in range(len(words) + 1):
        (answer,) = opened([" ".join([*words[:place], emoji, *words[place:]])])
        assert answer["translation"].split(" ") == [*target[:place], emoji, *target[place:]]
        assert answer["untranslated"] == f"{emoji} copied" and "error" not in answer
    (alone,) = opened([emoji])
    assert alone == {"translation": emoji, "score": 0.0, "untranslated": f"{emoji} copied"}


def test_a_sentence_in_another_script_is_copied_among_others(translate, opened, texts):
    chinese = "\u4f60\u597d\u4e16\u754c\u3002"
    content = "\n".join([f"{texts[0]}. {chinese} {texts[1]}.", texts[2], chinese])
    summary, lines = translate(content.encode())
    answers = opened(content.split("\n"))
    assert [answer["translation"] for answer in answers] == lines
    assert chinese in lines[0] and lines[2] == chinese
    assert opened(texts[2:3])[0]["translation"] == lines[1]
    assert (summary["sentences"], summary["skipped"], summary["untranslated"]) == (2, 1, 2)
    assert "script or language" in answers[2]["error"] and "error" not in answers[0]
    with pytest.raises(RequestError, match="sentence 1 is in a script"):
        opened([chinese])


def test_text_without_words_is_copied(opened, texts):
    (plain,) = opened(texts[:1])
    for text in ("- ...", "12345678901234567890", "+49 (0)30 1,234.56"):
        (answer,) = opened([text])
        assert answer == {"translation": text, "score": 0.0, "untranslated": f"{text} copied"}
    (answer,) = opened([f"{texts[0]}. ??? {texts[0]}."])
    assert "???" in answer["translation"] and plain["translation"] in answer["translation"]


@pytest.mark.parametrize("join", [" ", ", ", "  "], ids=repr)
def test_a_sentence_longer_than_the_model_takes_is_translated_in_pieces(opened, texts, join):
    words = " ".join(texts * 20).split(" ")
    line = opened.line("line 1", join.join(words), split=True)
    assert not line.fault and all(len(part) <= opened.max_length for part in line.parts)
    assert sum(map(len, line.parts)) / len(line.parts) > opened.max_length / 3
    source = " ".join(opened.vocabulary.decode([part.tolist() for part in line.parts]))
    assert [word for word in source.replace(" \u2047", "").split()] == words
    (answer,) = opened([join.join(words)])
    assert len(answer["translation"].split()) > len(line.parts)


@pytest.mark.parametrize("text", ["x" * 20_000, "https://host/" + "ab-" * 9000])
def test_addresses_and_data_without_blanks_are_copied(opened, texts, text):
    (plain,) = opened(texts[:1])
    (answer,) = opened([f"{texts[0]} {text}"])
    assert answer["translation"] == f"{plain['translation']} {text}"
    assert answer["untranslated"] == f"{text[:40]}... copied"


def test_a_text_without_blanks_is_cut_between_characters():
    from zoo.translation.data.line_splitting import _cut

    text = "\u96ea" * 1000
    pieces = list(_cut(text, 7))
    assert "".join(pieces) == text and max(map(len, pieces)) <= 143 and len(pieces) == 7


def sentences_of(texts, length=30):
    """A line of so many sentences, each of some words."""
    return [f"{text.capitalize()}." for text in texts[:length]]


def test_a_line_longer_than_the_model_takes_is_cut_at_the_ends_of_sentences(translate, opened, texts):
    parts = sentences_of(texts)
    content = "\n".join([texts[0], " ".join(parts), "", texts[1]]).encode()
    summary, translated = translate(content)
    wanted = [result["translation"] for result in opened([texts[0], *parts, texts[1]])]
    assert translated == [wanted[0], " ".join(wanted[1:-1]), "", wanted[-1]]
    assert (summary["sentences"], summary["skipped"]) == (3, 0)
    _, best = translate(content, n_best=2, scores=True)
    assert [line.split("\t")[0] for line in best] == ["1", "1", "2", "2", "3", "3", "4", "4"]
    assert [line.split("\t")[2] for line in best[::2]] == translated
    assert float(best[2].split("\t")[1]) > float(best[3].split("\t")[1])


def test_a_sentence_too_long_in_a_line_is_cut_and_the_others_are_translated(translate, texts):
    parts = sentences_of(texts)
    long = " ".join(texts[:30])
    summary, lines = translate("\n".join([" ".join([*parts[:3], f"{long}.", *parts[3:]]), *parts[:3]]).encode())
    assert lines[0].startswith(" ".join(lines[1:]) + " ")
    assert summary["skipped"] == 0


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("en", ["Mr. Bax paid $3.50 at 2 p.m. in Washington, D.C. for it!", '"Really?" she asked.', "Yes."]),
        ("", ["See fig. 3.2 for details.", "12 men go."]),
        ("de_DE", ["Am 5. Mai kam Dr. Müller z.B. mit.", "Übung!"]),
        ("deu_Latn", ["Am 5. Mai kam Dr. Müller z.B. mit.", "Übung!"]),
        ("jpn_Jpan", ["今日は。", "元気ですか？"]),
        ("als_Latn", ["Ai tha: po!", "e di."]),  # Albanian; "als" is Alemannic to sentencex
    ],
)
def test_sentences_end_where_their_language_ends_them(language, sentences):
    assert split_sentences(("" if language == "jpn_Jpan" else " ").join(sentences), language) == sentences


@pytest.mark.skipif(not extension.isas(), reason="needs the native kernels")
def test_native_code_loads_neither_what_reads_graphs_nor_what_fetches_and_writes_tables(translator):
    code = "import sys, zoo; opened = zoo.pipeline(sys.argv[1], engine='native'); opened(['bax']); print(' '.join(sys.modules))"
    for _ in range(2):  # the first time the graph is read
        done = subprocess.run([sys.executable, "-c", code, translator], capture_output=True, text=True, check=True)
    heavy = {"onnx", "onnx_ir", "onnxruntime", "openvino", "pyarrow", "requests", "torch", "sacrebleu"}
    assert heavy & set(done.stdout.split()) == set()


@pytest.mark.parametrize("engine", ["onnxruntime", "native"])
def test_a_text_of_empty_lines_stays_one(translate, engine):
    if engine == "native" and not extension.isas():
        pytest.skip("needs the native kernels")
    assert translate(b"\n \n\n", precision="int8", engine=engine)[1] == ["", "", ""]


def test_outputs_of_every_kind(translate, texts):
    content = "\n".join(texts[:3]).encode()
    _, plain = translate(content)
    _, scored = translate(content, scores=True)
    assert [line.split("\t")[1] for line in scored] == plain
    assert all(float(line.split("\t")[0]) <= 0 for line in scored)
    _, best = translate(content, n_best=2)
    assert [line.split("\t")[0] for line in best] == ["1", "1", "2", "2", "3", "3"]
    assert [line.split("\t")[1] for line in best[::2]] == plain
    _, rows = translate(content, "out.jsonl")
    assert [json.loads(row)["translation"] for row in rows] == plain
    assert [json.loads(row)["line"] for row in rows] == [1, 2, 3]
    _, greedy = translate(content, beam=1)
    assert len(greedy) == 3


def test_the_command_reads_stdin_and_archives_and_writes_stdout(translator, texts, tmp_path, monkeypatch, capsysbinary):
    (tmp_path / "in.gz").write_bytes(gzip.compress("\n".join(texts[:3]).encode()))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(texts[3].encode())))
    cli.call(["run", str(translator), str(tmp_path / "in.gz"), "-", "--precision", "fp32", "--beam", "2"])
    translated = capsysbinary.readouterr().out.decode().splitlines()
    assert len(translated) == 4
    assert all(translated)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.txt"], "found no file nothing.txt"),
        (["--beam", "0"], "beam 0"),
        (["--n-best", "9"], "n-best 9"),
        (["--no-repeat-ngram", "-1"], "no-repeat-ngram -1"),
        (["--length-penalty", "nan"], "length-penalty nan"),
        (["--precision", "fp64"], "fp64"),
    ],
)
def test_wrong_requests_are_one_line(translator, texts, tmp_path, words, said, capsys):
    (tmp_path / "in.txt").write_text(texts[0])
    if words[0].startswith("--"):
        words = [*words, str(tmp_path / "in.txt")]
    with pytest.raises(SystemExit) as end:
        cli.call(["run", str(translator), *words, "-o", str(tmp_path / "out.txt")])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out.txt").exists()


@pytest.mark.parametrize("options", [{"no_repeat_ngram": 1}, {"no_repeat_ngram": 2, "length_penalty": 0.0}])
def test_options_of_the_search_are_followed_in_every_engine(translator, texts, options, tmp_path):
    """The graph of the search knows no n-grams: onnxruntime then decodes step by step."""
    text = " ".join(["bator kotor"] * 4)
    (tmp_path / "in.txt").write_text("\n".join([text, *texts[:20]]))
    written = {}
    for engine in ("native", "onnxruntime"):
        pipeline = zoo.pipeline(translator, "int8", engine=engine)
        plain = [result["translation"] for result in pipeline([text, *texts[:20]])]
        pipeline.run(tmp_path / "in.txt", tmp_path / "out.txt", **options)
        written[engine] = (tmp_path / "out.txt").read_text().splitlines()
        assert written[engine][0] != plain[0]
        assert [result["translation"] for result in pipeline([text, *texts[:20]])] == plain
        ids = [
            hypotheses[0].tokens
            for hypotheses in pipeline.with_options(**options).translate(pipeline.vocabulary.encode([text]))
        ]
        size = options["no_repeat_ngram"]
        grams = [tuple(ids[0][i : i + size]) for i in range(len(ids[0]) - size + 1)]
        assert len(grams) == len(set(grams)) > 3
    same = sum(ours == theirs for ours, theirs in zip(written["native"], written["onnxruntime"], strict=True))
    assert same >= 19  # of 21: they round differently


def test_options_of_translation_are_refused_by_other_models(rows, trained):
    with pytest.raises(RequestError, match="no option beam"):
        zoo.run(trained, rows, beam=4)


def test_evaluate_compares_precisions_by_bleu_and_chrf(translator, language, tmp_path):
    sacrebleu = pytest.importorskip("sacrebleu")
    path = language.write(tmp_path / "test.tsv", 60, seed=7)
    report = zoo.evaluate(translator, str(path))
    pipeline = zoo.pipeline(translator, precision="fp32")
    pairs = language.pairs(60, seed=7)
    said = [result["translation"] for result in pipeline([a for a, _ in pairs])]
    assert report["metrics"]["fp32"]["bleu"] == pytest.approx(
        sacrebleu.corpus_bleu(said, [[b for _, b in pairs]]).score
    )
    assert report["metrics"]["fp32"]["chrf"] == pytest.approx(
        sacrebleu.corpus_chrf(said, [[b for _, b in pairs]]).score
    )
    assert report["samples"] == 60
    assert report["difference"].keys() == {"bleu", "chrf", "agreement"}
    assert report["difference"]["bleu"] == pytest.approx(
        report["metrics"]["int8"]["bleu"] - report["metrics"]["fp32"]["bleu"]
    )
    assert abs(report["difference"]["bleu"]) < 5
    low, high = report["interval"]["bleu"]
    assert low <= report["difference"]["bleu"] <= high
    assert report["signatures"]["bleu"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    sides = [tmp_path / f"test.{side}" for side in ("en", "de")]
    for side, texts in zip(sides, zip(*pairs, strict=True), strict=True):
        side.write_text("\n".join(texts))
    again = zoo.evaluate(translator, f"{sides[0]},{sides[1]}")
    assert again["metrics"] == report["metrics"]


def test_calibration_samples_are_what_the_decoder_sees_in_the_search(translator, language, tmp_path):
    (tmp_path / "in.txt").write_text("\n".join(a for a, _ in language.pairs(20, seed=8)))
    report = zoo.calibrate(translator, str(tmp_path / "in.txt"), tmp_path / "table.json", samples=12)
    assert report["samples"] == 12
    opened = zoo.pipeline(translator, precision="fp32")
    samples = opened.calibration(str(tmp_path / "in.txt"), 12)
    hypotheses = opened.translate([row[row != PAD] for row in samples["source"]])
    shorter = 0
    for i, (row, (hypothesis,)) in enumerate(zip(samples["target"], hypotheses, strict=True)):
        tokens = row[row != PAD].tolist()[1:]
        assert tokens == hypothesis.tokens[: len(tokens)]
        shorter += len(tokens) < len(hypothesis.tokens)
        assert i % 2 or len(tokens) == len(hypothesis.tokens)
    assert shorter >= 3  # of 6 that are cut anywhere


def test_freezing_leaves_the_optimizer_behind_and_says_so(translator):
    sizes = read_json(translator / "build.json")["fp32.onnx"]["bytes"]
    assert sizes["state.pt"] > 2.5 * sizes["model.pt"]  # Adam keeps two moments of every weight
    assert sizes["fp32.onnx"] == pytest.approx(sizes["model.pt"], rel=0.5) and not (translator / "fp32.onnx").exists()
    layers = [
        layer
        for layer in read_json(translator / "quantization.json")["operators"]
        if layer["type"] in ("MatMul", "Gemm")
    ]
    attention = [layer["precision"] for layer in layers if layer["name"].endswith((".products", ".found"))]
    assert attention and set(attention) == {"float"}
    assert {layer["precision"] for layer in layers if not layer["name"].endswith((".products", ".found"))} == {"int8"}


def test_a_folder_without_its_vocabulary_is_named(translator, tmp_path):
    import shutil

    shutil.copytree(translator, tmp_path / "copy")
    (tmp_path / "copy" / "vocabulary.model").write_bytes(b"broken")
    with pytest.raises(RequestError, match="vocabulary"):
        zoo.pipeline(tmp_path / "copy", precision="fp32")
    folder = open_folder(translator, zoo.entry)
    assert len(Vocabulary.read(Path(folder.path) / "vocabulary.model")) > 20


@pytest.mark.slow
def test_benchmark_times_whole_translations_in_both_engines(translator, texts, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("\n".join(texts))
    command = [
        "benchmark",
        str(translator),
        "--data",
        str(tmp_path / "in.txt"),
        "--batch-size",
        "1,6",
        "--rounds",
        "2",
        "--json",
    ]
    cli.call([*command, "--engine", "onnxruntime,native" if extension.isas() else "onnxruntime"])
    results = json.loads(capsys.readouterr().out)["results"]
    native = [("native", "int8", size) for size in (1, 6) if extension.isas()]
    wanted = [("onnxruntime", precision, size) for precision in ("fp32", "int8") for size in (1, 6)]
    assert sorted((row["engine"], row["precision"], row["batch_size"]) for row in results) == sorted(wanted + native)
    for result in results:
        assert result["split_ms"].keys() == {"preprocess", "model", "postprocess"}
        assert result["samples_per_second"] > 1 and 30 < result["memory_mb"] < 3000
        assert result["split_ms"]["model"] > 0.05  # encoder and several steps
    (again,) = zoo.benchmark(translator, precisions=["fp32"], engines=["auto"], batch_sizes=[2], rounds=1)["results"]
    assert again["engine"] == "onnxruntime"


def test_a_plan_of_translation_is_refused_in_one_line(translator, capsys):
    with pytest.raises(SystemExit):
        cli.call(["plan", str(translator)])
    assert "zoo benchmark" in capsys.readouterr().err


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "engine", "wanted"),
    [("fp32", "onnxruntime", 0.995), ("int8", "onnxruntime", 0.97), ("int8", "native", 1.0)],
)
def test_the_shipped_model_translates_alike_in_batches_of_1_and_64(shared, precision, engine, wanted):
    if engine == "native" and not extension.isas():
        pytest.skip("needs the native kernels")
    with gzip.open(
        shared / "data" / "translation" / "multi30k" / "test_2016_flickr.en.gz", "rt", encoding="utf-8"
    ) as file:
        sentences = [line.strip() for line in file][:300]
    outputs = []
    for size in (1, 64):
        pipeline = zoo.pipeline("multi30k-en-de", precision, engine, batch_size=size)
        outputs.append(
            [hypotheses[0].tokens for hypotheses in pipeline.translate(pipeline.vocabulary.encode(sentences))]
        )
    assert len(outputs[0]) == 300
    assert np.mean([a == b for a, b in zip(*outputs, strict=True)]) >= wanted


@pytest.mark.parametrize(
    "names",
    [
        "zh-CN zh_Hans zho_Hant cmn",
        "ar arb_Arab ar_AR",
        "no nb nob_Latn",
        "iw he heb_Hebr",
        "sw swh_Latn",
        "pt-BR por_Latn",
    ],
)
def test_a_language_has_one_code_whatever_its_name(names):
    assert len({language_code(name) for name in names.split()}) == 1
