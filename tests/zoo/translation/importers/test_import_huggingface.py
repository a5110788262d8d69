"""Folders of transformers, imported: their tokens and scores are those of `generate`; wrong folders are refused."""

import json
import os
import pickle
import re
import shutil
import sys
import warnings

import numpy as np
import pytest

import zoo
from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.models import stages
from zoo import api
from zoo.cli import app as cli
from zoo.translation.data.line_splitting import LineSplitter
from zoo.translation.importers.imported import Renumbering
from zoo.translation.search.config import Demands, SearchConfig
from zoo.translation.search.controls.score_rules import apply_rules

torch = pytest.importorskip("torch", reason="importing needs the train extra")
transformers = pytest.importorskip("transformers", reason="the originals are its models")

from helpers import huggingface_folders as folders  # noqa: E402
from helpers.tiers import one_in  # noqa: E402

LANGUAGES = {
    "m2m": ("en", "de"),
    "nllb": ("eng_Latn", "deu_Latn"),
    "nllb legacy": ("eng_Latn", "fra_Latn"),
    "mbart50": ("en_XX", "de_DE"),
    "marian languages": ("", "de"),
    "madlad": ("", "de"),
}
FEW, MANY = 40, 500
ROUNDED = 12  # draws of weights rounded otherwise


class Original:
    """A folder's model and tokenizer, and the zoo's folder that was imported from it."""

    def __init__(self, kind, folder, **options):
        if kind == "fsmt":
            pytest.importorskip("sacremoses", reason="FSMT's words are those of Moses")
        self.kind, self.path = kind, folder / "original"
        self.model, self.tokenizer = folders.make(kind, self.path, **options)
        self.source, self.target = LANGUAGES.get(kind, ("", ""))
        self.imported = folder / "imported"
        self.report = zoo.import_model(self.path, self.imported, target_language=self.target)
        unknown = self.tokenizer.unk_token_id
        rows = self.model.get_input_embeddings().weight.shape[0]
        targets = self.model.get_output_embeddings().weight.shape[0]
        self.sources = Renumbering(rows, unknown, self.model.config.eos_token_id)
        self.targets = Renumbering(targets, unknown, self.model.config.eos_token_id)

    def begun(self, texts):
        """The texts with the language that a Marian model, or MADLAD-400, reads there."""
        if self.kind == "madlad":
            return [f"<2{self.target}> {text}" for text in texts]
        return [f">>{self.target}<< {text}" for text in texts] if self.kind == "marian languages" else texts

    def generate(self, texts, **options):
        """(tokens of every translation in the zoo's numbers, its scores, its text)."""
        if self.source:
            options["forced_bos_token_id"] = self.tokenizer.convert_tokens_to_ids(
                f"__{self.target}__" if self.kind == "m2m" else self.target
            )
        tokens, scores, decoded = [], [], []
        for begin in range(0, len(texts), 50):
            batch = self.tokenizer(self.begun(texts[begin : begin + 50]), return_tensors="pt", padding=True)
            with torch.inference_mode():
                output = self.model.generate(**batch, **options, return_dict_in_generate=True, output_scores=True)
            scores += output.sequences_scores.tolist() if options["num_beams"] > 1 else []
            decoded += self.tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
            end, pad = self.model.config.eos_token_id, self.model.config.pad_token_id
            for row in output.sequences[:, 1:].tolist():
                row = row[: row.index(end)] if end in row else [token for token in row if token != pad]
                tokens.append(self.targets.ours[row].tolist())
        return tokens, scores, decoded

    def exact_score(self, text, **options):
        """The score of a text's translation in float64."""
        self.model.double()
        (score,) = self.generate([text], **options)[1]
        self.model.float()
        return score

    def undecided(self, text, found, beam, score):
        """Whether float32 cannot tell a translation from the original's: it is the one that transformers finds in
        float64, or with weights that differ by roundings to float32, or has the same score.
        """
        if score is not None and abs(found.score - score) < 1e-5:
            return True
        self.model.double()
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        random = torch.Generator().manual_seed(0)
        others = []
        for rounding in (0.0, *ROUNDED * (torch.finfo(torch.float32).eps,)):
            noise = {name: 1 + rounding * torch.randn(value.shape, generator=random) for name, value in weights.items()}
            self.model.load_state_dict({name: value * noise[name] for name, value in weights.items()})
            others += self.generate([text], num_beams=beam)[0]
        self.model.load_state_dict(weights)
        self.model.float()
        return found.tokens in others


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Original of a kind, made once."""
    made = {}

    def original(kind, **options):
        key = (kind, *sorted(options.items()))
        if key not in made:
            made[key] = Original(kind, tmp_path_factory.mktemp("huggingface"), **options)
        return made[key]

    return original


CLOSE = {"atol": 1e-4, "rtol": 5e-5}  # logits are tens: a sum of their logarithms in float32 has an error of its own


def close(found, wanted):
    """Asserts that scores are equal up to the rounding of float32."""
    np.testing.assert_allclose(found, wanted, **CLOSE)


def compare(original, count, beams, **options):
    texts = folders.sentences(count, 1)
    pipeline = zoo.pipeline(original.imported, "fp32")
    tokens = pipeline.vocabulary.encode(texts)
    theirs = [original.sources.ours[ids].tolist() for ids in original.tokenizer(original.begun(texts)).input_ids]
    assert [ids.tolist() for ids in tokens] == theirs
    for beam in beams:
        wanted, scores, decoded = original.generate(texts, num_beams=beam, **options)
        pipeline.beam = beam
        best = [hypotheses[0] for hypotheses in pipeline.translate(tokens)]
        other = [i for i, hypothesis in enumerate(best) if hypothesis.tokens != wanted[i]]
        assert len(other) <= count // 250, other
        for i in other:
            assert original.undecided(texts[i], best[i], beam, scores[i] if scores else None), i
        assert len({tuple(ids) for ids in wanted}) > FEW / 4  # they differ, and so do their lengths
        if beam == 1:
            assert len({len(ids) for ids in wanted}) > 1
        else:
            far = [i for i in range(count) if i not in other and not np.isclose(best[i].score, scores[i], **CLOSE)]
            assert len(far) <= count // 100, far
            for i in far:  # sharpened weights magnify some roundings
                exact = original.exact_score(texts[i], num_beams=beam, **options)
                assert abs(best[i].score - exact) < max(CLOSE["atol"], 2 * abs(scores[i] - exact)), i
        if original.kind in ("m2m", "marian languages"):
            continue  # transformers writes the languages into the text there, where a random model has chosen one
        assert [result["translation"] for result in pipeline(texts[:5])] == [
            text.strip().removesuffix("@@")
            for text in decoded[:5]  # of a word that goes on
        ]


SLOW = (*folders.NEAR, "mbart50")


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in folders.KINDS]
)
def test_tokens_and_scores_are_those_of_generate(originals, kind):
    compare(originals(kind), FEW, (1, 4))


FAST = ("marian separate", "nllb", "bart", "t5")  # of exports; the others are near


@pytest.mark.parametrize(
    "kind", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in folders.KINDS]
)
def test_an_exported_folder_gives_the_tokens_of_the_original(originals, kind, tmp_path):
    original = originals(kind)
    report = api.export(original.imported, "huggingface", tmp_path / "exported")
    assert "model.safetensors" in report["files"]
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    texts = original.begun(folders.sentences(6, 2))
    batch = original.tokenizer(texts, return_tensors="pt", padding=True)
    assert all(
        torch.equal(tensor, batch[key]) for key, tensor in tokenizer(texts, return_tensors="pt", padding=True).items()
    )
    options = {}
    if original.source:  # which the exported folder has in its generation_config.json
        name = f"__{original.target}__" if kind == "m2m" else original.target
        options["forced_bos_token_id"] = original.tokenizer.convert_tokens_to_ids(name)
    for beam in (1, 4):
        with torch.inference_mode():
            wanted = original.model.generate(**batch, num_beams=beam, **options)
            assert torch.equal(model.generate(**batch, num_beams=beam), wanted)


TEXTS = (
    "The man's dog (a big one), isn't it? No!",
    "two\nlines.\n\nAnd 'quotes'\n more  blanks\tand tabs",
    "ÄRGER Straße 漢字 e\u0301 🙂 x.y,z ... '' “a” – b—c 1.000,5 %",
    "<b>a & b</b> well-known http://x.y/z a@b.c\u00ad\u200b。 ３",
    "a",
)


@pytest.mark.parametrize("kind", ["blenderbot small", "fsmt"])
def test_texts_are_split_into_words_like_the_tokenizer(originals, kind):
    original = originals(kind)
    vocabulary = zoo.pipeline(original.imported, "fp32").vocabulary
    wanted = [original.sources.ours[ids].tolist() for ids in original.tokenizer([*TEXTS]).input_ids]
    assert [ids.tolist() for ids in vocabulary.encode(TEXTS)] == wanted
    for text, tokens in zip(TEXTS, vocabulary.encode_target([text.replace("\n", " ") for text in TEXTS]), strict=True):
        theirs = original.tokenizer.decode(rows_of(original, tokens.tolist()), skip_special_tokens=True)
        assert vocabulary.decode([tokens.tolist()]) == [theirs.strip().removesuffix("@@")], text


def test_tokens_of_fsmt_are_translated_without_the_words_of_moses(originals, monkeypatch, tmp_path):
    original = originals("fsmt")
    pipeline = zoo.pipeline(original.imported, "fp32")
    texts = folders.sentences(3, 1)
    tokens = pipeline.vocabulary.encode(texts)
    wanted = pipeline.translate(tokens)
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    other = zoo.pipeline(original.imported, "fp32")
    assert other.translate(tokens) == wanted
    with pytest.raises(RequestError, match=r"text of a model with Moses' words needs sacremoses.*int8-zoo\[moses\]"):
        other(texts)
    with pytest.raises(RequestError, match=r"its text needs sacremoses.*int8-zoo\[moses\]"):
        zoo.import_model(original.path, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("activation", "engine"),
    [
        ("relu", "native"),
        pytest.param("gelu", "native", marks=pytest.mark.slow),
        pytest.param("gelu_new", "native", marks=pytest.mark.slow),
        pytest.param("gelu_pytorch_tanh", "native", marks=pytest.mark.slow),  # as gelu_new
        pytest.param("quick_gelu", "native", marks=pytest.mark.slow),
        pytest.param("silu", "native", marks=pytest.mark.slow),  # as swish of "marian"
        ("tanh", "onnxruntime"),
    ],
)
def test_activations_are_those_of_transformers(originals, activation, engine, tmp_path):
    original = originals("marian", activation_function=activation)
    compare(original, FEW, (4,))
    (tmp_path / "in.txt").write_text("\n".join(folders.sentences(FEW, 1)))
    zoo.calibrate(original.imported, tmp_path / "in.txt", samples=16)
    if extension.isas():
        assert zoo.pipeline(original.imported, "int8").engine == engine
    if activation == "quick_gelu":  # whose factor the imported weights have
        api.export(original.imported, "huggingface", tmp_path / "exported")
        exported = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported").state_dict()
        for name, tensor in original.model.state_dict().items():
            torch.testing.assert_close(exported[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["marian", "t5"])
def test_scores_of_tokens_and_attention_are_those_of_transformers(originals, kind):
    original = originals(kind)
    pipeline = zoo.pipeline(original.imported, "fp32")
    text = folders.sentences(1, 7)[0]
    batch = original.tokenizer([text], return_tensors="pt")
    with torch.inference_mode():
        made = original.model.generate(
            **batch, num_beams=4, do_sample=False, return_dict_in_generate=True, output_scores=True
        )
        transitions = original.model.compute_transition_scores(made.sequences, made.scores, made.beam_indices)
        implementation = original.model.config._attn_implementation
        original.model.set_attn_implementation("eager")
        read = original.model(**batch, decoder_input_ids=made.sequences[:, :-1], output_attentions=True)
        original.model.set_attn_implementation(implementation)
    tokens = original.targets.ours[made.sequences[0, 1:].tolist()].tolist()
    sources = pipeline.vocabulary.encode([text])
    (scores,) = pipeline.token_scores(sources, [tokens])
    close(scores[:-1], transitions[0].numpy()[: len(scores) - 1])  # the end may be forced
    (attention,) = pipeline.forced.attention(sources, [tokens])
    layer = max(len(read.cross_attentions) - 2, 0)
    np.testing.assert_allclose(attention, read.cross_attentions[layer][0].mean(0), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", folders.KINDS)
def test_tokens_and_scores_of_many_sentences(originals, kind):
    compare(originals(kind), MANY, (1, 4))


@pytest.mark.parametrize(
    "options",
    one_in(
        2,
        [
            {"early_stopping": True},
            {"early_stopping": "never", "length_penalty": 2.0},
            {"early_stopping": "never", "length_penalty": -0.5},
            {"length_penalty": 0.0},
            {"no_repeat_ngram_size": 2, "num_beams": 3},
            {"min_length": 12, "max_new_tokens": 14, "max_length": 28},
            {"forced_eos_token_id": None, "max_length": 9},
            {"suppress_tokens": [7, 8, 9], "bad_words_ids": [[2], [11], [0]], "temperature": 0.3, "top_k": 4},
            {"renormalize_logits": True, "bad_words_ids": [[2], [11], [12]], "remove_invalid_values": True},
            {"renormalize_logits": True, "min_length": 9, "no_repeat_ngram_size": 3, "forced_eos_token_id": 0},
        ],
    ),
    ids=str,
)
def test_what_generation_config_says_is_followed(originals, options, tmp_path):
    original = originals("marian")
    shutil.copytree(original.path, tmp_path / "original")
    said = {**json.loads((original.path / "generation_config.json").read_text()), **options}
    (tmp_path / "original" / "generation_config.json").write_text(json.dumps(said))
    zoo.import_model(tmp_path / "original", tmp_path / "imported")
    pipeline = zoo.pipeline(tmp_path / "imported", "fp32")
    assert pipeline.beam == said["num_beams"]
    texts = folders.sentences(FEW, 1)
    options = {name: option for name, option in options.items() if name not in ("temperature", "top_k")}
    wanted, scores, _ = original.generate(texts, **{"num_beams": 4, **options})
    best = [hypotheses[0] for hypotheses in pipeline.translate(pipeline.vocabulary.encode(texts))]
    assert [hypothesis.tokens for hypothesis in best] == wanted
    close([hypothesis.score for hypothesis in best], scores)


def rows_of(original, tokens):
    """The zoo's target tokens in the original's numbers."""
    theirs = {int(ours): token for token, ours in enumerate(original.targets.ours)}
    return [theirs[token] for token in tokens]


@pytest.mark.parametrize(("kind", "beam"), one_in(2, [("marian", 4), ("marian", 1), ("bart", 1), ("bart", 4)]))
def test_rules_of_scores_are_those_of_generate(originals, kind, beam, tmp_path):
    """Penalties, n-grams of the source, phrases and first tokens that must not come; the folder's, and of a run."""
    original, texts = originals(kind), folders.sentences(FEW, 1)
    usual, _, _ = original.generate(texts, num_beams=beam)
    pairs = [ids[i : i + 2] for ids in usual[::2] for i in range(len(ids) - 1)]
    options = {
        "bad_words_ids": [[2] if kind == "marian" else [1], *(rows_of(original, pair) for pair in pairs)],
        "begin_suppress_tokens": rows_of(original, [ids[0] for ids in usual[1::4] if ids]),
        "repetition_penalty": 1.3,
        "encoder_no_repeat_ngram_size": 2,
        "no_repeat_ngram_size": 0,
    }
    shutil.copytree(original.path, tmp_path / "original")
    change("generation_config.json", num_beams=beam, **options)(tmp_path / "original")
    pipeline = generated(original, tmp_path / "original", tmp_path, **options)
    assert [hypotheses[0].tokens for hypotheses in pipeline.translate(pipeline.vocabulary.encode(texts))] != usual
    for run in ({"repetition_penalty": 0.8}, {"repetition_penalty": 1.0, "min_tokens": 8}):
        theirs = {**options, **{name.replace("min_tokens", "min_new_tokens"): option for name, option in run.items()}}
        wanted, scores, _ = original.generate(texts, num_beams=beam, **theirs)
        ours = [
            hypotheses[0] for hypotheses in pipeline.with_options(**run).translate(pipeline.vocabulary.encode(texts))
        ]
        assert [hypothesis.tokens for hypothesis in ours] == wanted
        close([hypothesis.score for hypothesis in ours if scores], scores)


