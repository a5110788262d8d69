"""The benchmark of translation: models in CTranslate2's format, the engines it opens, what it reports and renders."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers.tiers import one_in

import zoo
from pipelines.analysis import markdown
from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.models.folder import open_folder
from scripts.peers import harness
from scripts.peers.translation import models, translation
from scripts.peers.translation import rewrites as steps
from scripts.peers.translation import systems as engines
from zoo.translation import report_sections
from zoo.translation.data.parallel_text import Vocabulary
from zoo.translation.data.tokens import END, PAD, POSITIONS, START
from zoo.translation.search.beam_search import Hypothesis
from zoo.translation.search.config import limit

PEERS = Path(harness.__file__).parent
PIECES = 40


@pytest.fixture(autouse=True)
def gradients():
    """The engines turn them off, in processes of their own otherwise."""
    with pytest.importorskip("torch", reason="needs the train extra").set_grad_enabled(True):
        yield


@pytest.fixture(scope="module")
def torch():
    library = pytest.importorskip("torch", reason="needs the train extra")
    library.set_num_threads(1)
    return library


@pytest.fixture(scope="module")
def exporter() -> ModuleType:
    pytest.importorskip("ctranslate2", reason="needs the peers extra")
    from scripts.peers.translation import ctranslate2_export

    return ctranslate2_export


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(models.made_up(PIECES))


def sharpened(torch, pre_norm: bool, ends: float):
    """Random weights with peaked distributions, which leave no ties; the greater `ends`, the sooner a sentence ends."""
    from zoo.translation.models.config import ModelConfig
    from zoo.translation.models.transformer import Transformer

    torch.manual_seed(0)
    network = Transformer(ModelConfig(2, 1, 32, 64, 4), PIECES, pre_norm=pre_norm, dropout=0.0).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        network.embedding.weight.mul_(1.5)
        last = network.decoder_norm if pre_norm else network.decoder[-1].around_feed.norm
        last.bias.add_(ends * network.embedding.weight[END])
    return network


@pytest.fixture(scope="module")
def folder(torch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of random weights."""
    from zoo.translation.models.config import ModelConfig
    from zoo.translation.models.transformer import ARCHITECTURES

    ARCHITECTURES["little"] = ModelConfig(2, 1, 32, 64, 4)
    path = tmp_path_factory.mktemp("peers") / "model"
    models.untrained("little", PIECES, path)
    return path


# --------------------------------------------------------------------------------------------------------- CTranslate2


def searched(folder: Path, names: list[str], sentences, penalty: float = 1.0) -> list[list[Hypothesis]]:
    """What CTranslate2 makes of tokenized sentences in fp32, with the limits of this project's search; beam 4."""
    import ctranslate2

    translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    token = {name: index for index, name in enumerate(names)}
    options = {"beam_size": 4, "num_hypotheses": 4, "length_penalty": penalty, "return_scores": True}
    options |= {"max_input_length": 0, "min_decoding_length": 0}
    results = []
    for sentence in sentences:
        limits = {"max_decoding_length": limit(len(sentence), POSITIONS)}
        (result,) = translator.translate_batch([[names[piece] for piece in sentence[:-1]]], **options, **limits)
        pairs = zip(result.hypotheses, result.scores, strict=True)
        results.append([Hypothesis([token[piece] for piece in pieces], score) for pieces, score in pairs])
    return results


def require_equal(ours, theirs, same: float, lists: float = 0.0) -> None:
    """At least such shares of best translations and of lists are equal, and all scores of equal ones."""
    pairs = list(zip(ours, theirs, strict=True))
    assert np.mean([a[0].tokens == b[0].tokens for a, b in pairs]) >= same
    assert np.mean([[x.tokens for x in a] == [x.tokens for x in b] for a, b in pairs]) >= lists
    equal = [(x, y) for a, b in pairs for x, y in zip(a, b, strict=False) if x.tokens == y.tokens]
    assert equal and max(abs(x.score - y.score) for x, y in equal) < 1e-3


