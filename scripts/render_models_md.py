"""Render MODELS.md, and the figures in README.md, from the cards and the report files under zoo/weights/.

`--check` only says whether both are up to date.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import zoo
from pipelines.core import files
from pipelines.models.hub import Hub

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "MODELS.md"
README = ROOT / "README.md"
PEERS = ROOT / "scripts" / "peers"
TRANSLATORS = ("zoo-native", "zoo-int8")  # whose gain over the peers is told
HEAD = """# Models

Rendered by `scripts/render_models_md.py` from the cards and the report files in `zoo/weights/*/`; do not edit. Every figure comes from
a report file there, made by `scripts/reproduce.py`. Times are of one run, engines and precisions in turn, one pinned thread.
"""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def reports(name: str, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """(file name, content) of the reports of one kind, one per CPU where it is a timing."""
    folder = zoo.SHIPPED / name / "reports"
    return [(path.name, files.read_json(path)) for path in sorted(folder.glob(f"{kind}*.json"))]


def beside_peers(script: str) -> list[tuple[str, dict[str, Any]]]:
    """(file, content) of the reports of a script that measures this project beside others, one per CPU."""
    return [
        (str(path.relative_to(ROOT)), files.read_json(path))
        for path in sorted((PEERS / "reports").glob(f"{script}-*.json"))
    ]


def place(found: dict[str, Any]) -> str:
    environment = found["environment"]
    versions = ", ".join(f"{key} {environment['versions'][key]}" for key in ("onnxruntime", "openvino", "python"))
    cpu = f"{environment['cpu']} (family/model {environment['cpu_model']}; {', '.join(environment['isa'])})"
    threads = environment.get("threads", 1)
    return f"{cpu}, {threads} thread{'s' * (threads > 1)}, {versions}, commit {environment['commit']}"


def quality(name: str) -> str:
    parts = []
    for file, found in reports(name, "quality"):
        keys = list(found["metrics"]["fp32"])
        rows = [
            [
                precision,
                *(f"{found['metrics'][precision][key]:.4f}" for key in keys),
                "" if precision == "fp32" else f"{moved:.4f}",
            ]
            for precision, moved in (("fp32", 0.0), ("int8", found["difference"]["max_probability"]))
        ]
        if native := found.get("native"):
            values = [f"{native['metrics'][key]:.4f}" for key in keys]
            rows.append(["int8, native kernels", *values, f"{native['difference']['max_probability']:.4f}"])
        rows += [
            [
                f"int8 by {peer}",
                *(f"{each['metrics'][key]:.4f}" for key in keys),
                f"{each['difference']['max_probability']:.4f}",
            ]
            for peer, each in found.get("peers", {}).items()
        ]
        low, high = found["interval"]["auc"]
        parts.append(
            f"Quality on {found['data']} ({found['samples']:,} rows, {found['clicks']:,} clicks; `reports/{file}`):\n\n"
            + table(["", *keys, "largest change of a probability"], rows)
            + f"\nint8 - fp32, 95% paired bootstrap interval of the AUC difference: [{low:+.5f}, {high:+.5f}]. "
            "These are figures of the recipe; the shipped weights were then trained by it on all rows.\n"
        )
    return "\n".join(parts)


def speed(name: str) -> str:
    parts = []
    for file, found in reports(name, "speed"):
        floats = {
            (e["engine"], e["batch_size"]): e["samples_per_second"]
            for e in found["results"]
            if e["precision"] == "fp32"
        }
        ordered = sorted(found["results"], key=lambda e: (-e["batch_size"], e["precision"], e["engine"]))
        rows = []
        for each in ordered:
            same = [
                rate
                for (engine, size), rate in floats.items()
                if size == each["batch_size"] and engine == each["engine"]
            ]
            ratio = each["samples_per_second"] / max(
                same or [rate for (_, size), rate in floats.items() if size == each["batch_size"]]
            )
            split = " / ".join(f"{ms:.3f}" for ms in each["split_ms"].values())
            latency = " / ".join(f"{each['latency_ms'][key]:.3f}" for key in ("p50", "p95", "p99"))
            rows.append(
                [
                    str(each["batch_size"]),
                    each["precision"],
                    each["engine"],
                    f"{each['samples_per_second']:,.0f}",
                    f"{ratio:.2f}x",
                    latency,
                    split,
                    f"{each['memory_mb']:.0f}",
                ]
            )
        columns = [
            "batch",
            "precision",
            "engine",
            "samples/s (model alone)",
            "to fp32 (of the engine; native: of the quicker)",
            "p50 / p95 / p99 ms",
        ]
        parts.append(
            f"Speed on {place(found)} (`reports/{file}`):\n\n"
            + table([*columns, "pre / model / post ms", "process MB"], rows)
        )
    return "\n".join(parts)


def stream(name: str) -> str:
    parts = []
    for file, found in reports(name, "stream"):
        split = ", ".join(f"{stage} {us:.2f}" for stage, us in found["split_us"].items())
        parts.append(
            f"`zoo run` on {found['rows']:,} synthetic rows, file to file: {found['rows_per_second']:,.0f} rows/s, "
            "peak memory "
            f"{found['peak_memory_mb']:.0f} MB; microseconds a row: {split} ({found['precision']} in "
            f"{found['engine']}; {place(found)}; "
            f"`reports/{file}`).\n"
        )
    return "\n".join(parts)


def training(name: str) -> str:
    parts = []
    for file, found in reports(name, "training"):
        seconds, rows = found["seconds"], found["trained_rows"]
        loop = sum(seconds[each] for each in ("wait", "step", "save"))
        facts = [
            ["rows/s of the training loop", f"{rows / loop:,.0f}"],
            ["rows/s of the training step alone", f"{rows / seconds['step']:,.0f}"],
            ["the loop waits for its input", f"{100 * seconds['wait'] / loop:.2f}% of its time"],
            ["reading, hashing and keeping all rows, once", f"{seconds['read']:,.0f} s"],
            [
                "whole process",
                f"{found['process_seconds']:,.0f} s, {found['processor_seconds']:,.0f} s of processor time",
            ],
            ["peak memory (resident, of the process)", f"{found['peak_memory_mb']:,.0f} MB"],
        ]
        size = f"{' x '.join(map(str, found['hidden']))}, {found['buckets']:,} buckets of {found['embedding_size']} a field"
        versions = ", ".join(
            f"{key} {found['environment']['versions'][key]}" for key in ("tensorflow", "keras", "numpy")
        )
        parts.append(
            f"Training for an epoch over {rows:,} rows (`{found['data']}`), layers {size}, batches of "
            f"{found['batch_size']:,}, one thread "
            f"of TensorFlow, not pinned, load average {found['load_average'][1]:.1f}; {versions}; "
            f"{place(found)} (`reports/{file}`):\n\n" + table(["", ""], facts)
        )
    return "\n".join(parts)


def instances(name: str) -> str:
    parts = []
    for file, found in reports(name, "instances"):
        rows = [
            [
                each["precision"],
                each["engine"],
                str(each["instances"]),
                f"{each['samples_per_second']:,.0f}",
                f"{each['memory_mb']:.0f}",
            ]
            for each in found["results"]
        ]
        size = found["results"][0]["batch_size"]
        columns = ["precision", "engine", "instances", "samples/s together", "MB together (PSS)"]
        parts.append(
            f"Instances at once, pinned, batch {size}, on {place(found)} (`reports/{file}`):\n\n" + table(columns, rows)
        )
    return "\n".join(parts)


def peers(name: str) -> str:
    """Samples a second of all engines on the same weights and inputs, and the largest change of a probability."""
    parts = []
    for file, found in reports(name, "peers"):
        cases = list(dict.fromkeys((each["ids"], each["batch_size"]) for each in found["results"]))
        engines = list(dict.fromkeys(each["engine"] for each in found["results"]))
        rates = {(e["engine"], e["ids"], e["batch_size"]): e["samples_per_second"] for e in found["results"]}
        moved = {
            engine: max(e["max_probability"] for e in found["results"] if e["engine"] == engine) for engine in engines
        }
        rows = [
            [
                engine,
                *(f"{rates[engine, *case]:,.0f}" if (engine, *case) in rates else "" for case in cases),
                f"{moved[engine]:.4f}",
            ]
            for engine in engines
        ]
        best = ["best of ours / best peer"]
        for case in cases:
            ours = max(
                rate for (engine, *each), rate in rates.items() if tuple(each) == case and engine.startswith("zoo-")
            )
            theirs = max(
                rate for (engine, *each), rate in rates.items() if tuple(each) == case and not engine.startswith("zoo-")
            )
            best.append(f"{ours / theirs:.2f}x")
        columns = ["samples/s", *(f"{ids}, batch {size}" for ids, size in cases), "largest change of a probability"]
        parts.append(
            "Beside the peers, same weights and inputs, model alone, ids by a Zipf law (1.1) and uniform, on "
            f"{place(found)}; "
            f"{others(found)} (`reports/{file}`, by `scripts/peers/wide_deep.py`):\n\n"
            + table(columns, [*rows, [*best, ""]])
        )
    return "\n".join(parts)


def runs(name: str) -> str:
    parts = []
    for file, found in reports(name, "runs"):
        base = found["results"][0]["seconds"]
        rows = [
            [
                each["way"],
                f"{each['rows_per_second']:,.0f}",
                f"{base / each['seconds']:.1f}x",
                f"{each['peak_memory_mb']:.0f}",
                f"{each['max_probability']:.4f}",
            ]
            for each in found["results"]
        ]
        columns = [
            "whole process, file to file",
            "rows/s",
            "to the first",
            "peak MB",
            "largest difference to the first",
        ]
        parts.append(
            f"From {found['rows']:,} raw rows to scores, on {place(found)} (`reports/{file}`, by "
            "`scripts/peers/criteo_run.py`; the start "
            "of the process included):\n\n" + table(columns, rows)
        )
    return "\n".join(parts)


def images(name: str) -> str:
    parts = []
    for file, found in reports(name, "images"):
        measured = found["quality"]
        best = {
            each["precision"]: min(
                e["latency_ms"]["p50"] for e in found["results"] if e["precision"] == each["precision"]
            )
            for each in found["results"]
        }
        rows = []
        for each in sorted(found["results"], key=lambda e: (e["precision"], e["engine"])):
            split = " / ".join(
                f"{each['split_ms'][step]:.2f}" for step in ("decode", "preprocess", "model", "postprocess")
            )
            latency = " / ".join(f"{each['latency_ms'][key]:.2f}" for key in ("p50", "p90", "p99"))
            gain = f"{best['fp32'] / each['latency_ms']['p50']:.2f}x"
            offline = f"{each['offline']['images_per_second']:,.0f} ({each['offline']['batch_size']})"
            shares = [f"{100 * measured['metrics'][each['precision']][key]:.2f}" for key in ("top1", "top5")]
            memory = f"{each['model_mb']:.1f} / {each['memory_mb']:.0f}"
            rows.append([each["precision"], each["engine"], *shares, latency, gain, split, offline, memory])
        columns = [
            "precision",
            "engine",
            "top-1 %",
            "top-5 %",
            "JPEG to label, p50 / p90 / p99 ms",
            "to the quicker fp32",
        ]
        low, high = measured["interval"]["agreement"]
        parts.append(
            f"On {found['data']}; one photo at a time and one thread, on {place(found)} (`reports/{file}`):\n\n"
            + table(
                [*columns, "decode / resize / model / post ms", "images/s in a stream (batch)", "file / process MB"],
                rows,
            )
            + f"\nint8 gives the same label as fp32 for {100 * measured['difference']['agreement']:.2f}% of the photos "
            f"(95% interval {100 * low:.2f} to {100 * high:.2f}).\n"
        )
    return "\n".join(parts)


def bleu(name: str) -> str:
    parts = []
    for file, found in reports(name, "bleu"):
        rows = [["fp32", *(f"{found['metrics']['fp32'][key]:.2f}" for key in ("bleu", "chrf")), ""]]
        for engine, metrics, each in (
            ("onnxruntime", found["metrics"]["int8"], found),
            ("native", found["native"]["metrics"], found["native"]),
        ):
            moved, interval = each["difference"], each["interval"]
            cells = [
                f"{metrics[key]:.2f} ({moved[key]:+.2f}, {interval[key][0]:+.2f} to {interval[key][1]:+.2f})"
                for key in ("bleu", "chrf")
            ]
            rows.append([f"int8, {engine}", *cells, f"{100 * moved['agreement']:.1f}%"])
        parts.append(
            f"On {found['data']}, {found['signatures']['bleu']}; in brackets: less fp32's, and the 95% interval by "
            "paired bootstrap "
            f"(`reports/{file}`):\n\n" + table(["precision", "BLEU", "chrF", "same translation as fp32"], rows)
        )
    return "\n".join(parts)


def threads(name: str) -> str:
    parts = []
    for file, found in reports(name, "threads"):
        rates = {count: f"{each['median']:,.0f}" for count, each in found["sentences_per_second"].items()}
        parts.append(
            f"On {place(found)}: {rates['2']} sentences/s from text to text in native code, {rates['1']} with one "
            "thread "
            f"({found['times_as_fast']:.2f}x; {found['data']}; `reports/{file}`).\n"
        )
    return "\n".join(parts)


def others(found: dict[str, Any]) -> str:
    """The versions of the other engines in a report."""
    return ", ".join(f"{key} {each}" for key, each in found["environment"]["peers"].items())


def section(title: str, script: str, one: Callable[[str, dict[str, Any]], str]) -> str:
    """What `one` makes of (file, report) of each of a script's reports, one per CPU; "" where there is none."""
    parts = [one(*each) for each in beside_peers(script)]
    return "\n".join([f"## {title}\n", *parts]) if parts else ""