@pytest.mark.parametrize("size", [2, 3])
def test_ngrams_count_the_start_as_in_transformers(size):
    random = np.random.default_rng(0)
    rules = SearchConfig("transformers", no_repeat_ngram=size, counted=(7,))
    processor = transformers.NoRepeatNGramLogitsProcessor(size)
    for _ in range(50):
        tokens = random.integers(6, 9, random.integers(0, 9)).tolist()
        wanted = processor(torch.tensor([[7, *tokens]]), torch.zeros(1, 10)).numpy()
        history = np.array([tokens], np.int64).reshape(1, -1)
        scores = apply_rules(np.zeros((1, 10), np.float32), history, rules, end=3, begins=not tokens)
        np.testing.assert_array_equal(scores, wanted)


def test_folders_that_sample_are_imported(originals, tmp_path):
    shutil.copytree(originals("marian").path, tmp_path / "original")
    change("generation_config.json", do_sample=True, num_beams=1, temperature=0.7, top_p=0.9)(tmp_path / "original")
    zoo.import_model(tmp_path / "original", tmp_path / "imported")
    pipeline, texts = zoo.pipeline(tmp_path / "imported", "fp32"), folders.sentences(5, 1)
    assert (pipeline.rules.temperature, pipeline.rules.top_k, pipeline.rules.top_p) == (0.7, 50, 0.9)
    assert pipeline(texts) == pipeline(texts, seed=0) != pipeline(texts, seed=1)
    greedy = pipeline(texts, beam=1)
    assert greedy == pipeline(texts, top_k=1)


