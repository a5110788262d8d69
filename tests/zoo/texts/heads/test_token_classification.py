"""Entities of texts, equal to those of transformers' token-classification pipeline."""

import csv
import json
import warnings

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
tokenizers = pytest.importorskip("tokenizers", reason="needs the texts extra")
transformers = pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models  # noqa: E402
from helpers.tiers import one_in  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from pipelines.graph import io  # noqa: E402
from pipelines.kernels.transformer.operations import Linear  # noqa: E402
from pipelines.kernels.transformer.text.from_graph import text_program  # noqa: E402
from zoo.texts.heads import labelled  # noqa: E402
from zoo.texts.heads.token_classification import evaluate  # noqa: E402

TASK = "AutoModelForTokenClassification"
NAMES = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC", 5: "MISC"}
TEXTS = [
    *text_models.TEXTS,
    " \u200bthe  CAT\u00e9, ½ ﬁ 漢字 🙂 sat... ",
    "o'neill-smith\u00adson e\u0301t\u00e9\tab\n\ncd",
    "no\x00lines\u2028at all",
]
LONG = " ".join(text_models.TEXTS * 6)


def imported(path, kind="bert", **more):
    """(an imported folder of a random tagger, transformers' pipeline of the original)."""
    model, fast = text_models.write_task(path / "theirs", TASK, kind, id2label=NAMES, **more)
    zoo.import_model(path / "theirs", path / "ours")
    return path / "ours", transformers.pipeline("token-classification", model=model, tokenizer=fast)


def same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert {**a, "score": 0} == {**b, "score": 0}
        assert abs(a["score"] - b["score"]) < 1e-5


def test_blanks_that_are_tokens_are_those_of_transformers(tmp_path):
    """Tokens of bytes, as RoBERTa's: the offsets of a blank are empty. Whether it divides an entity says its label."""
    model, _ = text_models.write_task(tmp_path / "theirs", TASK, "roberta", id2label=NAMES, vocab_size=264)
    fast = byte_tokenizer()
    fast.save_pretrained(tmp_path / "theirs")
    theirs = transformers.pipeline("token-classification", model=model, tokenizer=fast)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", int8=False)
    ours = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    texts = ["the  cat   sat, 12  34", *TEXTS[-3:], "  a   b  "]
    for strategy in ("none", "simple", "first", "average", "max"):
        for text, entities in zip(texts, ours(texts, aggregation_strategy=strategy), strict=True):
            same(entities, theirs(text, aggregation_strategy=strategy))
    options = {"aggregation_strategy": "simple", "ignore_labels": []}
    assert not all(entity["end"] > entity["start"] for entity in ours(texts[0], **options)[0])
    card = json.loads((tmp_path / "ours" / "card.json").read_text())
    card["preprocessing"]["blanks"] = "O"
    (tmp_path / "ours" / "card.json").write_text(json.dumps(card))
    ours = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    assert all(entity["end"] > entity["start"] for entity in ours(texts[0], **options)[0])


def byte_tokenizer():
    """A tokenizer of bytes without merges, as RoBERTa's."""
    special = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate((*special, *alphabet))}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=76, **names)


@pytest.mark.parametrize(
    "kind", one_in(2, ["bert", "roberta", "xlm-roberta", "distilbert", "electra", "data2vec", "modernbert"])
)
def test_entities_are_those_of_transformers(tmp_path, kind):
    folder, theirs = imported(tmp_path, kind)
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    for strategy in ("none", "simple", "first", "average", "max"):
        tagged = ours(TEXTS, aggregation_strategy=strategy)
        for text, entities in zip(TEXTS, tagged, strict=True):
            same(entities, theirs(text, aggregation_strategy=strategy))
        same(ours(LONG, aggregation_strategy=strategy)[0], theirs(LONG, aggregation_strategy=strategy))
        if strategy != "none":
            for stride in (0, 10):
                options = {"aggregation_strategy": strategy, "stride": stride}
                same(ours(LONG, **options)[0], theirs(LONG, **options))
    same(ours("the cat", ignore_labels=[])[0], theirs("the cat", ignore_labels=[]))
    labels = ["B-PER", "LOC", "MISC"]
    options = {"aggregation_strategy": "simple", "ignore_labels": labels}
    same(ours(TEXTS[3], **options)[0], theirs(TEXTS[3], **options))


