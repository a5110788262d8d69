"""Extractive question answering: the span of a context that answers a question."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.data.text_files import read_lines
from zoo.texts.data import text_files
from zoo.texts.data.tokenizer import Tokens
from zoo.texts.heads import labelled
from zoo.texts.heads.task_pipeline import TaskPipeline
from zoo.texts.models.config import LOGITS
from zoo.texts.models.head import TokenHead
from zoo.texts.text_pipeline import SORT_WINDOW, Floats

LENGTH, STRIDE = 384, 128  # default tokens of a window, and those that two windows share, as in transformers
SPECIAL = 8  # most special tokens of a question with its context
SPARE = 10  # spans of a window beyond twice `top_k`: of some the words are one answer


class QuestionAnswering(TokenHead):
    """Start and end of an answer."""

    FORMAT: ClassVar[str] = "question-answering"
    TITLE: ClassVar[str] = "question answering model"
    ENDS: ClassVar[tuple[str, ...]] = ("ForQuestionAnswering",)
    MODEL: ClassVar[str] = "AutoModelForQuestionAnswering"
    LAYER: ClassVar[str] = "qa_outputs"
    PAIRS: ClassVar[bool] = True

    def outputs(self, config: Mapping[str, Any]) -> int:
        """See `Head`: logits of the start and of the end."""
        return 2

    def features(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`."""
        return {}

    def pipeline(self) -> type[AnswerPipeline]:
        """See `Head`."""
        return AnswerPipeline

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Head`: exact match and F1."""
        return evaluate(pipelines, data, on_error)


class AnswerPipeline(TaskPipeline):
    """Finds answers in texts; see `zoo.pipeline`.

    Attributes:
        top_k: Number of answers of a result; 1: a dict in place of a list.
        stride: Tokens of the context that two windows share; None: half a window, at most `STRIDE`.
        longest: Maximum number of tokens of an answer.
        allows_none: Whether no answer, "", is an answer.
        whole_words: Whether answers begin and end with whole words.
    """

    OUTPUT: ClassVar[str] = LOGITS
    PER_TOKEN: ClassVar[bool] = True
    TEXTS_PER_ROW: ClassVar[int] = 2
    COLUMNS: ClassVar[Mapping[str, Any]] = {"score": np.float32, "start": np.int64, "end": np.int64, "answer": str}
    top_k: int = 1
    stride: int | None = None
    longest: int = 15
    allows_none: bool = False
    whole_words: bool = True

    def __call__(  # type: ignore[override]
        self,
        raw: Any = None,
        *,
        question: str | None = None,
        context: str | None = None,
        top_k: int = 1,
        doc_stride: int | None = None,
        max_answer_len: int = 15,
        max_seq_len: int | None = None,
        handle_impossible_answer: bool = False,
        align_to_words: bool = True,
        on_error: str = "raise",
    ) -> list[Any]:
        """Answers questions by spans of their contexts.

        Args:
            raw: Questions with contexts: {"question", "context"}, tuples, or one of them. Only a `Path` names a file.
            question: A question, in place of `raw`.
            context: Its context.
            top_k: Number of answers a question, best first.
            doc_stride: Tokens of a long context that two windows share; None: half a window, at most 128.
            max_answer_len: Maximum number of tokens of an answer.
            max_seq_len: Tokens of a window with the question; None: 384, or the model's maximum.
            handle_impossible_answer: Whether no answer, "", is an answer.
            align_to_words: Whether answers begin and end with whole words.
            on_error: "raise" at the first invalid row, or "skip" to return its error.

        Returns:
            {"score", "start", "end", "answer"} of each question; with `top_k` above 1 a list of them.

        Raises:
            RequestError: There are no valid rows, or an option is out of range.
        """
        configured = self.with_options(
            top_k=top_k,
            doc_stride=doc_stride,
            max_answer_len=max_answer_len,
            max_seq_len=max_seq_len,
            handle_impossible_answer=handle_impossible_answer,
            align_to_words=align_to_words,
        )
        rows = [{"question": question, "context": context}] if raw is None else raw
        return super(AnswerPipeline, configured).__call__(rows, on_error=on_error)

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        top_k: int = 1,
        doc_stride: int | None = None,
        max_answer_len: int = 15,
        handle_impossible_answer: bool = False,
    ) -> dict[str, Any]:
        """Answers questions in constant memory and input order.

        Writes the columns row (from 1), score, start, end and answer, a line for each of the `top_k` answers.

        Args:
            inputs: Text files with question TAB context, tables, or "-" for stdin.
            output: .csv, .csv.gz, .jsonl or .parquet file; "-" for CSV on stdout.
            on_error: "raise" to stop at the first invalid row, "skip" to write an empty line for it.
            column: Columns of tables. [default: question,context]
            top_k: See `__call__`.
            doc_stride: See `__call__`.
            max_answer_len: See `__call__`.
            handle_impossible_answer: See `__call__`.

        Returns:
            Summary, as `SentencePipeline.run`.

        Raises:
            RequestError: The input is unusable.
        """
        configured = self.with_options(
            top_k=top_k,
            doc_stride=doc_stride,
            max_answer_len=max_answer_len,
            handle_impossible_answer=handle_impossible_answer,
        )
        return configured._run(inputs, output, on_error, self.parse_columns(column), None, None)

    def with_options(
        self,
        *,
        top_k: int = 1,
        doc_stride: int | None = None,
        max_answer_len: int = 15,
        max_seq_len: int | None = None,
        handle_impossible_answer: bool = False,
        align_to_words: bool = True,
    ) -> Self:
        """See `TaskPipeline`.

        Args:
            top_k: See `__call__`.
            doc_stride: See `__call__`.
            max_answer_len: See `__call__`.
            max_seq_len: See `__call__`.
            handle_impossible_answer: See `__call__`.
            align_to_words: See `__call__`.
        """
        for name, number in (("top_k", top_k), ("max_answer_len", max_answer_len)):
            if type(number) is not int or number < 1:
                raise RequestError(f"found {name} {number!r:.40}; expected a whole number from 1")
        return self.configured(
            max_length=max_seq_len or min(LENGTH, self.max_length),
            top_k=top_k,
            stride=doc_stride,
            longest=min(max_answer_len, self.max_length),
            allows_none=bool(handle_impossible_answer),
            whole_words=bool(align_to_words),
        )

    def rows(self, data: Any, columns: Sequence[str] = (), *, names: bool = True) -> Iterator[text_files.Row]:
        """See `TextPipeline.rows`: questions with their contexts."""
        if isinstance(data, list) and any(isinstance(item, dict) for item in data):
            for item in data:
                if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in FIELDS):
                    raise RequestError(f"found {item!r:.80}; expected the keys question and context")
            data = [tuple(item[key] for key in FIELDS) for item in data]
        return super().rows(data, columns, names=names)

    def input_rows(self, data: Any, columns: Sequence[str] = (), *, names: bool = True) -> Iterator[text_files.Row]:
        """See `TextPipeline.input_rows`: a question without room for its context is invalid."""
        length, stride = self._window(self.max_tokens)
        self.tokenizer.windows([("a", "a")], stride, length)  # raises for a stride that is out of range
        for row in super().input_rows(data, columns, names=names):
            count = 0 if row.error else self.tokenizer.count(row.texts[0], length)
            if count + stride + SPECIAL < length or self._has_windows(row.texts, length, stride):
                yield row
            else:
                expected = f"expected fewer than {length - stride} with the special tokens, as windows have {length}"
                error = f"has a question of {count if count < length else f'{length} or more'} tokens; {expected}"
                yield row._replace(error=f"{error} and share {stride} of them")

    def _has_windows(self, texts: tuple[str, ...], length: int, stride: int) -> bool:
        """Returns whether a question and its context can be divided into windows."""
        try:
            return bool(self.tokenizer.windows([texts], stride, length, strategy="only_second"))
        except RequestError:
            return False

    def _window(self, max_length: int | None) -> tuple[int, int]:
        """Returns the tokens of a window, and those that two windows share."""
        length = max_length or min(LENGTH, self.max_length)
        return length, min(length // 2, STRIDE) if self.stride is None else self.stride

    def _as_list(self, raw: Any) -> Any:
        """Wraps a single question with its context in a list."""
        return [raw] if isinstance(raw, dict) else super()._as_list(raw)

    def tokenize(
        self, rows: Sequence[tuple[str, ...]], prompt: str | None = None, max_length: int | None = None
    ) -> Tokens:
        """See `TextPipeline.tokenize`; the context of the tokens has the texts with the encodings of their windows."""
        length, stride = self._window(max_length)
        windows = self.tokenizer.windows(rows, stride, length, strategy="only_second") if rows else []
        encodings = [encoding for group in windows for encoding in group]
        return Tokens.of(encodings, [False] * len(encodings), list(zip(rows, windows, strict=True)))

    def decode(self, outputs: Floats, tokens: Tokens) -> list[Any]:
        """See `TaskPipeline.decode`."""
        results, start = [], 0
        for (_, context), windows in tokens.context:
            answers: list[dict[str, Any]] = []
            least = np.inf  # score of no answer, over the windows
            for encoding in windows:
                logits = outputs[start : start + len(encoding.ids)]
                start += len(encoding.ids)
                spans, none = _spans(logits, _in_context(encoding), 2 * self.top_k + SPARE, self.longest)
                least = min(least, none)
                for span in spans:
                    self._add(answers, span, encoding, context)
            if self.allows_none:
                answers.append({"score": float(least), "start": 0, "end": 0, "answer": ""})
            best = sorted(answers, key=lambda answer: answer["score"], reverse=True)[: self.top_k] or [NO_ANSWER]
            results.append(best[0] if self.top_k == 1 else best)
        return results

    def _add(self, answers: list[dict[str, Any]], span: Span, encoding: Any, context: str) -> None:
        """Adds an answer, or its score to that of the same words."""
        start, end = encoding.offsets[span.start][0], encoding.offsets[span.end][1]
        if self.whole_words:
            words = [encoding.token_to_word(i) for i in (span.start, span.end)]
            chars = [None if word is None else encoding.word_to_chars(word, 1) for word in words]
            if chars[0] is not None and chars[1] is not None:
                start, end = chars[0][0], chars[1][1]
        text = context[start:end]
        same = next((answer for answer in answers if answer["answer"].lower() == text.lower()), None)
        if same is None:
            answers.append({"score": span.score, "start": start, "end": end, "answer": text})
        else:
            same["score"] += span.score


FIELDS = ("question", "context")
NO_ANSWER = {"score": 0.0, "start": 0, "end": 0, "answer": ""}


class Span(NamedTuple):
    """Tokens of an answer, the last one included, and their score."""

    score: float
    start: int
    end: int


def _in_context(encoding: Any) -> NDArray[np.bool_]:
    """Returns which tokens of a window are of the context."""
    return np.array([sequence == 1 for sequence in encoding.sequence_ids], np.bool_)


def _spans(logits: Floats, allowed: NDArray[np.bool_], count: int, longest: int) -> tuple[list[Span], float]:
    """Returns the best spans of a window, the product of start and end the highest, and the score of no answer.

    Start and end are softmax probabilities over the tokens of the context and the first token, which is no answer.
    """
    candidates = allowed.copy()
    candidates[0] = True
    masked = np.where(candidates[:, None], logits, np.float32(-10000))
    scores = np.exp(masked - masked.max(axis=0))
    scores /= scores.sum(axis=0)
    none = float(scores[0, 0] * scores[0, 1])
    scores[0] = 0
    products = np.tril(np.triu(np.outer(scores[:, 0], scores[:, 1])), longest - 1)
    order = np.argsort(-products, axis=None, kind="stable")[:count]
    pairs = np.stack(np.unravel_index(order, products.shape), axis=1)
    return [
        Span(float(products[first, last]), int(first), int(last))
        for first, last in pairs
        if allowed[first] and allowed[last] and first <= last < first + longest
    ], none


class Question(NamedTuple):
    """A question with its answers; none if the context has no answer.

    Attributes:
        question: The question.
        context: The context.
        answers: Answers.
        start: First character of the first answer; None if the data do not say.
    """

    question: str
    context: str
    answers: list[str]
    start: int | None = None

    def span(self) -> tuple[int, int] | None:
        """Returns the characters of the first answer in the context.

        Returns:
            Its first character and the one behind it; (-1, -1) for no answer, None if the context does not have it.
        """
        if not self.answers:
            return -1, -1
        answer, start = self.answers[0], self.start
        if start is None or not self.context.startswith(answer, start):
            start = self.context.find(answer)
        return None if start < 0 else (start, start + len(answer))


def read_questions(data: Any) -> Iterator[tuple[str, Question | None]]:
    """Reads questions: SQuAD's JSON, or JSON lines and Parquet with {"question", "context", "answers"}.

    Args:
        data: Files.

    Returns:
        Iterator over the locations and questions; None for an invalid one.

    Raises:
        RequestError: A file is missing.
    """
    for name in map(str, data if isinstance(data, list | tuple) else [data]):
        if not text_files.is_file(name):
            raise RequestError(f"found no file {name:.200}; expected SQuAD's .json, .jsonl or .parquet")
        is_squad = name.lower().removesuffix(".gz").endswith(".json")
        for location, row in _squad(name) if is_squad else labelled.read_objects(name):
            yield location, _question(row)


def _squad(name: str) -> Iterator[tuple[str, Any]]:
    """Yields the locations of the questions of SQuAD's JSON, and the questions with their contexts."""
    content = labelled.parsed("\n".join(line or "" for line in read_lines(name)))
    try:
        questions = [
            {**question, "context": paragraph["context"]}
            for article in content["data"]
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
    except (KeyError, TypeError) as error:
        raise RequestError(
            f"{name} is no SQuAD file ({error!r}); expected its keys data, paragraphs and qas"
        ) from error
    yield from ((f"{name}, question {i}", question) for i, question in enumerate(questions, 1))


def _question(row: Any) -> Question | None:
    """Returns the question of a row; None for another form."""
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in FIELDS):
        return None
    raw = row.get("answers", row.get("answer", []))
    starts: Any = raw.get("answer_start") if isinstance(raw, dict) else None
    raw = raw.get("text", []) if isinstance(raw, dict) else [raw] if isinstance(raw, str) else raw
    texts = [answer.get("text") if isinstance(answer, dict) else answer for answer in raw or []]
    if not all(isinstance(text, str) for text in texts):
        return None
    if raw and isinstance(raw[0], dict):
        starts = [answer.get("answer_start") for answer in raw]
    start = starts[0] if isinstance(starts, list | tuple) and starts and type(starts[0]) is int else None
    return Question(row["question"], row["context"], [text for text in texts if text], start)


def normalized(text: str) -> list[str]:
    """Returns the words of an answer as SQuAD compares them: no case, punctuation or articles.

    Args:
        text: An answer.
    """
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def answer_f1(answer: str, expected: str) -> float:
    """Returns F1 of the words of an answer, as SQuAD computes it.

    Args:
        answer: An answer.
        expected: The right one.
    """
    mine, theirs = normalized(answer), normalized(expected)
    if not mine or not theirs:
        return float(mine == theirs)
    common = (Counter(mine) & Counter(theirs)).total()
    return 2 * common / (len(mine) + len(theirs))


def evaluate(pipelines: Mapping[str, AnswerPipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Compares the answers of several precisions with fp32 on the same questions.

    Metrics are those of SQuAD (Rajpurkar et al. 2016): exact match, and F1 of words, with the best of the right
    answers. With questions that have no answer, no answer is an answer.

    Args:
        pipelines: Pipelines by precision, fp32 first.
        data: Questions (see `read_questions`).
        on_error: "raise" at the first invalid question, "skip" to leave it out.

    Returns:
        {"samples", "skipped", "metrics", "difference", "interval", "others"} (see `against_fp32`); "difference" has
        "agreement", the share of questions with the answer of fp32.

    Raises:
        RequestError: The data are unusable.
    """
    report, errors = labelled.reporter(next(iter(pipelines.values())), on_error)
    questions = []
    for location, question in read_questions(data):
        report(location, "" if question else 'is no {"question", "context", "answers"}')
        if question:
            questions.append(question)
    if not questions:
        raise RequestError(f"found no questions in {data}; expected question, context and answers")
    allows_none = any(not question.answers for question in questions)
    answers = {
        name: _answers(pipeline.with_options(handle_impossible_answer=allows_none), questions)
        for name, pipeline in pipelines.items()
    }

    def measured(name: str) -> dict[str, labelled.Counts]:
        rows = []
        for answer, question in zip(answers[name], questions, strict=True):
            right = question.answers or [""]
            exact = float(any(normalized(answer) == normalized(truth) for truth in right))
            rows.append([exact, max(answer_f1(answer, truth) for truth in right), 1.0])
        counts = np.array(rows)
        return {
            "exact_match": labelled.Counts(counts[:, [0, 2]], labelled.share),
            "f1": labelled.Counts(counts[:, [1, 2]], labelled.share),
        }

    def agreement(name: str) -> dict[str, float]:
        same = [a == b for a, b in zip(answers[name], answers["fp32"], strict=True)]
        return {"agreement": float(np.mean(same))}

    compared = labelled.compare({name: measured(name) for name in answers}, agreement)
    return {"samples": len(questions), "skipped": errors.total(), **compared}


def _answers(pipeline: AnswerPipeline, questions: Sequence[Question]) -> list[str]:
    """Returns the best answer of each question."""
    answers = []
    for i in range(0, len(questions), SORT_WINDOW * pipeline.batch_size):
        part = questions[i : i + SORT_WINDOW * pipeline.batch_size]
        tokens = pipeline.tokenize(
            [(question.question, question.context) for question in part], **pipeline.text_options()
        )
        answers += [str(answer["answer"]) for answer in pipeline.decode(pipeline.compute(tokens), tokens)]
    return answers


HEAD = QuestionAnswering()
