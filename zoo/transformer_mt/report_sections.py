"""What the pages of the zoo show of translation models, rendered from their report files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import zoo
from pipelines.analysis.markdown import (
    Report,
    by_cpu,
    cpu_name,
    link,
    newest,
    outside_brackets,
    reports,
    source,
    stored_megabytes,
    table,
)
from pipelines.models.hub import Hub

ROOT = zoo.SHIPPED.parents[1]
MODELS = ROOT / "MODELS.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
PEERS = ROOT / "scripts" / "peers" / "reports"
OURS = ("zoo-native", "zoo-int8")  # whose gain over the other engines is shown
LISTED = "zoo-shortlist"  # and this one's, where it was timed
ENGINES = """The same weights and sentences, one thread and core, in turn, medians of processor time, by
`scripts/peers/translation/translation.py`. The last columns: how many times as fast int8 is here. Random weights:
`base` (32,000 pieces), `opus` (the same with 58,101), `small`, and `firefox` (6 + 2 layers with SSRU in Marian's
format, imported).
zoo-shortlist: with logits of some 3,250 words of each sentence alone.

What batches of 32 leave to gain, of `opus` (perf, AMD EPYC 25/17): products of int8 are four fifths of the time of
zoo-native, at 85% (greedy) and 89% (beam 4) of the 236 G a second that `zoo doctor --speed` gives as the limit of the
instructions. Attention takes 10% and 7%, top-k 6% and 7%. Fewer products, by a shortlist, gain more than all of these.
"""
REWRITES = """Milliseconds a decoding step with the rewrite / without it (how many times as long without), in
onnxruntime, by `scripts/peers/translation/rewrites.py`, which says how each is compared.
"""


class TextToText(NamedTuple):
    """A model's translations of a test set: the report, its case, and the results by engine."""

    report: Report
    case: dict[str, Any]
    results: dict[str, dict[str, Any]]

    def rate(self, engine: str) -> float:
        """Sentences a second."""
        return float(self.results[engine]["sentences_per_second"]["median"])

    def speed_up(self) -> str:
        """The native engine to fp32."""
        rate = self.rate("zoo-native")
        return f"{rate / self.rate('zoo-fp32'):.2f}x: {rate:,.0f} sentences/s, native"


def overview(name: str) -> dict[str, str]:
    """The model's cells in the overview, by column."""
    qualities = reports(zoo.SHIPPED / name / "reports", "bleu")
    if not qualities:
        return {}
    quality = newest(qualities).content
    bleu = f"{quality['metrics']['fp32']['bleu']:.2f} / {quality['native']['metrics']['bleu']:.2f}"
    card = Hub(zoo.SHIPPED).card(name)
    students = ((each, _times_teacher(name, each)) for each in reports(zoo.SHIPPED / name / "reports", "teacher"))
    return {
        "data": outside_brackets(card.details["data"]).partition(": ")[2],
        "quality, fp32 / int8": f"BLEU {bleu} (beam {quality['beam']})",
        "speed-up": by_cpu([*((each.report, each.speed_up()) for each in _texts_to_texts(name)), *students]),
        "MB, fp32 / int8": stored_megabytes({file.name: file.size or 0 for file in card.files}),
    }


def _times_teacher(name: str, report: Report) -> str:
    """A student's speed beside its teacher's, both in int8."""
    times, rate = report.content["times_as_fast"]["median"], report.content["sentences_per_second"][name]["median"]
    return f"{times:.2f}x its teacher: {rate:,.0f} sentences/s, native"


def headline(name: str) -> list[str]:
    """README's lines about the model, one a CPU: quality, and the gain over CTranslate2 from text to text."""
    lines = []
    for text in _texts_to_texts(name):
        metrics = Hub(zoo.SHIPPED).card(name).details["metrics"]
        gains = text.case["ratios"]["zoo-native"]
        default = gains.get("ctranslate2-default")
        all_at_once = f" ({default:.2f}x its default, all in one batch)" if default else ""
        lines.append(
            f"- **{name}** ({cpu_name(text.report)}, one thread): BLEU fp32 {metrics['fp32']['bleu']:.2f}, int8 "
            f"{metrics['native']['bleu']:.2f} (beam {text.case['beam']}); from text to text "
            f"{text.rate('zoo-native'):,.0f} sentences/s, {gains['ctranslate2-int8']:.2f}x CTranslate2 int8 in batches "
            f"of {text.case['batch_size']}{all_at_once}."
        )
    return lines