def test_words_of_a_tokenizer_without_marks_of_subwords(tmp_path):
    import tokenizers

    model, _ = text_models.write_task(tmp_path / "theirs", TASK, id2label=NAMES)
    letters = {
        letter: i for i, letter in enumerate(["<pad>", "<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"])
    }
    vocabulary = letters | {f"<{i}>": i for i in range(len(letters), 64)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", model_max_length=80
    )
    fast.save_pretrained(tmp_path / "theirs")
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    ours = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    theirs = transformers.pipeline("token-classification", model=model, tokenizer=fast)
    for strategy in ("none", "simple", "first", "average", "max"):
        for text in TEXTS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wanted = theirs(text, aggregation_strategy=strategy)
            same(ours(text, aggregation_strategy=strategy)[0], wanted)


def test_options_out_of_range_are_refused(tmp_path):
    folder, _ = imported(tmp_path)
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    for options, message in (
        ({"aggregation_strategy": "best"}, "found aggregation_strategy 'best'; expected none, simple, first"),
        ({"stride": 3}, "found a stride without aggregation_strategy"),
        ({"stride": 78, "aggregation_strategy": "simple"}, "found the stride 78; expected 0 to 73"),
        ({"ignore_labels": "O"}, "found ignore_labels 'O'; expected a list"),
    ):
        with pytest.raises(RequestError, match=message):
            ours("the cat", **options)
    assert ours(["the cat", " "], on_error="skip")[1] == {"error": "is empty"}


@pytest.mark.usefixtures("openvino")
def test_a_text_has_the_same_entities_alone_and_in_a_batch(tmp_path):
    folder, _ = imported(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(text_models.TEXTS * 30))
    zoo.calibrate(folder, str(tmp_path / "texts.txt"), samples=16)
    exact = zoo.pipeline(folder, "fp32", "onnxruntime")
    for engine in ("native", "onnxruntime", "openvino"):
        ours = zoo.pipeline(folder, "int8", engine)
        tagged = ours(text_models.TEXTS, ignore_labels=[])
        assert ours.engine == engine
        scores = [[token["score"] for token in tokens] for tokens in tagged]
        for text, tokens in zip(text_models.TEXTS, scores, strict=True):
            alone = [token["score"] for token in ours(text, ignore_labels=[])[0]]
            assert np.abs(np.subtract(alone, tokens)).max() < 0.02, engine
        wanted = [[token["score"] for token in tokens] for tokens in exact(text_models.TEXTS, ignore_labels=[])]
        differences = np.abs(np.concatenate(wanted) - np.concatenate(scores))
        assert np.median(differences) < 0.05, engine


@pytest.mark.slow
def test_of_the_layers_of_a_token_only_the_classifier_is_float(tmp_path):
    folder, _ = imported(tmp_path, "modernbert")
    program = text_program(io.load(zoo.load(folder).ensure("int8.onnx")))
    assert [type(step).__name__ for step in program.head] == ["RowNorm", "Dense"] and len(program.head[1].bias) == 6
    last = [step for step in program.encoder.operations if isinstance(step, Linear)][-1]
    assert last.layer.quantizes
    exact, int8 = zoo.pipeline(folder, "fp32", "onnxruntime"), zoo.pipeline(folder, "int8", "native")
    wanted, logits = (np.concatenate([*pipeline.compute_texts(TEXTS)]) for pipeline in (exact, int8))
    assert np.abs(logits - wanted).max() < 0.1 * np.abs(wanted).max()


def test_the_scale_of_a_last_norm_stays_with_its_rows(tmp_path):
    folder, _ = imported(tmp_path, "qwen3")
    exact, native = zoo.pipeline(folder, "fp32", "onnxruntime"), zoo.pipeline(folder, "int8", "native")
    wanted, logits = (np.concatenate([*pipeline.compute_texts(TEXTS)]) for pipeline in (exact, native))
    assert np.abs(logits - wanted).max() < 0.1 * np.abs(wanted).max()