def photos() -> str:
    """JPEG bytes to label here and in the obvious pipelines of others."""

    def one(file: str, found: dict[str, Any]) -> str:
        rows = []
        for each in found["models"]:
            for row in each["results"]:
                times = [f"{row['ms'][key]['median']:.2f}" for key in ("whole", "prepare", "model", "model_only")]
                beside = each["ours"].get(row["system"])
                gain = (
                    ["", ""]
                    if beside is None
                    else [f"{beside['times_as_fast']:.2f}x", f"{100 * beside['same_labels']:.1f}"]
                )
                rows.append([each["model"], row["system"], *times, *gain, f"{100 * row['labels_as_fp32']:.1f}"])
        columns = [
            "model",
            "pipeline",
            "JPEG to label, ms",
            "decode and resize",
            "model",
            "model alone, warm",
            "zoo-int8 is",
            "same label, %",
        ]
        counts = found["models"][0]["photos"]
        return (
            f"The obvious pipelines (Pillow, numpy, the peer's engine) and this one, same weights, {counts['tested']} "
            "photos one by one, "
            f"in turn, medians of processor time, on {place(found)}; {others(found)} (`{file}`, by "
            "`scripts/peers/images.py`). "
            "Same label: as zoo-int8 gives; the last column: as this project's fp32.\n\n"
            + table([*columns, "as fp32, %"], rows)
        )

    return section("Photos beside the peers", "images", one)


