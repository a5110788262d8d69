"""Answers in contexts, beside the definition of transformers' question-answering pipeline."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models, text_networks  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from zoo.texts.heads import question_answering  # noqa: E402

TASK = "AutoModelForQuestionAnswering"
CONTEXT = " ".join(f"{text} sat" for text in text_models.TEXTS * 2)
QUESTIONS = [("the zoo?", CONTEXT), ("a cat?", "the cat sat on b c, d."), ("who?", "zebra")]


def imported(path, kind="bert", **more):
    """(an imported folder of a random model, the original, its tokenizer)."""
    model, fast = text_models.write_task(path / "theirs", TASK, kind, **more)
    zoo.import_model(path / "theirs", path / "ours")
    return path / "ours", model, fast


def expected(model, fast, question, context, length=76, stride=38, longest=15):
    """All answers {words: (score, start, end)} by brute force, and the least score of no answer."""
    encoded = fast(
        question, context, truncation="only_second", max_length=length, stride=stride, return_overflowing_tokens=True
    )
    answers, none = {}, []
    for window in encoded.encodings:
        inputs = {"input_ids": window.ids, "attention_mask": window.attention_mask}
        if "token_type_ids" in fast.model_input_names:
            inputs["token_type_ids"] = window.type_ids
        with torch.no_grad():
            out = model(**{name: torch.tensor([ids]) for name, ids in inputs.items()})
        allowed = [i for i, sequence in enumerate(window.sequence_ids) if sequence == 1]
        chosen = [0, *allowed]
        start, end = (torch.softmax(logits[0, chosen], 0).numpy() for logits in (out.start_logits, out.end_logits))
        none.append(start[0] * end[0])
        spans = sorted(
            ((start[1 + a] * end[1 + b], allowed[a], allowed[b])
             for a in range(len(allowed)) for b in range(a, min(a + longest, len(allowed)))),
            reverse=True,
        )  # fmt: skip
        for score, first, last in spans[:12]:
            begin = window.word_to_chars(window.token_to_word(first), 1)[0]
            finish = window.word_to_chars(window.token_to_word(last), 1)[1]
            words = context[begin:finish].lower()
            before = answers.get(words, (0.0, begin, finish))
            answers[words] = (before[0] + score, *before[1:])
    return answers, min(none)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra", "modernbert"])
def test_answers_are_those_of_transformers(tmp_path, kind):
    folder, model, fast = imported(tmp_path, kind)
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    for question, context in QUESTIONS:
        wanted, none = expected(model, fast, question, context)
        (best,) = ours({"question": question, "context": context}, doc_stride=38)
        score, start, end = max(wanted.values())
        assert (best["start"], best["end"], best["answer"]) == (start, end, context[start:end])
        assert abs(best["score"] - score) < 1e-5
        (ranked,) = ours((question, context), top_k=500, doc_stride=38, handle_impossible_answer=True)
        assert {"score": pytest.approx(none, abs=1e-5), "start": 0, "end": 0, "answer": ""} in ranked
    assert [answer["answer"] for answer in ours(QUESTIONS)] == [ours([pair])[0]["answer"] for pair in QUESTIONS]
    assert ours(question="the zoo?", context=CONTEXT) == ours([QUESTIONS[0]])


def test_int8_answers_run_natively(tmp_path):
    folder, _, _ = imported(tmp_path)
    (tmp_path / "texts.tsv").write_text("\n".join("\t".join(pair) for pair in QUESTIONS * 30))
    zoo.calibrate(folder, str(tmp_path / "texts.tsv"), samples=16)
    answers = zoo.pipeline(folder, "int8", "native")(QUESTIONS, top_k=5)
    assert len(answers) == 3 and {*answers[0][0]} == {"score", "start", "end", "answer"}


def test_options_out_of_range_are_refused(tmp_path):
    folder, _, _ = imported(tmp_path)
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    for raw, options, message in (
        (QUESTIONS, {"top_k": 0}, "found top_k 0; expected"),
        (QUESTIONS, {"doc_stride": 75}, "found the stride 75; expected 0 to"),
        ([{"question": "who?"}], {}, "expected the keys question and context"),
        ([("who " * 100, "the cat")], {}, "has a question of 76 or more tokens; expected fewer than 38"),
    ):
        with pytest.raises(RequestError, match=message):
            ours(raw, **options)


@pytest.mark.parametrize("form", ["squad", "jsonl"])
def test_exact_match_and_f1(tmp_path, form):
    folder, _, _ = imported(tmp_path)
    opened = {"fp32": zoo.pipeline(folder, "fp32", "onnxruntime")}
    answers = [answer["answer"] for answer in opened["fp32"](QUESTIONS)]
    rows = [
        {"question": question, "context": context, "answers": {"text": [f"The {answer}!"], "answer_start": [0]}}
        for (question, context), answer in zip(QUESTIONS, answers, strict=True)
    ]
    rows[2]["answers"] = {"text": [f"{answers[2]} dog"], "answer_start": [0]}
    if form == "squad":
        texts = [
            {
                "context": row["context"],
                "qas": [{"question": row["question"], "answers": [{"text": text} for text in row["answers"]["text"]]}],
            }
            for row in rows
        ]
        (tmp_path / "data.json").write_text(json.dumps({"data": [{"paragraphs": texts}]}))
    else:
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = question_answering.evaluate(opened, tmp_path / ("data.json" if form == "squad" else "data.jsonl"))
    lengths = [len(question_answering.normalized(answer)) for answer in answers]
    partial = 2 * lengths[2] / (2 * lengths[2] + 1)
    assert report["metrics"]["fp32"]["exact_match"] == pytest.approx(2 / 3)
    assert report["metrics"]["fp32"]["f1"] == pytest.approx(np.mean([1, 1, partial]))


def test_questions_without_room_for_a_context_are_left_out(tmp_path):
    folder, _, _ = imported(tmp_path)
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    long = [(question * 12, CONTEXT) for question in ("a b c d. ", "a b c d e f. ")]
    results = ours([QUESTIONS[0], *long, QUESTIONS[1]], on_error="skip")
    assert [results[0], results[3]] == ours([QUESTIONS[0], QUESTIONS[1]])
    assert all("expected fewer than 38 with the special" in result["error"] for result in results[1:3])
    assert ours([("a b c d. " * 10, "cat")])[0]["answer"]  # a context that is not divided
    with pytest.raises(RequestError, match="has a question of 60 tokens; expected fewer than 38"):
        ours(long)
    (tmp_path / "data.tsv").write_text("\n".join("\t".join(row) for row in [*long, *QUESTIONS]))
    report = zoo.run(folder, tmp_path / "data.tsv", tmp_path / "out.jsonl", precision="fp32", engine="onnxruntime")
    assert (report["texts"], report["skipped"]) == (3, 2)


def test_answers_of_a_decoder_are_refused(tmp_path):
    values = {**text_networks.CONFIGS["t5"], "architectures": ["T5ForQuestionAnswering"]}
    text_networks.write(tmp_path / "theirs", values, None)
    with pytest.raises(RequestError, match="found T5ForQuestionAnswering, whose head reads the output of a decoder"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