@pytest.mark.parametrize("beam", [1, 4])
def test_prefixes_of_translations_are_decoder_inputs_of_generate(originals, beam):
    original, texts = originals("marian"), folders.sentences(FEW, 1)
    pipeline = zoo.pipeline(original.imported, "fp32").with_options(beam=beam, n_best=beam, repetition_penalty=1.2)
    tokens = pipeline.vocabulary.encode(texts)
    prefixes = [pipeline.target_tokens(text) for text in folders.sentences(FEW, 2)]
    prefixes = [prefix[: i % 3] for i, prefix in enumerate(prefixes)]
    translated = pipeline.translate(tokens, [Demands(prefix) for prefix in prefixes])
    start = original.model.config.decoder_start_token_id
    for count in range(3):  # of one length in a batch
        rows = [i for i, prefix in enumerate(prefixes) if len(prefix) == count]
        inputs = torch.tensor([[start, *rows_of(original, prefixes[i])] for i in rows])
        options = {"num_beams": beam, "num_return_sequences": beam, "repetition_penalty": 1.2}
        wanted, scores, _ = original.generate([texts[i] for i in rows], decoder_input_ids=inputs, **options)
        assert [one.tokens for i in rows for one in translated[i]] == wanted
        close([one.score for i in rows for one in translated[i] if scores], scores)