def quantizers() -> str:
    """This project's quantizer beside others, per network and setting."""

    def one(file: str, found: dict[str, Any]) -> str:
        rows = []
        for each in found["models"]:
            for row in each["results"]:
                for engine, figures in row["accuracy"].items():
                    times = [
                        each["milliseconds"].get(at, {}).get(row["setting"], {}).get("median")
                        for at in ("onnxruntime", "openvino")
                    ]
                    shown = [f"{figures[key]:.2f}" for key in ("drop", "agreement", "agreement_of_views")] + [
                        f"{figures['sqnr_db']:.1f}"
                    ]
                    cost = [f"{row['peak_mb']:,.0f}"]
                    rows.append(
                        [
                            each["model"],
                            row["setting"],
                            engine,
                            *shown,
                            *("" if ms is None else f"{ms:.2f}" for ms in times),
                            *cost,
                        ]
                    )
        counts = found["models"][0]["photos"]
        columns = [
            "network",
            "setting",
            "judged in",
            "top-1 drop",
            "agreement %",
            "of all views %",
            "SQNR dB",
            "ms in onnxruntime",
            "ms in OpenVINO",
            "MB",
        ]
        return (
            f"Post-training quantization of the same float files, calibrated on {counts['calibration']} photos, "
            "judged on "
            f"{counts['test']} others (agreement: share of labels equal to fp32's, one photo is .25 points; five "
            "views of each move less "
            "by chance, and the SQNR of the logits least); batch 1, one thread, in turn; the last column is the peak "
            "memory of quantizing. "
            "`zoo` is `zoo quantize --search`. "
            f"On {place(found)}; {others(found)} "
            f"(`{file}`, by `scripts/peers/vision.py`):\n\n" + table(columns, rows)
        )

    return section("The quantizer beside others", "vision", one)