def test_run_writes_a_line_an_entity(tmp_path):
    folder, theirs = imported(tmp_path)
    (tmp_path / "texts.txt").write_text("the cat\n\nzebra! the zoo?\n")
    report = zoo.run(folder, tmp_path / "texts.txt", tmp_path / "out.csv", precision="fp32", engine="onnxruntime")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    wanted = [
        (i, entity)
        for i, text in ((1, "the cat"), (3, "zebra! the zoo?"))
        for entity in theirs(text, aggregation_strategy="simple")
    ]
    assert [(row["entity_group"], row["word"]) for row in rows if row["row"] != "2"] == [
        (entity["entity_group"], entity["word"]) for _, entity in wanted
    ]
    assert [(row["row"], row["start"], row["end"]) for row in rows if row["row"] != "2"] == [
        (str(i), str(entity["start"]), str(entity["end"])) for i, entity in wanted
    ]
    assert [row["word"] for row in rows if row["row"] == "2"] == [""]
    assert (report["texts"], report["skipped"]) == (2, 1)
    for suffix in ("jsonl", "parquet"):
        zoo.run(
            folder, tmp_path / "texts.txt", tmp_path / f"out.{suffix}", aggregation_strategy="none", precision="fp32"
        )


@pytest.mark.parametrize("form", ["conll", "jsonl"])
def test_f1_of_entities(tmp_path, form):
    folder, theirs = imported(tmp_path)
    sentences = [text.replace(",", " ,").replace("!", " !").split() for text in text_models.TEXTS]
    sentences.append((text_models.TEXTS * 6)[4].split() * 6)  # of several windows
    tagged = zoo.pipeline(folder, "fp32", "onnxruntime").tag(
        [labelled.Sentence.of_words("", words, []) for words in sentences]
    )
    for words, tags in zip(sentences[:-1], tagged, strict=False):
        tokens = {token["start"]: token["entity"] for token in theirs(" ".join(words), ignore_labels=[])}
        starts = np.cumsum([0, *(len(word) + 1 for word in words)])[: len(words)]
        assert tags == [tokens[start] for start in starts]
    if form == "conll":
        lines = [
            f"{word} X {tag}"
            for words, tags in zip(sentences, tagged, strict=True)
            for word, tag in [*zip(words, tags, strict=True), ("", "")]
        ]
        text = "-DOCSTART- -X- O\n\n" + "\n".join("" if line.startswith(" ") else line for line in lines)
    else:
        numbers = {name: i for i, name in NAMES.items()}
        text = "\n".join(
            json.dumps({"tokens": words, "ner_tags": [numbers[tag] for tag in tags]})
            for words, tags in zip(sentences, tagged, strict=True)
        )
    (tmp_path / f"data.{form}").write_text(text)
    report = evaluate({"fp32": zoo.pipeline(folder, "fp32", "onnxruntime")}, tmp_path / f"data.{form}")
    assert report["samples"] == 6 and report["metrics"]["fp32"] == {"f1": 1.0, "accuracy": 1.0}
    (tmp_path / "bad.conll").write_text("the B-ORG\n")
    with pytest.raises(RequestError, match="has the label 'B-ORG', expected one of O, B-PER"):
        evaluate({"fp32": zoo.pipeline(folder, "fp32", "onnxruntime")}, tmp_path / "bad.conll")


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-A I-A O", {(1, 3, "A")}),
        ("B-A B-A I-B I-B", {(0, 1, "A"), (1, 2, "A"), (2, 4, "B")}),
        ("I-A O I-A", {(0, 1, "A"), (2, 3, "A")}),
        ("O O", set()),
        ("B-A E-A S-A B-A I-A E-A E-A", {(0, 2, "A"), (2, 3, "A"), (3, 6, "A"), (6, 7, "A")}),
        ("U-A U-A B-A L-A I-A O-A", {(0, 1, "A"), (1, 2, "A"), (2, 4, "A"), (4, 5, "A"), (5, 6, "O-A")}),
    ],
)
def test_entities_of_labelled_words(tags, expected):
    assert labelled.spans(tags.split()) == expected


def test_a_network_with_another_head_is_refused(tmp_path):
    text_models.write_task(tmp_path / "theirs", "AutoModelForSequenceClassification")
    with pytest.raises(RequestError, match="found BertForSequenceClassification, expected ...ForTokenClassification"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours", format="token-classification")
    assert not (tmp_path / "ours").exists()