def test_options_of_a_run_override_generation_config(originals, tmp_path):
    original, texts = originals("marian"), folders.sentences(FEW, 1)
    pipeline = zoo.pipeline(original.imported, "fp32")
    tokens = pipeline.vocabulary.encode(texts)
    before = [hypotheses[0] for hypotheses in pipeline.translate(tokens)]
    for beam, size, penalty in ((3, 2, 0.2), (3, 3, -0.5), (4, 0, 2.0), (1, 2, 1.0)):
        options = {"beam": beam, "no_repeat_ngram": size, "length_penalty": penalty}
        wanted, scores, _ = original.generate(texts, num_beams=beam, no_repeat_ngram_size=size, length_penalty=penalty)
        best = [hypotheses[0] for hypotheses in pipeline.with_options(**options).translate(tokens)]
        assert [hypothesis.tokens for hypothesis in best] == wanted
        close([hypothesis.score for hypothesis in best if scores], scores)
    assert [hypotheses[0] for hypotheses in pipeline.translate(tokens)] == before


def generated(original, folder, tmp_path, **options):
    """Translations of an imported folder are those of generate(), with the options of the folder alone."""
    zoo.import_model(folder, tmp_path / "imported", target_language=original.target)
    pipeline = zoo.pipeline(tmp_path / "imported", "fp32")
    texts = folders.sentences(FEW, 1)
    wanted, _, _ = original.generate(texts, num_beams=pipeline.beam, **options)
    assert [hypotheses[0].tokens for hypotheses in pipeline.translate(pipeline.vocabulary.encode(texts))] == wanted
    return pipeline


def test_without_a_number_of_beams_the_search_is_greedy(originals, tmp_path):
    original = originals("marian")
    shutil.copytree(original.path, tmp_path / "original")
    change("generation_config.json", num_beams=None)(tmp_path / "original")
    assert generated(original, tmp_path / "original", tmp_path).beam == 1