def translations() -> str:
    """This project's translation beside other engines: exactly so many steps of each sentence, and a test set from text
    to text.
    """
    gains = [f"{name} is" for name in TRANSLATORS]

    def one(file: str, found: dict[str, Any]) -> str:
        columns = ["model", "batch", "beam", "engine", "sentences/s", "tokens/s", "MB at peak (PSS)"]
        steps, texts = ([case for case in found["cases"] if case["task"] == task] for task in ("steps", "text"))
        parts = [
            "The same weights and sentences, one thread and core, in turn, medians of processor time, on "
            f"{place(found)}; {others(found)}; "
            f"CTranslate2's instruction set: {_setting(found['environment']['ctranslate2'])} (`{file}`, by "
            "`scripts/peers/translation.py`). The last columns: how many times as fast int8 is here. "
            "`base`, `small`: random weights.\n"
        ]
        if steps:
            rows = [
                _translation(case, each, f"{each['ms_a_step']['median']:.3f}")
                for case in steps
                for each in case["results"]
            ]
            parts.append(
                f"Exactly {steps[0]['steps']} tokens of every sentence:\n\n"
                + table([*columns, "ms a step", *gains], rows)
            )
        if texts:
            quality = ["BLEU", "chrF", "sentences/s without tokenization"]
            rows = [
                _translation(
                    case,
                    each,
                    f"{each['bleu']:.2f}",
                    f"{each['chrf']:.2f}",
                    f"{each['search_per_second']['median']:,.1f}",
                )
                for case in texts
                for each in case["results"]
            ]
            parts.append(
                f"Text to text, {found['environment']['test_set']}; {found['environment']['signatures']['bleu']}:\n\n"
                + table([*columns, *quality, *gains], rows)
            )
        return "\n".join(parts)

    return section("Translation beside the peers", "translation", one)