@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_ctranslate2_finds_what_this_search_finds(torch, exporter, vocabulary, pre_norm, penalty, tmp_path) -> None:
    from zoo.translation.models.decoding import translate

    network = sharpened(torch, pre_norm, 3.0 if pre_norm else 1.5)
    sentences = [sentence[-2 - i % 5 :] for i, sentence in enumerate(models.drawn(PIECES, 40))]
    ours = translate(network, sentences, beam=4, best=4, length_penalty=penalty)
    lengths = [len(ranked[0].tokens) for ranked in ours]
    ended = [length < limit(len(sentence), POSITIONS) for sentence, length in zip(sentences, lengths, strict=True)]
    assert sum(ended) > 5, "too few translations end before their limit to say anything of the end"
    exporter.export(network, vocabulary, tmp_path / "made")
    require_equal(ours, searched(tmp_path / "made", vocabulary.pieces, sentences, penalty), 1.0, 0.95)


@pytest.mark.data
@pytest.mark.slow
def test_ctranslate2_translates_the_test_set_as_the_shipped_model(
    torch, exporter, shared, tmp_path, monkeypatch
) -> None:
    from zoo.translation.models.checkpoints import load_model
    from zoo.translation.models.decoding import translate
    from zoo.translation.models.transformer import Transformer

    monkeypatch.setattr(harness, "SHARED", shared)
    network, pieces = load_model(zoo.load("multi30k-en-de").path, Transformer)
    sentences = pieces.encode(translation.test_set(1000)[0])
    exporter.export(network, pieces, tmp_path / "made")
    parts = (sentences[start : start + 32] for start in range(0, len(sentences), 32))
    ours = [result for part in parts for result in translate(network, part, beam=4, best=4)]
    require_equal(ours, searched(tmp_path / "made", pieces.pieces, sentences), 0.99)


def test_int8_weights_take_a_quarter(torch, exporter, vocabulary, tmp_path) -> None:
    network = sharpened(torch, True, 0.0)
    for precision in ("float32", "int8"):
        exporter.export(network, vocabulary, tmp_path / precision, precision)
    whole, small = ((tmp_path / name / "model.bin").stat().st_size for name in ("float32", "int8"))
    positions = 2 * network.positions.numel() * 4
    assert small < 0.6 * whole or small - positions < 0.5 * (whole - positions)


# ------------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize(
    "name", ["zoo-native", "zoo-shortlist", "zoo-int8", "zoo-fp32", "torch-fp32", "torch-naive", "ctranslate2-fp32"]
)
@pytest.mark.parametrize("beam", one_in(2, [1, 3]))
def test_all_engines_take_exactly_so_many_steps(torch, folder, name, beam, monkeypatch) -> None:
    if name.startswith("ctranslate2"):
        pytest.importorskip("ctranslate2", reason="needs the peers extra")
    if name in ("zoo-native", "zoo-shortlist") and not extension.isas():
        pytest.skip("needs the native kernels")
    monkeypatch.setitem(models.RANDOM, "little", ("one", PIECES))
    from zoo.translation import translator
    from zoo.translation.search import config, loop_graph

    changed = [
        (config, "limit"),
        (translator, "END"),
        (translator, "LENGTH_LIMIT"),
        (loop_graph, "search"),
        (loop_graph, "GRAPH_VERSION"),
    ]
    for module, attribute in changed:  # what `force_steps` changes comes back
        monkeypatch.setattr(module, attribute, getattr(module, attribute))
    work = models.Work(folder)
    engines.make(name, work)
    opened = engines.PEERS[name].open(work, engines.Case("little", "steps", 4, beam, 7))
    sentences = models.drawn(PIECES, 4)
    assert [len(tokens) for tokens in opened.tokens(opened.search(opened.prepare(sentences)))] == [7] * 4