@pytest.mark.parametrize("form", ["first", "later", "saved again"])
def test_configurations_of_opus_mt_of_all_years_are_read(originals, form, tmp_path):
    """As the first converter wrote them, without generation_config.json; with it; and saved by a newer library."""
    original, folder = originals("marian"), tmp_path / "original"
    shutil.copytree(original.path, folder)
    search = {"num_beams": 6, "max_length": 20, "bad_words_ids": [[2]]}
    more = {"extra_pos_embeddings": 300, "static_position_embeddings": True, "normalize_before": False}
    if form == "first":
        gone = dict.fromkeys(("decoder_vocab_size", "share_encoder_decoder_embeddings", "tie_word_embeddings"), "gone")
        change("config.json", **search, **more, **gone, forced_eos_token_id="gone")(folder)
        (folder / "generation_config.json").unlink()
        (folder / "tokenizer_config.json").write_text('{"target_lang": "eng", "source_lang": "zho"}')
    else:
        own = search if form == "later" else {"num_beams": None, "max_length": None}
        change("config.json", **own, **more)(folder)
        tokens = {"bos_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 0, "pad_token_id": 2}
        said = {**search, **tokens, "forced_eos_token_id": 0, "renormalize_logits": form != "later"}
        (folder / "generation_config.json").write_text(json.dumps(said))
    options = {"max_length": 20, "bad_words_ids": [[2]], "no_repeat_ngram_size": 0}
    options |= {"forced_eos_token_id": None if form == "first" else 0, "renormalize_logits": form == "saved again"}
    assert generated(original, folder, tmp_path, **options).beam == 6


def test_positions_of_m2m_depend_on_the_padding(originals, tmp_path):
    pad = 0
    original = originals("m2m", pad_token_id=pad, bos_token_id=1)
    shutil.copytree(original.path, tmp_path / "original")
    change("generation_config.json", bad_words_ids=[[pad]])(tmp_path / "original")  # it has no position of its own
    generated(original, tmp_path / "original", tmp_path, bad_words_ids=[[pad]])


def test_small100_reads_the_target_language_before_the_source(originals, tmp_path):
    original, folder, texts = originals("m2m"), tmp_path / "original", folders.sentences(5, 4)
    shutil.copytree(original.path, folder)
    change("tokenizer_config.json", tokenizer_class="SMALL100Tokenizer")(folder)
    zoo.import_model(folder, tmp_path / "imported", target_language="fr")
    pipeline = zoo.pipeline(tmp_path / "imported", "fp32")
    tokens, start = pipeline.vocabulary.encode(texts), original.tokenizer.convert_tokens_to_ids("__fr__")
    sources = [[start, *ids[1:]] for ids in original.tokenizer(texts).input_ids]  # without the source's language
    assert [ids.tolist() for ids in tokens] == [original.sources.ours[ids].tolist() for ids in sources]
    assert pipeline.vocabulary.prefix == ()


def test_a_mask_beyond_the_table_is_no_fault(tmp_path):
    """As in bart-large-cnn, which has one row less than its tokenizer tokens."""
    model, _ = folders.make("bart", tmp_path / "original")
    fast = json.loads((tmp_path / "original/tokenizer.json").read_text())
    vocabulary = fast["model"]["vocab"]
    vocabulary.pop("<mask>")
    rows = max(vocabulary.values()) + 1
    vocabulary["<mask>"] = rows
    fast["added_tokens"] = [{**token, "id": vocabulary[token["content"]]} for token in fast["added_tokens"]]
    (tmp_path / "original/tokenizer.json").write_text(json.dumps(fast))
    model.resize_token_embeddings(rows)
    model.save_pretrained(tmp_path / "original")
    zoo.import_model(tmp_path / "original", tmp_path / "imported")
    pipeline = zoo.pipeline(tmp_path / "imported", "fp32")
    assert len(pipeline("A <mask> and the man.")) == 1
    vocabulary["the"] = rows + 1
    (tmp_path / "original/tokenizer.json").write_text(json.dumps(fast))
    with pytest.raises(RequestError, match=f"the vocabulary has {rows + 2} tokens, the weights {rows}"):
        zoo.import_model(tmp_path / "original", tmp_path / "other")


def test_the_tokenizer_of_mbart_needs_no_name(originals, tmp_path):
    original = originals("mbart")
    shutil.copytree(original.path, tmp_path / "original")
    (tmp_path / "original/tokenizer_config.json").unlink()
    zoo.import_model(tmp_path / "original", tmp_path / "imported", source_language="en_XX")
    texts = folders.sentences(5)
    assert zoo.pipeline(tmp_path / "imported", "fp32")(texts) == zoo.pipeline(original.imported, "fp32")(texts)


def test_weights_in_a_pickle_and_in_several_files_are_the_same(originals, tmp_path):
    original, texts = originals("bart untied"), folders.sentences(5, 2)
    _, tokenizer = folders.make("bart untied", tmp_path / "bin", bin=True)
    original.model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    results = [zoo.pipeline(original.imported, "fp32")(texts)]
    for name in ("bin", "parts"):
        zoo.import_model(tmp_path / name, tmp_path / f"{name}-imported")
        results.append(zoo.pipeline(tmp_path / f"{name}-imported", "fp32")(texts))
    assert results[0] == results[1] == results[2]


def test_half_precision_is_read(originals, tmp_path):
    original = originals("m2m")
    shutil.copytree(original.path, tmp_path / "half")
    original.model.half().save_pretrained(tmp_path / "half")
    original.model.float()
    zoo.import_model(tmp_path / "half", tmp_path / "out", target_language="de")
    assert len(zoo.pipeline(tmp_path / "out", "fp32")(folders.sentences(3))) == 3


def test_pieces_of_sentencepiece_are_used_where_they_lie_beside_tokenizers(tmp_path):
    """The folders of NLLB on the hub have both."""
    folders.make("nllb", tmp_path / "nllb")
    assert (tmp_path / "nllb" / folders.PIECES).is_file()
    (tmp_path / "plain").mkdir()
    for path in (tmp_path / "nllb").iterdir():
        if path.name != folders.PIECES:
            shutil.copy(path, tmp_path / "plain")
    vocabularies = []
    for name in ("nllb", "plain"):
        zoo.import_model(tmp_path / name, tmp_path / f"{name}-out", target_language="deu_Latn")
        vocabularies.append(zoo.pipeline(tmp_path / f"{name}-out", "fp32").vocabulary)
    assert [vocabulary.framing.kind for vocabulary in vocabularies] == ["sentencepiece", "tokenizers"]
    texts = folders.sentences(50, 3)
    one, other = (vocabulary.encode(texts) for vocabulary in vocabularies)
    assert [ids.tolist() for ids in one] == [ids.tolist() for ids in other]
    assert vocabularies[0].decode(one) == vocabularies[1].decode(other)


def test_the_languages_are_chosen_at_run(originals, tmp_path):
    original, texts = originals("nllb"), folders.sentences(12, 5)
    (tmp_path / "in.txt").write_text("\n".join([*texts[:5], "", *texts[5:]]) + "\n")
    done = {}
    for target in ("deu_Latn", "fra_Latn"):
        out = tmp_path / f"{target}.txt"
        arguments = ["run", str(original.imported), str(tmp_path / "in.txt"), "-o", str(out), "--precision", "fp32"]
        cli.call([*arguments, "--target-language", target, "--source-language", "eng_Latn", "--beam", "2"])
        original.target = target
        _, _, decoded = original.generate(texts, num_beams=2)
        decoded = [text.strip() for text in decoded]
        done[target] = out.read_text().split("\n")
        assert done[target] == [*decoded[:5], "", *decoded[5:], ""]
    original.target = "deu_Latn"
    assert done["deu_Latn"] != done["fra_Latn"]
    with pytest.raises(RequestError, match=r"--target-language.* one of: deu_Latn, eng_Latn, fra_Latn"):
        zoo.run(
            original.imported, tmp_path / "in.txt", tmp_path / "x.txt", precision="fp32", target_language="xxx_Latn"
        )


def test_a_language_in_the_text_of_a_marian_model(originals):
    original, texts = originals("marian languages"), folders.sentences(6, 5)
    pipeline, outputs = zoo.pipeline(original.imported, "fp32"), []
    for target in ("fr", "de"):
        original.target = target
        pipeline.vocabulary = pipeline.vocabulary.choose(target_language=target)
        wanted, _, _ = original.generate(texts, num_beams=4)
        outputs.append([hypotheses[0].tokens for hypotheses in pipeline.translate(pipeline.vocabulary.encode(texts))])
        assert outputs[-1] == wanted
    assert outputs[0] != outputs[1]
    addressed = [f">>fr<< {text}" for text in texts]  # as in transformers, in place of the chosen language
    tokens = pipeline.vocabulary.encode(addressed)
    assert [best[0].tokens for best in pipeline.translate(tokens)] == outputs[0]
    assert [result["translation"] for result in pipeline(addressed)] == pipeline.vocabulary.decode(outputs[0])
    (line,) = [LineSplitter(pipeline.vocabulary, 9, "en").line("line 1", f">>fr<< {'. '.join(texts)}")]
    assert len(line.parts) > 1 and {int(part[0]) for part in line.parts} == {int(tokens[0][0])}


def test_prompts_are_put_before_every_source(originals, tmp_path):
    original, texts = originals("madlad"), folders.sentences(4, 5)
    zoo.import_model(original.path, tmp_path / "imported", prompt="the man: ")
    pipeline = zoo.pipeline(tmp_path / "imported", "fp32")
    forms = {
        "the man: ": pipeline,
        "<2fr> ": pipeline.with_options(target_language="fr"),
        "old: ": pipeline.with_options(target_language="fr").with_options(prompt="old: "),
        "": pipeline.with_options(prompt=""),
    }
    for prompt, changed in forms.items():
        tokens = [
            original.sources.ours[ids].tolist() for ids in original.tokenizer([prompt + x for x in texts]).input_ids
        ]
        assert [ids.tolist() for ids in changed.vocabulary.encode(texts)] == tokens
        assert changed.vocabulary.frame == len(changed.vocabulary.encode([""])[0])
    with pytest.raises(RequestError, match="found --target-language xx; expected one of: de, fr"):
        pipeline.with_options(target_language="xx")
    with pytest.raises(RequestError, match="found --target-language xx; expected one of: de, fr"):
        zoo.import_model(original.path, tmp_path / "other", target_language="xx")


def test_no_language_is_asked_for_where_there_is_one(originals, tmp_path):
    with pytest.raises(RequestError, match="this model has none to choose from"):
        zoo.import_model(originals("marian").path, tmp_path / "x", target_language="de")
    assert not (tmp_path / "x").exists()
    imported = tmp_path / "open"
    zoo.import_model(originals("nllb").path, imported)
    with pytest.raises(
        RequestError,
        match="found no target language; choose it with --target-language of zoo run, .*; one of: deu_Latn",
    ):
        zoo.pipeline(imported, "fp32")("the man")


def test_the_most_tokens_of_a_translation(originals, tmp_path):
    (tmp_path / "in.txt").write_text("\n".join(folders.sentences(4, 5)))
    zoo.run(originals("bart").imported, tmp_path / "in.txt", tmp_path / "out.txt", precision="fp32", max_tokens=12)
    pipeline = zoo.pipeline(originals("bart").imported, "fp32")
    wanted, _, _ = originals("bart").generate(folders.sentences(4, 5), num_beams=4, max_new_tokens=12)
    assert (tmp_path / "out.txt").read_text().splitlines() == pipeline.vocabulary.decode(wanted)


def test_it_is_a_model_folder_like_any_other(originals, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(originals("marian separate").imported, folder)
    info = zoo.info(folder)
    assert info["imported"]["architecture"] == "MarianMTModel"
    assert info["preprocessing"]["form"]["shared_source"] is False
    texts = folders.sentences(40, 5)
    (tmp_path / "text.txt").write_text("\n".join(texts))
    (tmp_path / "pairs.tsv").write_text("".join(f"{text}\t{text}\n" for text in texts))
    zoo.calibrate(folder, str(tmp_path / "text.txt"))
    assert zoo.run(folder, tmp_path / "text.txt", tmp_path / "out.txt")["precision"] == "int8"
    assert zoo.evaluate(folder, str(tmp_path / "pairs.tsv"))["samples"] == 40
    (folder / "source.spm").write_bytes((folder / "target.spm").read_bytes())
    with pytest.raises(RequestError, match="not the file that its card lists"):
        zoo.pipeline(folder, "fp32")


@pytest.mark.slow
def test_a_folder_holds_the_weights_no_more_often_than_running_needs(originals, tmp_path):
    original = originals("marian", d_model=128, encoder_ffn_dim=512, decoder_ffn_dim=512)
    path, texts = tmp_path / "folder", folders.sentences(12, 5)
    shutil.copytree(original.imported, path)
    (tmp_path / "text.txt").write_text("\n".join(texts))
    (tmp_path / "pairs.tsv").write_text("".join(f"{text}\t{text}\n" for text in texts))
    zoo.calibrate(path, str(tmp_path / "text.txt"))
    zoo.run(path, tmp_path / "text.txt", tmp_path / "out.txt")
    zoo.evaluate(path, str(tmp_path / "pairs.tsv"))
    graphs = {file.name for file in path.iterdir() if file.suffix in (".onnx", ".data")}
    assert graphs == {"int8.onnx"}
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size <= 2.1 * (original.path / "model.safetensors").stat().st_size  # 5.5 with all that was made
    folder = zoo.load(path)
    before = {name: files.sha256(path / name) for name in graphs}
    assert set(stages.build(folder).values()) == {"kept"}
    zoo.build(path)
    assert folder.ensure("fp32.onnx").is_file()  # again
    assert files.sha256(path / "fp32.onnx") == folder.record["fp32.onnx"]["sha256"]
    (path / "fp32.onnx").unlink()
    assert zoo.run(path, tmp_path / "text.txt", tmp_path / "out.txt", precision="fp32")["sentences"] == 12
    assert {name: files.sha256(path / name) for name in graphs} == before and not (path / "fp32.onnx").exists()
    assert (path / "rewritten.onnx").is_file()
    zoo.quantize(path, keep_float=("logits",))
    assert not (path / "rewritten.onnx").exists()
    assert stages.build(folder, force=False)["int8.onnx"] == "kept"


def test_a_graph_that_is_made_again_by_another_version_loses_no_calibration(originals, tmp_path):
    path = tmp_path / "folder"
    shutil.copytree(originals("marian").imported, path)
    (tmp_path / "text.txt").write_text("\n".join(folders.sentences(12, 5)))
    zoo.calibrate(path, str(tmp_path / "text.txt"))
    folder = zoo.load(path)
    folder.ensure("int8.onnx")
    record = folder.record
    for stage in ("rewritten.onnx", "calibration.json", "int8.onnx"):  # as if rewritten.onnx had other bytes then
        entry = record[stage] if stage == "rewritten.onnx" else record[stage]["inputs"]
        entry["sha256" if stage == "rewritten.onnx" else "rewritten.onnx"] = "f" * 64
    files.write_json(path / "build.json", record)
    assert set(stages.build(folder).values()) == {"kept"}
    assert folder.ensure("rewritten.onnx").is_file()
    assert folder.record["rewritten.onnx"]["former"] == ["f" * 64]
    assert set(stages.build(folder).values()) == {"kept"}


def test_a_shortlist_is_learned_of_parallel_text(originals, tmp_path):
    folder, texts = originals("marian separate").path, folders.sentences(60, 7)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{a}\t{b}\n" for a, b in zip(texts, texts[::-1], strict=True)))
    zoo.import_model(folder, tmp_path / "listed", shortlist=str(pairs))
    pipeline = zoo.pipeline(tmp_path / "listed", "fp32")
    words = [{*pipeline.shortlist.allowed(ids.tolist()).tolist()} for ids in pipeline.vocabulary.encode(texts)]
    spoken = pipeline.vocabulary.encode_target(texts[::-1])
    missing = [token not in allowed for allowed, tokens in zip(words, spoken, strict=True) for token in tokens.tolist()]
    assert np.mean(missing) < 0.02 and all(len(allowed) < len(pipeline.vocabulary) for allowed in words)
    pipeline.beam = 1
    for shortlist, tokens in zip(words, pipeline.translate(pipeline.vocabulary.encode(texts[:8])), strict=False):
        assert shortlist >= {*tokens[0].tokens}
    pairs.write_text("one\tpair\n")
    with pytest.raises(RequestError, match="1 pairs are too few"):
        zoo.import_model(folder, tmp_path / "none", shortlist=str(pairs))
    assert not (tmp_path / "none").exists()


def test_sentences_of_a_line_are_translated_one_by_one(originals, tmp_path):
    texts = folders.sentences(4, 6)
    (tmp_path / "one.txt").write_text(" ".join(texts[:2]) + "\n\n" + " ".join(texts[2:]) + "\n")
    (tmp_path / "each.txt").write_text("\n".join(texts))
    for name in ("one", "each"):
        out = tmp_path / f"{name}.out.txt"
        zoo.run(originals("bart").imported, tmp_path / f"{name}.txt", out, precision="fp32", sentences=True)
    first, empty, second = (tmp_path / "one.out.txt").read_text().splitlines()
    assert empty == ""
    assert [first, second] == [
        " ".join(pair) for pair in zip(*[iter((tmp_path / "each.out.txt").read_text().splitlines())] * 2, strict=True)
    ]


# -------------------------------------------------------------------------------------------------------- wrong folders


class Code:
    """What runs where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def change(name, **values):
    def apply(folder):
        path = folder / name
        settings = json.loads(path.read_text())
        path.write_text(
            json.dumps({key: setting for key, setting in {**settings, **values}.items() if setting != "gone"})
        )

    return apply


def pickled(content):
    def apply(folder):
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content(folder))

    return apply


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def other_vocabulary(folder):
    vocabulary = json.loads((folder / "vocab.json").read_text())
    del vocabulary[list(vocabulary)[-1]]
    (folder / "vocab.json").write_text(json.dumps(vocabulary))


def dropped(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def zipped_code(folder):
    torch.save({"a": Code(folder.parent / "executed")}, folder / "x")
    content = (folder / "x").read_bytes()
    (folder / "x").unlink()
    return content


FAULTS = {
    "a causal LM": (change("config.json", architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel.*decoder-only"),
    "a Marian decoder": (change("config.json", architectures=["MarianForCausalLM"]), "decoder-only"),
    "buckets": (
        change("config.json", architectures=["T5ForConditionalGeneration"], relative_attention_num_buckets=6),
        "6 buckets up to a distance of 128",
    ),
    "no output layer": (change("config.json", architectures=["BartModel"]), "BartModel.*it has no output layer"),
    "no architecture": (change("config.json", architectures=[]), "the model type marian"),
    "broken JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
    "no object": (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no object"),
    "no tokenizer": (dropped("source.spm", "target.spm", "vocab.json"), "found no vocabulary"),
    "no source.spm": (dropped("source.spm"), "cannot read source.spm"),
    "empty source.spm": (lambda folder: (folder / "source.spm").write_bytes(b""), "source.spm is empty"),
    "damaged source.spm": (lambda folder: (folder / "source.spm").write_bytes(b"no"), "source.spm is no vocabulary"),
    "another vocabulary": (other_vocabulary, r"the vocabulary has \d+ tokens, the weights \d+"),
    "truncated safetensors": (truncate, "model.safetensors is damaged"),
    "no weights": (dropped("model.safetensors"), "found no weights"),
    "a pickle with code": (pickled(lambda folder: pickle.dumps(Code(folder.parent / "executed"))), "holds code"),
    "an archive with code": (pickled(zipped_code), "holds code"),
    "no tensors": (pickled(lambda folder: b"hello"), "pytorch_model.bin is damaged"),
    "more layers": (change("config.json", encoder_layers=1), "found model.encoder.layers.1"),
    "fewer layers": (
        change("config.json", encoder_layers=3),
        "model.encoder.layers.2.self_attn.q_proj.weight is missing",
    ),
    "another width": (change("config.json", d_model=64), "expected [?] x 64"),
    "many layers": (change("config.json", encoder_layers=1 << 40), "encoder_layers"),
    "heads": (change("config.json", encoder_attention_heads=5), "which 5 heads cannot share"),
    "an activation": (change("config.json", activation_function="mish"), "the activation mish"),
    "another end": (change("generation_config.json", eos_token_id=9), "eos_token_id is 9"),
    "two ends": (change("generation_config.json", eos_token_id=[0, 9]), "expected one token"),
    "no start": (
        lambda folder: [
            change(n, decoder_start_token_id=None)(folder) for n in ("config.json", "generation_config.json")
        ],
        "found no decoder_start_token_id",
    ),
    "beams": (change("generation_config.json", num_beams=257), "num_beams is 257, expected 1 to 256"),
    "sampling": (change("generation_config.json", do_sample=True), "do_sample with num_beams 4"),
    "typical": (change("generation_config.json", do_sample=True, num_beams=1, typical_p=0.5), "with typical_p 0.5"),
    "repetition": (change("generation_config.json", repetition_penalty=-1.2), "repetition_penalty is -1.2"),
    "no length": (
        change("generation_config.json", max_length=0),
        "max_length is 0 and max_new_tokens 1, expected at least 2",
    ),
    "groups": (change("generation_config.json", num_beam_groups=2), "num_beam_groups 2"),
    "something new": (change("generation_config.json", magic=3), "generation_config.json has magic"),
    "bad words": (change("generation_config.json", bad_words_ids=[[4, []]]), "bad_words_ids names tokens"),
    "odd words": (change("generation_config.json", bad_words_ids=5), "generation_config.json is not as transformers"),
    "odd tokens": (
        change("tokenizer_config.json", added_tokens_decoder={"0": {"special": True}}),
        "its vocabulary is not as transformers writes it",
    ),
    "unknown words": (
        change("generation_config.json", bad_words_ids=[[999999]]),
        "tokens that are not in the vocabulary",
    ),
}


@pytest.fixture
def wrong(originals, tmp_path):
    folder = tmp_path / "wrong"
    shutil.copytree(originals("marian").path, folder)
    return folder


def refused(folder, capsys, *arguments):
    with pytest.raises(SystemExit) as stopped, warnings.catch_warnings(action="error"):
        cli.call(["import", str(folder), "-o", str(folder.parent / "out"), *arguments])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.count("\n") == 1
    assert not (folder.parent / "out").exists()
    assert not (folder.parent / "executed").exists()
    return said


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_folder_is_refused_in_one_line(wrong, capsys, fault):
    spoil, said = FAULTS[fault]
    spoil(wrong)
    capsys.readouterr()
    message = refused(wrong, capsys)
    assert re.search(said, message), message


def test_all_faults_are_said_at_once(wrong, capsys):
    truncate(wrong)
    for name in ("source.spm", "target.spm", "vocab.json"):
        (wrong / name).unlink()
    change("config.json", activation_function="mish")(wrong)
    change("generation_config.json", do_sample=True)(wrong)
    message = refused(wrong, capsys)
    assert all(part in message for part in ("damaged", "found no vocabulary", "mish", "do_sample"))


def test_formats_and_places(wrong, capsys, tmp_path):
    message = refused(wrong, capsys, "--format", "fairseq")
    assert "unknown format 'fairseq'; choose one of " in message
    assert all(
        f" {name}," in message for name in ("sentence-transformers", "cross-encoder", "ctranslate2", "huggingface")
    )
    (wrong / "config.json").unlink()
    assert "weights without their configuration" in refused(wrong, capsys)
    assert "cannot read config.json" in refused(wrong, capsys, "--format", "huggingface")
    assert "hub id ORG/NAME" in refused(tmp_path / "nothing" / "at" / "all", capsys)
    with pytest.raises(RequestError, match="needs an output path"):
        zoo.import_model(wrong, None)


# -------------------------------------------------------------------------------------------------------------- the hub


def test_a_hub_id_is_found_in_the_cache_when_offline(originals, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    place, commit = tmp_path / "cache" / "models--some--model", "0" * 40
    shutil.copytree(originals("marian").path, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    asked, fetch = [], hub.snapshot_download

    def download(name, **options):
        asked.append(options)
        return fetch(name, cache_dir=tmp_path / "cache", **options)

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    report = zoo.import_model("some/model", tmp_path / "out")
    assert report["imported"]["architecture"] == "MarianMTModel"
    assert asked[0]["local_files_only"] is True
    with pytest.raises(RequestError, match="found no folder some/other.*ZOO_OFFLINE"):
        zoo.import_model("some/other", tmp_path / "other")
    assert not (tmp_path / "other").exists()