def rewrites() -> str:
    """What each rewrite of translation is worth: ms a step with it and without."""

    def one(file: str, found: dict[str, Any]) -> str:
        parts = [
            "Milliseconds a step with the rewrite / without it (how many times as long without), in onnxruntime, on "
            f"{place(found)} "
            f"(`{file}`, by `scripts/translation_steps.py`, which says how each is compared).\n"
        ]
        for each in found["models"]:
            cases = list(
                dict.fromkeys((case["batch_size"], case["beam"]) for row in each["rows"] for case in row["cases"])
            )
            rows = []
            for row in each["rows"]:
                told = {
                    (c["batch_size"], c["beam"]): f"{c['on']:.3f} / {c['off']:.3f} ({c['times']:.2f}x)"
                    for c in row["cases"]
                }
                rows.append([row["rewrite"], *(told.get(case, "") for case in cases)])
            columns = [f"{each['model']}, {each['precision']}", *(f"batch {size}, beam {beam}" for size, beam in cases)]
            parts.append(table(columns, rows))
        return "\n".join(parts)

    return section("What each rewrite of translation is worth", "steps", one)


def _setting(said: Any) -> str:
    return ", ".join(f"{key}={value}" for key, value in said.items()) if isinstance(said, dict) else str(said)


def _translation(case: dict[str, Any], each: dict[str, Any], *more: str) -> list[str]:
    rates = [f"{each['sentences_per_second']['median']:,.1f}", f"{each['tokens_per_second']['median']:,.0f}"]
    memory = f"{each['memory_mb']['peak']:.0f} ({each['memory_mb']['shares']:.0f})"
    ratios = [case["ratios"].get(name, {}).get(each["engine"]) for name in TRANSLATORS]
    here = [case["model"], str(case["batch_size"]), str(case["beam"]), each["engine"]]
    return [*here, *rates, memory, *more, *("" if each is None else f"{each:.2f}x" for each in ratios)]


