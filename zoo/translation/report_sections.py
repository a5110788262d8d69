"""Sections of translation models in MODELS.md and docs/benchmarks/, rendered from report files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import zoo
from pipelines.analysis import markdown
from pipelines.models.hub import Hub

OVERVIEW = "sentences/s from text to text"
OURS = ("zoo-native", "zoo-int8")  # their speed-up over the other engines is shown
LISTED = "zoo-shortlist"  # engine whose speed-up is listed where it was timed
ENGINES = """Same weights and sentences, one thread and core, interleaved, medians of CPU time, by
`scripts/peers/translation/translation.py`. The last columns are the speed-up of this project's engines.

- base, opus, small: random weights; base has 32,000 pieces, opus is base with 58,101.
- firefox: random weights, 6 + 2 layers with SSRU in Marian's format, imported.
- zoo-shortlist: logits of the sentence's shortlist only.
"""
REWRITES = """Milliseconds per decoding step with the rewrite / without it (speed-up), in ONNX Runtime, by
`scripts/peers/translation/rewrites.py`.
"""


class TextToText(NamedTuple):
    """A peer report of a model's test set.

    Attributes:
        report: The report.
        case: Its case.
        results: Results by engine.
    """

    report: markdown.Report
    case: dict[str, Any]
    results: dict[str, dict[str, Any]]

    def rate(self, engine: str) -> float:
        """Returns the throughput of an engine.

        Args:
            engine: Name of the engine.

        Returns:
            Sentences per second.
        """
        return float(self.results[engine]["sentences_per_second"]["median"])

    def speed_up(self) -> str:
        """Returns the throughput of the native engine and its ratio to fp32."""
        rate = self.rate("zoo-native")
        return f"{rate:,.0f} ({rate / self.rate('zoo-fp32'):.2f}x)"


def overview(name: str) -> dict[str, str]:
    """Returns the cells of a model in the overview table.

    Args:
        name: Name of the model.

    Returns:
        Cell by column; {} without measurements.
    """
    qualities = markdown.reports(zoo.SHIPPED / name / "reports", "bleu")
    if not qualities:
        return {}
    quality = markdown.newest(qualities).content
    bleu = f"{quality['metrics']['fp32']['bleu']:.2f} / {quality['native']['metrics']['bleu']:.2f}"
    teachers = markdown.reports(zoo.SHIPPED / name / "reports", "teacher")
    return {
        "BLEU": bleu,
        **{markdown.cpu_column(text.report): text.speed_up() for text in _texts_to_texts(name)},
        **{markdown.cpu_column(report): _times_teacher(name, report) for report in teachers},
        "MB": markdown.stored_megabytes(zoo.SHIPPED / name),
    }


def _times_teacher(name: str, report: markdown.Report) -> str:
    """A student's throughput and its ratio to the teacher's, both in int8."""
    times, rate = report.content["times_as_fast"]["median"], report.content["sentences_per_second"][name]["median"]
    return f"{rate:,.0f} ({times:.2f}x teacher)"


def sections(name: str) -> str:
    """Returns the body of a model's section in MODELS.md.

    Args:
        name: Name of the model.
    """
    spec = Hub(zoo.SHIPPED).card(name).details["preprocessing"]
    parts = [
        f"- **Run:** `zoo run {name} text.txt -o translated.txt`",
        "- **Input:** one sentence per line, tokenized by the model's SentencePiece vocabulary; a line of more than "
        f"{spec['max_length']} tokens is split into sentences",
    ]
    if qualities := markdown.reports(zoo.SHIPPED / name / "reports", "bleu"):
        parts.append(_quality(markdown.newest(qualities)))
    parts += [_beside_teacher(name, report) for report in markdown.reports(zoo.SHIPPED / name / "reports", "teacher")]
    for text in _texts_to_texts(name):
        rates = {engine: f"{text.rate(engine):,.0f}" for engine in text.results}
        gain = {engine: f"{text.rate(engine) / text.rate('zoo-fp32'):.2f}x" for engine in OURS}
        rows = [
            ["onnxruntime", rates["zoo-fp32"], rates["zoo-int8"], gain["zoo-int8"]],
            ["native", "", rates["zoo-native"], gain["zoo-native"]],
        ]
        parts.append(
            f"- **Speed** from text to text, beam {text.case['beam']}, batch size {text.case['batch_size']} "
            f"({markdown.source(text.report, markdown.MODELS)}):\n\n"
            + markdown.table(["engine", "fp32 sentences/s", "int8 sentences/s", "int8 speed-up"], rows)
        )
    return "\n".join(parts)


def benchmarks(names: Sequence[str]) -> str:
    """Returns the page of translation models in docs/benchmarks/.

    Args:
        names: Names of the models.
    """
    threads = [
        _threads(name, report)
        for name in names
        for report in markdown.reports(zoo.SHIPPED / name / "reports", "threads")
    ]
    engines = [_beside_engines(report) for report in markdown.reports(markdown.PEERS, "translation")]
    rewrites = [_rewrites(report) for report in markdown.reports(markdown.PEERS, "steps")]
    parts = [
        *(["## Engines\n", ENGINES, *engines] if engines else []),
        *(["## Threads\n", *threads] if threads else []),
        *(["## Rewrites\n", REWRITES, *rewrites] if rewrites else []),
    ]
    return "\n".join(["# Translation\n", *parts]) if parts else ""


def _texts_to_texts(name: str) -> list[TextToText]:
    """The translations of a test set by a model, one per CPU."""
    measured = []
    for report in markdown.reports(markdown.PEERS, "translation"):
        for case in report.content["cases"]:
            if (case["model"], case["task"]) == (name, "text"):
                results = {result["engine"]: result for result in case["results"]}
                measured.append(TextToText(report, case, results))
    return measured


def _quality(report: markdown.Report) -> str:
    content = report.content
    rows = [["fp32", *(f"{content['metrics']['fp32'][key]:.2f}" for key in ("bleu", "chrf")), ""]]
    for engine, metrics, compared in (
        ("onnxruntime", content["metrics"]["int8"], content),
        ("native", content["native"]["metrics"], content["native"]),
    ):
        moved, interval = compared["difference"], compared["interval"]
        cells = [
            f"{metrics[key]:.2f} ({moved[key]:+.2f}, {interval[key][0]:+.2f} to {interval[key][1]:+.2f})"
            for key in ("bleu", "chrf")
        ]
        rows.append([f"int8, {engine}", *cells, f"{100 * moved['agreement']:.1f}%"])
    return (
        f"- **Quality** on {content['data']}, `{content['signatures']['bleu']}`; in brackets the "
        "difference to fp32 with the 95% interval by paired bootstrap "
        f"({markdown.link(report.path, markdown.MODELS)}):\n\n"
        + markdown.table(["precision", "BLEU", "chrF", "translations equal to fp32"], rows)
    )


def _beside_teacher(name: str, report: markdown.Report) -> str:
    content = report.content
    teacher, beams, metrics, times = (content[key] for key in ("teacher", "beams", "metrics", "times_as_fast"))
    rates = {system: f"{rate['median']:,.0f}" for system, rate in content["sentences_per_second"].items()}
    return (
        f"- **Compared with its teacher** {teacher}, int8 in the native engine, text to text, interleaved: "
        f"{times['median']:.2f}x ({times['spread'][0]:.2f} to {times['spread'][1]:.2f}) the throughput, {rates[name]} "
        f"sentences/s with beam {beams[name]} against {rates[teacher]} with beam {beams[teacher]}; BLEU "
        f"{metrics[name]['bleu']:.2f} against {metrics[teacher]['bleu']:.2f} ({content['data']}; "
        f"{markdown.source(report, markdown.MODELS)})"
    )


def _threads(name: str, report: markdown.Report) -> str:
    content = report.content
    rates = {count: f"{rate['median']:,.0f}" for count, rate in content["sentences_per_second"].items()}
    return (
        f"{name}, native engine, text to text: {rates['2']} sentences/s with two threads, {rates['1']} with one "
        f"({content['times_as_fast']:.2f}x; {content['data']}; {markdown.source(report, markdown.BENCHMARKS)}).\n"
    )


def _beside_engines(report: markdown.Report) -> str:
    """Engines: a fixed number of tokens per sentence, and a test set from text to text."""
    environment = report.content["environment"]
    cases = report.content["cases"]
    setting = environment["ctranslate2"]
    if isinstance(setting, dict):
        setting = ", ".join(f"{key}={value}" for key, value in setting.items())
    parts = [f"On {markdown.source(report, markdown.BENCHMARKS)}; instruction set of CTranslate2: {setting}.\n"]
    columns = ["model", "batch size", "beam", "engine", "sentences/s", "tokens/s", "peak MB (PSS)"]
    ours = [engine for engine in (*OURS, LISTED) if any(engine in case["ratios"] for case in cases)]
    gains = [f"speed-up of {engine}" for engine in ours]
    fixed = [case for case in cases if case["task"] == "steps"]
    texts = [case for case in cases if case["task"] == "text"]
    if fixed:
        rows = []
        for case in fixed:
            rows += [_row(case, result, ours, f"{result['ms_a_step']['median']:.3f}") for result in case["results"]]
        parts.append(
            f"Decoding of exactly {fixed[0]['steps']} tokens per sentence:\n\n"
            + markdown.table([*columns, "ms per step", *gains], rows)
        )
    if texts:
        rows = []
        for case in texts:
            for result in case["results"]:
                quality = [f"{result[key]:.2f}" for key in ("bleu", "chrf")]
                rows.append(_row(case, result, ours, *quality, f"{result['search_per_second']['median']:,.1f}"))
        quality_columns = ["BLEU", "chrF", "sentences/s without tokenization"]
        parts.append(
            f"Text to text, {environment['test_set']}; `{environment['signatures']['bleu']}`:\n\n"
            + markdown.table([*columns, *quality_columns, *gains], rows)
        )
    return "\n".join(parts)


def _row(case: dict[str, Any], result: dict[str, Any], ours: Sequence[str], *more: str) -> list[str]:
    """Cells of one engine's result; ours: the engines with a column of their speed-up over it."""
    memory = result["memory_mb"]
    ratios = [case["ratios"].get(engine, {}).get(result["engine"]) for engine in ours]
    return [
        case["model"],
        str(case["batch_size"]),
        str(case["beam"]),
        result["engine"],
        f"{result['sentences_per_second']['median']:,.1f}",
        f"{result['tokens_per_second']['median']:,.0f}",
        f"{memory['peak']:.0f} ({memory['shares']:.0f})",
        *more,
        *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
    ]


def _rewrites(report: markdown.Report) -> str:
    """The gain of each rewrite of translation: ms per decoding step with and without it."""
    parts = [f"On {markdown.source(report, markdown.BENCHMARKS)}.\n"]
    for model in report.content["models"]:
        measured = [(case["batch_size"], case["beam"]) for row in model["rows"] for case in row["cases"]]
        cases = list(dict.fromkeys(measured))
        rows = []
        for row in model["rows"]:
            cells = {
                (case["batch_size"], case["beam"]): f"{case['on']:.3f} / {case['off']:.3f} ({case['times']:.2f}x)"
                for case in row["cases"]
            }
            rows.append([row["rewrite"], *(cells.get(case, "") for case in cases)])
        columns = [f"{model['model']}, {model['precision']}", *(f"batch {size}, beam {beam}" for size, beam in cases)]
        parts.append(markdown.table(columns, rows))
    return "\n".join(parts)