def test_drawn_sentences_end_and_fit_into_one_batch() -> None:
    sentences = models.drawn(PIECES, 300)
    assert {len(sentence) for sentence in sentences} == set(range(models.LENGTHS[0], models.LENGTHS[1] + 1))
    assert all(
        sentence[-1] == END and (sentence[:-1] > END).all() and (sentence < PIECES).all() for sentence in sentences
    )
    assert models.LENGTHS[1] <= engines.AVERAGE


def test_a_drawn_shortlist_has_the_end_and_so_many_words() -> None:
    pieces, (first, extra) = 8000, models.LISTED
    shortlists = [models.listed(pieces).allowed(sentence.tolist()) for sentence in models.drawn(pieces, 20)]
    assert all(END in one and first < len(one) <= first + models.LENGTHS[1] * (extra + 1) + 7 for one in shortlists)
    assert len({len(one) for one in shortlists}) > 10


def test_a_made_up_vocabulary_has_its_size_and_special_tokens(vocabulary: Vocabulary) -> None:
    assert len(vocabulary) == PIECES
    assert len(set(vocabulary.pieces)) == PIECES
    assert [vocabulary.pieces[token] for token in (PAD, START, END)] == ["<pad>", "<s>", "</s>"]


def test_ctranslate2_is_told_of_avx512_on_amd_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = {"name": "AMD EPYC", "flags": ["avx2", "avx512f"]}
    monkeypatch.setattr(engines.machine, "cpu", lambda: cpu)
    assert engines.isa() == {"CT2_FORCE_CPU_ISA": "AVX512"}
    for changed in ({"name": "Intel Xeon"}, {"flags": ["avx2"]}):
        monkeypatch.setattr(engines.machine, "cpu", lambda changed=changed: cpu | changed)
        assert engines.isa() == {}


# -------------------------------------------------------------------------------------------------------------- report


def turn(whole: float, tokens: int = 120, texts: tuple[str, ...] = ()):
    return {"whole": whole, "search": whole / 2, "clock": 2 * whole, "tokens": tokens, "texts": list(texts)}


def test_a_summary_tells_rates_steps_and_quality() -> None:
    case = engines.Case("little", "steps", 2, 1, 30)
    summary = translation.summary(case, [turn(1.0), turn(2.0), turn(4.0)], 4, [])
    assert summary["sentences_per_second"] == {"median": 2.0, "spread": [1.0, 4.0]}
    assert summary["tokens_per_second"]["median"] == 60.0
    assert summary["ms_a_step"]["median"] == round(1e3 * 2 / 2 / 30, 4)
    assert summary["core_share"] == 0.5
    texts = ("Ein Mann geht heute nach Hause .",)
    summary = translation.summary(engines.Case("little", "text", 2, 1), [turn(1.0, texts=texts)], 1, texts)
    assert (summary["bleu"], summary["chrf"]) == (100.0, 100.0)
    assert summary["search_per_second"]["median"] == 2.0


def test_ratios_pair_the_turns_of_a_round() -> None:
    turns = {
        "zoo-int8": [turn(1.0), turn(2.0), turn(4.0)],
        "peer": [turn(3.0), turn(4.0), turn(40.0)],
        "zoo-fp32": [turn(3.0)] * 3,
    }
    assert translation.ratios(turns) == {"zoo-int8": {"peer": 3.0}, "zoo-fp32": {"peer": 1.333}}


def test_random_weights_have_no_text_to_translate() -> None:
    cases = list(translation.cases(["small", "mine"], ["steps", "text"], [1, 32], [1, 4], 30))
    assert [tuple(case) for case in cases] == [
        *(("small", "steps", size, beam, 30) for size in (1, 32) for beam in (1, 4)),
        *(("mine", "steps", size, beam, 30) for size in (1, 32) for beam in (1, 4)),
        ("mine", "text", 32, 4, 0),
    ]