def model(name: str) -> str:
    card = Hub(zoo.SHIPPED).card(name)
    details = card.details
    facts = [
        ["family", card.entry],
        *([key, str(details[key])] for key in ("data", "licence", "origin", "limits") if key in details),
    ]
    calibration = {
        key: value for key, value in details.get("calibration", {}).items() if key in ("observer", "samples")
    }
    facts += [["calibration", ", ".join(f"{key} {value}" for key, value in calibration.items())]] if calibration else []
    facts += [
        [
            "files",
            ", ".join(f"{file.name} {file.size / 1e3:,.0f} kB" if file.size else file.name for file in card.files),
        ]
    ]
    parts = [
        f"## {name}\n\n{card.description}\n",
        table(["", ""], facts),
        quality(name),
        speed(name),
        peers(name),
        instances(name),
        stream(name),
        training(name),
        runs(name),
        images(name),
        bleu(name),
        threads(name),
    ]
    return "\n".join(part for part in parts if part)


def overview() -> str:
    """A line a model and precision, fp32 above int8: quality, speed in the quickest engine, memory, size."""
    rows = [row for name in zoo.names() for row in (*_of_images(name), *_of_clicks(name), *_of_sentences(name))]
    columns = [
        "model",
        "precision",
        "engine",
        "quality",
        "one pinned thread",
        "process MB",
        "file MB",
        "CPU (family/model)",
    ]
    return (
        "## Overview\n\nfp32 above int8, each in its quickest engine. The numbers leave out the start of a process "
        "and the loading of a "
        "model, which the first call pays, and for clicks the parsing of rows (`zoo run` below has it). Models that "
        "are not in the table "
        "can be built, but their weights could not be had where these figures were made.\n\n" + table(columns, rows)
    )


def _of_images(name: str) -> Iterator[list[str]]:
    for _, found in reports(name, "images"):
        for precision in ("fp32", "int8"):
            best = min(
                (e for e in found["results"] if e["precision"] == precision), key=lambda each: each["latency_ms"]["p50"]
            )
            quality = f"top-1 {100 * found['quality']['metrics'][precision]['top1']:.2f}%"
            rate = (
                f"{best['latency_ms']['p50']:.2f} ms from JPEG to label, "
                f"{best['offline']['images_per_second']:,.0f} images/s"
            )
            memory = f"{best['memory_mb']:.0f}", f"{best['model_mb']:.1f}"
            yield [name, precision, best["engine"], quality, rate, *memory, found["environment"]["cpu_model"]]


def _of_clicks(name: str) -> Iterator[list[str]]:
    for (_, judged), (_, found) in itertools.product(reports(name, "quality")[:1], reports(name, "speed")):
        size = max(each["batch_size"] for each in found["results"])
        for precision in ("fp32", "int8"):
            some = [each for each in found["results"] if each["precision"] == precision]
            best = max(
                (each for each in some if each["batch_size"] == size), key=lambda each: each["samples_per_second"]
            )
            single = min(each["latency_ms"]["p50"] for each in some if each["batch_size"] == 1)
            quality = f"AUC {judged['metrics'][precision]['auc']:.4f}"
            rate = f"{best['samples_per_second']:,.0f} rows/s in batches of {size}, {single:.3f} ms for one"
            memory = f"{best['memory_mb']:.0f}", _stored(name, precision)
            yield [name, precision, best["engine"], quality, rate, *memory, found["environment"]["cpu_model"]]


def _of_sentences(name: str) -> Iterator[list[str]]:
    for found, case in _text_to_text(name):
        results = {each["engine"]: each for each in case["results"]}
        for precision, engine, ours in (("fp32", "onnxruntime", "zoo-fp32"), ("int8", "native", "zoo-native")):
            if best := results.get(ours):
                quality = f"BLEU {best['bleu']:.2f} (beam {case['beam']})"
                rate = f"{best['sentences_per_second']['median']:,.0f} sentences/s from text to text"
                memory = f"{best['memory_mb']['peak']:.0f}", _stored(name, precision)
                yield [name, precision, engine, quality, rate, *memory, found["environment"]["cpu_model"]]