def sections(name: str) -> str:
    """The model's own part of its section in MODELS.md."""
    spec = Hub(zoo.SHIPPED).card(name).details["preprocessing"]
    parts = [
        f"- **Run:** `zoo run {name} text.txt -o translated.txt`",
        "- **Input:** sentences, one a line, tokenized by the SentencePiece vocabulary beside the model; a line of "
        f"more than {spec['max_length']} tokens is cut at the ends of its sentences",
    ]
    if qualities := reports(zoo.SHIPPED / name / "reports", "bleu"):
        parts.append(_quality(newest(qualities)))
    parts += [_beside_teacher(name, each) for each in reports(zoo.SHIPPED / name / "reports", "teacher")]
    for text in _texts_to_texts(name):
        rates = {engine: f"{text.rate(engine):,.0f}" for engine in text.results}
        gain = {engine: f"{text.rate(engine) / text.rate('zoo-fp32'):.2f}x" for engine in OURS}
        rows = [
            ["onnxruntime", rates["zoo-fp32"], rates["zoo-int8"], gain["zoo-int8"]],
            ["native", "", rates["zoo-native"], gain["zoo-native"]],
        ]
        parts.append(
            f"- **Speed** from text to text, beam {text.case['beam']}, batch size {text.case['batch_size']} "
            f"({source(text.report, MODELS)}):\n\n"
            + table(["engine", "fp32 sentences/s", "int8 sentences/s", "int8 is"], rows)
        )
    return "\n".join(parts)


def benchmarks(names: Sequence[str]) -> str:
    """The part of docs/benchmarks.md about the translation models called `names`."""
    threads = [_threads(name, each) for name in names for each in reports(zoo.SHIPPED / name / "reports", "threads")]
    engines = [_beside_engines(report) for report in reports(PEERS, "translation")]
    rewrites = [_rewrites(report) for report in reports(PEERS, "steps")]
    parts = [
        *(["### Threads\n", *threads] if threads else []),
        *(["### Beside other engines\n", ENGINES, *engines] if engines else []),
        *(["### What each rewrite is worth\n", REWRITES, *rewrites] if rewrites else []),
    ]
    return "\n".join(["## Translation\n", *parts]) if parts else ""


def _texts_to_texts(name: str) -> list[TextToText]:
    """The translations of a test set by a model, one a CPU."""
    measured = []
    for report in reports(PEERS, "translation"):
        for case in report.content["cases"]:
            if (case["model"], case["task"]) == (name, "text"):
                results = {result["engine"]: result for result in case["results"]}
                measured.append(TextToText(report, case, results))
    return measured


def _quality(report: Report) -> str:
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
        f"difference to fp32 and its 95% interval by paired bootstrap ({link(report.path, MODELS)}):\n\n"
        + table(["precision", "BLEU", "chrF", "same translation as fp32"], rows)
    )


def _beside_teacher(name: str, report: Report) -> str:
    content = report.content
    teacher, beams, metrics, times = (content[key] for key in ("teacher", "beams", "metrics", "times_as_fast"))
    rates = {each: f"{rate['median']:,.0f}" for each, rate in content["sentences_per_second"].items()}
    return (
        f"- **Beside its teacher** {teacher}, int8 in native code, from text to text, in turn: {times['median']:.2f}x "
        f"({times['spread'][0]:.2f} to {times['spread'][1]:.2f}) its sentences a second, {rates[name]} with beam "
        f"{beams[name]} beside {rates[teacher]} with beam {beams[teacher]}; BLEU {metrics[name]['bleu']:.2f} beside "
        f"{metrics[teacher]['bleu']:.2f} ({content['data']}; {source(report, MODELS)})"
    )


def _threads(name: str, report: Report) -> str:
    content = report.content
    rates = {count: f"{rate['median']:,.0f}" for count, rate in content["sentences_per_second"].items()}
    return (
        f"{name}: {rates['2']} sentences/s from text to text in native code with two threads, {rates['1']} with one "
        f"({content['times_as_fast']:.2f}x; {content['data']}; {source(report, BENCHMARKS)}).\n"
    )


def _beside_engines(report: Report) -> str:
    """Translation beside other engines: a fixed number of tokens of each sentence, and a test set from text to text."""
    environment = report.content["environment"]
    cases = report.content["cases"]
    setting = environment["ctranslate2"]
    if isinstance(setting, dict):
        setting = ", ".join(f"{key}={value}" for key, value in setting.items())
    parts = [f"On {source(report, BENCHMARKS)}; instruction set of CTranslate2: {setting}.\n"]
    columns = ["model", "batch size", "beam", "engine", "sentences/s", "tokens/s", "MB at peak (PSS)"]
    ours = [engine for engine in (*OURS, LISTED) if any(engine in case["ratios"] for case in cases)]
    gains = [f"{engine} is" for engine in ours]
    fixed = [case for case in cases if case["task"] == "steps"]
    texts = [case for case in cases if case["task"] == "text"]
    if fixed:
        rows = []
        for case in fixed:
            rows += [_row(case, result, ours, f"{result['ms_a_step']['median']:.3f}") for result in case["results"]]
        parts.append(
            f"Exactly {fixed[0]['steps']} tokens of every sentence:\n\n" + table([*columns, "ms a step", *gains], rows)
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
            + table([*columns, *quality_columns, *gains], rows)
        )
    return "\n".join(parts)


def _row(case: dict[str, Any], result: dict[str, Any], ours: Sequence[str], *more: str) -> list[str]:
    """Cells of one engine's result. ours: whose gain over it is shown."""
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


def _rewrites(report: Report) -> str:
    """What each rewrite of translation is worth: ms a decoding step with it and without."""
    parts = [f"On {source(report, BENCHMARKS)}.\n"]
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
        parts.append(table(columns, rows))
    return "\n".join(parts)