def test_every_turn_of_all_engines_has_whole_batches(folder: Path) -> None:
    batches = translation.inputs_of(engines.Case("small", "steps", 32, 4, 30), models.Work(folder), [])
    assert [len(batch) for batch in batches] == [32] * (translation.POOL // 32)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuchmodel"],
        ["--peers", "nosuchpeer"],
        ["--peers", ""],
        ["--tasks", "songs"],
        ["--batch-size", "0"],
        ["--beam", "many"],
        ["--rounds", "0"],
        ["small", "--tasks", "text"],
        ["wide-deep-criteo", "--peers", "torch-fp32"],
        ["--nosuchoption"],
    ],
    ids=" ".join,
)
def test_what_is_wrong_with_a_request_is_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(harness, "SHARED", tmp_path)  # so that the test set of a trained model is missing
    with pytest.raises(SystemExit) as ended:
        harness.run("translation", translation, arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


def test_a_report_is_on_disk_after_every_case(tmp_path: Path) -> None:
    def measure(name: str) -> str:
        if name == "c":
            raise RequestError("no more")
        return name.upper()

    with pytest.raises(RequestError, match="no more"):
        harness.gather("cases", ["a", "b", "c"], measure, str(tmp_path / "report.json"), {"cpu": "some"})
    assert json.loads((tmp_path / "report.json").read_text()) == {"cases": ["A", "B"], "environment": {"cpu": "some"}}


@pytest.mark.slow
def test_engines_in_processes_of_their_own_make_a_report(torch, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2", reason="needs the peers extra")
    expected = ["zoo-fp32", "ctranslate2-int8"]
    options = [
        "--tasks",
        "steps",
        "--batch-size",
        "2",
        "--beam",
        "2",
        "--steps",
        "3",
        "--rounds",
        "2",
        "-o",
        tmp_path / "report.json",
    ]
    done = subprocess.run(
        [sys.executable, PEERS, "translation", "small", "--peers", ",".join(expected), *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert [result["engine"] for result in case["results"]] == expected
    assert case["left_out"] == {}
    assert list(case["ratios"]) == ["zoo-fp32"]
    for row in case["results"]:
        assert row["tokens_per_second"]["median"] == pytest.approx(3 * row["sentences_per_second"]["median"], rel=0.01)
        assert 20 < row["memory_mb"]["peak"] < 4000


# ---------------------------------------------------------------------------------------------- rewrites


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_all_forms_without_a_rewrite_translate_alike(
    folder: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a row times must compute the same, or it says nothing of the rewrite."""
    outputs: list[tuple[str, list[list[int]]]] = []

    class Forms(steps.Forms):
        def search(self, session):
            """As `timed` gives it, but keeps the translations."""
            batch = {"source": self.drawn([5, 9, 3]), "beam": [2], "best": [1], "growth": [0, 6]}
            ran = session.run(
                {
                    **{name: np.array(numbers) for name, numbers in batch.items()},
                    "length_penalty": np.ones(1, np.float32),
                }
            )
            outputs.append((str(len(outputs)), ran["tokens"].tolist()))
            return super().search(session)

    names = [row.name for row in steps.rows(Forms(open_folder(folder, zoo.entry), precision))]
    assert len(names) == len(set(names)) == 14
    assert len(outputs) == 8
    expected = np.array(outputs[0][1])
    for which, tokens in outputs[1:]:
        assert np.mean(np.array(tokens) == expected) > (0.99 if precision == "fp32" else 0.6), (
            which
        )  # int8: ranges anew, biases rounded


def test_a_report_of_rewrites_has_a_row_for_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = steps.Row("one", lambda count, beam: 1.0, lambda count, beam: 2.0)
    batch = steps.Row("other", lambda count, beam: 3.0 * count, lambda count, beam: 1.5, False)
    monkeypatch.setattr(steps, "rows", lambda forms: iter([row, batch]))
    rows = steps.compare(None, [(1, 4), (32, 4)], 3, lambda done: None)
    assert rows[0]["cases"][0] == {"batch_size": 1, "beam": 4, "on": 1.0, "off": 2.0, "times": 2.0}
    assert [case["batch_size"] for case in rows[1]["cases"]] == [32]
    assert rows[1]["cases"][0] == {"batch_size": 32, "beam": 4, "on": 96.0, "off": 1.5, "times": 0.016}
    lines = harness.table({"models": [{"model": "m", "precision": "int8", "rows": rows}]}).splitlines()
    assert lines[0] == "model m, precision int8" and "rewrite other" in lines
    assert lines[-1].split() == ["32", "4", "96", "1.5", "0.016"]


# ----------------------------------------------------------------------------------------------------------- pages


def test_rewrites_are_a_table_of_the_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [{"batch_size": size, "beam": 4, "on": 1.0, "off": 2.5, "times": 2.5} for size in (1, 32)]
    rows = [{"rewrite": "a", "cases": cases}, {"rewrite": "b", "cases": cases[1:]}]
    place = {"cpu": "some CPU", "cpu_model": "1/2", "isa": ["avx2"], "threads": 1, "commit": "abc"}
    place |= {"versions": {"onnxruntime": "1", "openvino": "2", "python": "3"}}
    report = {"models": [{"model": "small", "precision": "int8", "rows": rows}], "environment": place}
    (tmp_path / "steps-some-cpu.json").write_text(json.dumps(report))
    monkeypatch.setattr(markdown, "PEERS", tmp_path)
    page = re.sub(" +", " ", report_sections.benchmarks([]))
    assert "| small, int8 | batch 1, beam 4 | batch 32, beam 4 |" in page
    assert "| b | | 1.000 / 2.500 (2.50x) |" in page


def test_a_report_is_a_section_of_the_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "PEERS", tmp_path)
    assert report_sections.benchmarks([]) == ""
    steps, text = engines.Case("small", "steps", 2, 1, 30), engines.Case("mine", "text", 2, 4)
    said = ("Ein Mann geht heute nach Hause .",)
    cases = []
    for case in (steps, text):
        turns = {
            name: [turn(seconds, texts=said)]
            for name, seconds in (("zoo-native", 0.5), ("zoo-int8", 1), ("ctranslate2-int8", 2.5))
        }
        memory = {"peak": 99.4, "shares": 50.2}
        results = [
            {"engine": name, **translation.summary(case, runs, 4, said), "memory_mb": memory}
            for name, runs in turns.items()
        ]
        cases.append(
            {**case._asdict(), "sentences": 4, "results": results, "ratios": translation.ratios(turns), "left_out": {}}
        )
    place = {"cpu": "some CPU", "cpu_model": "1/2", "isa": ["avx2"], "threads": 1, "commit": "abc"}
    place |= {"versions": {"onnxruntime": "1", "openvino": "2", "python": "3"}, "peers": {"ctranslate2": "4.8.5"}}
    place |= {
        "ctranslate2": {"CT2_FORCE_CPU_ISA": "AVX512"},
        "test_set": "some sentences",
        "signatures": {"bleu": "sig"},
    }
    (tmp_path / "translation-some-cpu.json").write_text(json.dumps({"cases": cases, "environment": place}))
    page = re.sub(" +", " ", report_sections.benchmarks([]))
    assert page.startswith("# Translation\n\n## Engines\n")
    assert "| small | 2 | 1 | ctranslate2-int8 | 1.6 | 48 | 99 (50) | 41.667 | 5.00x | 2.50x |" in page
    assert "| mine | 2 | 4 | zoo-int8 | 4.0 | 120 | 99 (50) | 100.00 | 100.00 | 8.0 | | |" in page
    assert "CT2_FORCE_CPU_ISA=AVX512" in page
    widths = [{line.count("|") for line in part.splitlines() if line.startswith("|")} for part in page.split("\n\n")]
    assert all(len(counts) <= 1 for counts in widths), "a row has not as many cells as its table has columns"