def _text_to_text(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(report, case) of every translation of a test set by this model."""
    for _, found in beside_peers("translation"):
        yield from ((found, case) for case in found["cases"] if (case["model"], case["task"]) == (name, "text"))


def _stored(name: str, precision: str) -> str:
    """MB of a shipped model's file; fp32 ships as float16, half as large."""
    kept = {file.name: (file.size or 0) / 1e6 for file in Hub(zoo.SHIPPED).card(name).files}
    return f"{2 * kept['fp16.onnx'] if precision == 'fp32' else kept['int8.onnx']:.1f}"


def summary(name: str) -> list[str]:
    """One line for README.md per report of speed: quality and the gain of int8, at the largest batch."""
    qualities = reports(name, "quality")
    if not qualities:
        return []
    measured = qualities[0][1]
    metrics, moved = measured["metrics"], measured["difference"]["max_probability"]
    said = ", ".join(f"{key} {metrics['fp32'][key]:.4f} -> {metrics['int8'][key]:.4f}" for key in ("auc", "logloss"))
    lines = []
    for _, found in reports(name, "speed"):
        size = max(each["batch_size"] for each in found["results"])
        rates = {
            (e["engine"], e["precision"]): e["samples_per_second"] for e in found["results"] if e["batch_size"] == size
        }
        best = max(rate for (_, precision), rate in rates.items() if precision == "fp32")
        gains = ", ".join(
            f"{rate / rates.get((engine, 'fp32'), best):.2f}x in {engine} ({rate:,.0f} samples/s)"
            for (engine, precision), rate in rates.items()
            if precision == "int8"
        )
        lines.append(
            f"- **{name}** ({found['environment']['cpu']}, one thread): fp32 -> int8 on {measured['samples']:,} "
            f"held-out rows: {said}, "
            f"largest change of a probability {moved:.4f}; "
            f"batch {size}: {gains}."
        )
    return lines


def translated(name: str) -> list[str]:
    """One line for README.md per report of translation from text to text: quality, and the gain over CTranslate2."""
    lines = []
    for found, case in _text_to_text(name):
        rates = {each["engine"]: each["sentences_per_second"]["median"] for each in case["results"]}
        measured = files.read_json(zoo.SHIPPED / name / "card.json")["metrics"]
        gains = case["ratios"]["zoo-native"]
        default = (
            f" ({gains['ctranslate2-default']:.2f}x its default, all in one batch)"
            if "ctranslate2-default" in gains
            else ""
        )
        lines.append(
            f"- **{name}** ({found['environment']['cpu']}, one thread): BLEU fp32 {measured['fp32']['bleu']:.2f}, "
            f"int8 {measured['native']['bleu']:.2f} (beam {case['beam']}); from text to text "
            f"{rates['zoo-native']:,.0f} sentences/s, "
            f"{gains['ctranslate2-int8']:.2f}x CTranslate2 int8 in batches of {case['batch_size']}{default}."
        )
    return lines


def classified(name: str) -> list[str]:
    """One line for README.md per report of photos: images a second from JPEG to label, and the gain over the peers'
    pipelines.
    """
    lines = []
    for _, found in beside_peers("images"):
        for each in (each for each in found["models"] if each["model"] == name):
            rows = {row["system"]: row for row in each["results"]}
            same = {system: f"{100 * row['labels_as_fp32']:.1f}%" for system, row in rows.items()}
            peers = {peer: beside["times_as_fast"] for peer, beside in each["ours"].items() if "int8" in peer}
            gains = [f"{times:.2f}x Pillow and {peer} ({same[peer]})" for peer, times in peers.items()]
            lines.append(
                f"- **{name}** ({found['environment']['cpu']}, one thread): from JPEG to label "
                f"{rows['zoo-int8']['images_per_second']:,.0f} images/s, "
                f"fp32's label on {same['zoo-int8']} of the photos; {', '.join(gains)}."
            )
    return lines


def readme(text: str) -> str:
    """README.md with the lines between its markers replaced."""
    start = text.index("\n", text.index("<!-- figures:")) + 1
    end = text.index("<!-- end of figures -->")
    lines = [line for name in zoo.names() for line in (*summary(name), *classified(name), *translated(name))]
    return text[:start] + "\n".join(lines) + ("\n" if lines else "") + text[end:]


def main() -> None:
    sections = [
        HEAD,
        overview(),
        *(model(name) for name in zoo.names()),
        photos(),
        quantizers(),
        translations(),
        rewrites(),
    ]
    wanted = {TARGET: "\n".join(filter(None, sections)), README: readme(README.read_text())}
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
        sys.exit(f"out of date: {', '.join(stale)}; run: python scripts/render_models_md.py" if stale else 0)
    for path, text in wanted.items():
        files.write_text(path, text)


if __name__ == "__main__":
    main()
