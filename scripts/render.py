"""Render MODELS.md, docs/benchmarks.md, the figures in README.md and its chart from the cards and the report files.

`--check` only says whether all four are up to date.
"""

from __future__ import annotations

import importlib
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import zoo
from pipelines.analysis import markdown
from pipelines.core import files
from pipelines.models.hub import Card, Hub

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts import render_chart as chart
from scripts.peers.quantization import own_models as peers

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "MODELS.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
CHART = ROOT / "docs" / "speed.svg"
PEERS = ROOT / "scripts" / "peers" / "reports"
SHIPPED = Hub(zoo.SHIPPED)
COLUMNS = ("model", "task", "data", "quality, fp32 / int8", "speed-up", "MB, fp32 / int8", "licence")
MODELS_HEAD = """# Models

<!-- Rendered by scripts/render.py from the cards and the report files; do not edit. -->

Each model on one pinned thread, on every CPU that was met. Speed-up: int8 in its quickest engine to fp32 in its quickest, engines and
precisions timed in turn in one run; rows in batches of 512 without parsing, photos from JPEG to label, sentences from text to text, texts
as a stream of mixed lengths. The start of a process and the loading of a model are left out. Models without figures can be built, but their
weights could not be had where the others were measured. Other projects beside this one, memory, rewrites, training, machines and versions:
[docs/benchmarks.md](docs/benchmarks.md).
"""
BENCHMARKS_HEAD = """# Benchmarks

<!-- Rendered by scripts/render.py from the report files; do not edit. -->

Everything that was measured of the models in [MODELS.md](../MODELS.md): each engine, other projects beside this one, memory, what a
rewrite is worth. Engines are compared only in turn within one run. `scripts/reproduce.py` measures it all again on your machine;
[Reports](#reports) states for each report file the machine, the versions and the commit.
"""
OWN_MODELS = """Real models out of PyPI packages, quantized by each tool's default command on the same samples, by `scripts/peers/quantization/own_models.py`
({source}). SQNR: of all outputs against fp32 in onnxruntime, in dB, the file as it is in either engine (shapes stay dynamic). Agreement:
percentage of samples with the same class (largest value, or side of .5), for other outputs to be read with the mean cosine. Milliseconds:
one sample, all files in turn. s (of CPU) and peak MB: of quantizing, on one core. Names that end in -shaped are networks of that shape with random
weights (`scripts/peers/quantization/detectors.py`).

"""


def sections_of(name: str) -> ModuleType | None:
    """The module of a model's family that renders its reports: `sections`, and what else of `Entry.report_sections` it
    has; None where the family has none.
    """
    module = zoo.entry(SHIPPED.card(name).entry).report_sections.partition(":")[0]
    return importlib.import_module(module) if module else None


def rendered(part: str, name: str) -> Any:
    """What the family's function `part` says of a model, None where it has no such function."""
    function = getattr(sections_of(name), part, None)
    return function(name) if function else None


def families() -> dict[ModuleType, list[str]]:
    """The modules that render reports, each with the names of its models."""
    models: dict[ModuleType, list[str]] = {}
    for name in SHIPPED.names():
        if module := sections_of(name):
            models.setdefault(module, []).append(name)
    return models


def opening(text: str) -> str:
    """The text as far as its first colon or full stop, without what stands in brackets."""
    return re.split(r":|\. |\.$", markdown.outside_brackets(text))[0]


def overview(name: str) -> list[str]:
    """The model's row of the overview."""
    card = SHIPPED.card(name)
    cells = {
        "model": f"[{name}](#{name.replace('.', '')})",
        "task": card.description.partition(":")[0].partition(",")[0],
        "data": opening(card.details["data"]),
        "licence": opening(card.details["licence"]),
        **(rendered("overview", name) or {}),
    }
    return [cells.get(column, "") for column in COLUMNS]


def facts(card: Card) -> str:
    """What the card says of a model: data, licence, origin, limits, calibration, files."""
    details = card.details
    keys = ("data", "licence", "origin", "limits")
    lines = [f"- **{key.capitalize()}:** {details[key]}" for key in keys if key in details]
    if calibration := details.get("calibration"):
        lines.append(f"- **Calibration:** observer {calibration['observer']}, {calibration['samples']} samples")
    sizes = [f"{file.name} {file.size / 1e3:,.0f} kB" if file.size else file.name for file in card.files]
    return "\n".join([*lines, f"- **Files:** {', '.join(sizes)}"]) + "\n"


def model(name: str) -> str:
    """The model's section of MODELS.md."""
    card = SHIPPED.card(name)
    architecture = f"; {card.details['architecture']}" if "architecture" in card.details else ""
    what = f"{card.description} Family `{card.entry}`{architecture}."
    parts = [f"## {name}\n", f"{what}\n", rendered("sections", name), facts(card)]
    return "\n".join(part for part in parts if part)


def models_page() -> str:
    rows = [overview(name) for name in SHIPPED.names()]
    parts = [recommenders(MODELS), *(model(name) for name in SHIPPED.names())]
    return "\n".join([MODELS_HEAD, markdown.table(COLUMNS, rows), *filter(None, parts)])


def environments() -> str:
    """A row a report: where it was measured and with what."""
    rows = []
    for report in [
        *(each for name in SHIPPED.names() for each in markdown.reports(zoo.SHIPPED / name / "reports", "")),
        *markdown.reports(PEERS, ""),
    ]:
        environment = report.content["environment"]
        versions = environment["versions"]
        engines = [versions[library] for library in ("onnxruntime", "openvino", "python")]
        libraries = {key: versions[key] for key in ("tensorflow", "keras") if key in versions}
        if libraries:
            libraries["numpy"] = versions["numpy"]
        libraries |= environment.get("peers", {})
        owner = report.path.parents[1].name
        rows.append(
            [
                f"{owner}: {markdown.link(report.path, BENCHMARKS)}",
                markdown.cpu(report),
                ", ".join(environment["isa"]),
                str(environment.get("threads", 1)),
                *engines,
                ", ".join(f"{library} {version}" for library, version in libraries.items()),
                environment["commit"],
            ]
        )
    columns = ["report", "CPU, family/model", "instruction sets", "threads", "onnxruntime", "openvino", "python"]
    return "## Reports\n\n" + markdown.table([*columns, "other libraries", "commit"], rows)


def own_models() -> str:
    """ONNX files that others wrote, beside other quantizers."""
    parts = []
    for report in (*markdown.reports(PEERS, "own-models"), *markdown.reports(PEERS, "detectors")):
        filled = [row + [""] * (len(peers.COLUMNS) - len(row)) for row in peers.rows(report.content)]
        parts.append(
            OWN_MODELS.format(source=markdown.source(report, BENCHMARKS)) + markdown.table(peers.COLUMNS, filled)
        )
    return "\n".join(["## ONNX files that others wrote\n", *parts]) if parts else ""


def recommenders(page: Path) -> str:
    """The families of recommenders on a log with columns of its own: quality and speed beside their peers."""
    parts = []
    for report in markdown.reports(PEERS, "click-models"):
        rows = []
        for each in report.content["models"]:
            quality = each["quality"]
            sizes = sorted({ratio["batch_size"] for ratio in each["ratios"]}, reverse=True)
            best = {size: _over_best(each, size) for size in sizes}
            rows.append(
                [
                    each["model"],
                    f"{quality['metrics']['fp32']['auc']:.4f} / {quality['metrics']['fp32']['logloss']:.4f}",
                    f"{quality['native']['difference']['auc']:+.5f}",
                    f"{quality['native']['difference']['max_probability']:.4f}",
                    *(f"{ratio:.2f}x {peer}" for ratio, peer in best.values()),
                ]
            )
        speeds = [f"batch {size}: the best peer" for size in best]
        columns = ["family", "AUC / LogLoss", "int8, native: AUC", "largest change of a probability", *speeds]
        deepctr = ", ".join(
            f"{name} {metrics['auc']:.4f} / {metrics['logloss']:.4f}"
            for name, metrics in report.content.get("deepctr", {}).items()
        )
        beside = f" DeepCTR-Torch on the same rows, the best of four epochs: {deepctr}." if deepctr else ""
        parts.append(
            "Trained on a log with columns of its own (users, items, lists) by the default recipes, judged on "
            f"{report.content['data']}; engines in turn, {markdown.source(report, page)}.{beside}\n\n"
            + markdown.table(columns, rows)
        )
    if page == BENCHMARKS:
        parts += [_reading(report) for report in markdown.reports(PEERS, "log-reading")]
    return "\n".join(["## Recommenders on a log of one's own\n", *parts]) if parts else ""


def _reading(report: markdown.Report) -> str:
    """The reader of any schema beside others, file to arrays."""
    rows = []
    for each in report.content["shapes"]:
        (other, ratio), quarter_and_all = next(iter(each["over"].items())), each["peak_memory_mb"]
        memory = " / ".join(f"{megabytes:,.0f}" for megabytes in quarter_and_all)
        speeds = {found["way"]: f"{found['rows_per_second']:,}" for found in each["results"]}
        ours = next(speed for way, speed in speeds.items() if way != other)
        rows.append([each["shape"], f"{each['megabytes']:,.0f}", other, speeds[other], ours, f"{ratio:.2f}x", memory])
    columns = ["log", "MB", "beside", "its rows/s", "rows/s", "as quick", "peak MB, a quarter / all"]
    return (
        f"Logs of {report.content['rows']:,} synthetic rows read to arrays by `scripts/peers/recommenders/log_reading.py` "
        f"({markdown.source(report, BENCHMARKS)}): Criteo's format beside the reader of that format alone, columns of "
        "one's own beside pandas with a hash a column.\n\n" + markdown.table(columns, rows)
    )


def _over_best(model: Mapping[str, Any], size: int) -> tuple[float, str]:
    """How much quicker the native kernels are than the quickest engine of others, and which that is."""
    (over,) = (r["over"] for r in model["ratios"] if (r["engine"], r["batch_size"]) == ("zoo-native", size))
    known = {peer: ratio for peer, ratio in over.items() if ratio is not None}  # null: never timed
    peer = min(known, key=known.__getitem__)
    return float(known[peer]), peer


SERVING = """`zoo serve` beside other servers, by `scripts/peers/serving/serving.py`: the server on one core, the load (wrk, 64 connections, one row of
wide-deep-criteo a request by the Open Inference Protocol) on the other, servers in turn, each started anew in every round; medians, least to
most. The others compute the same int8.onnx in onnxruntime by the obvious code of their documentation (`scripts/peers/serving/servers/`). Ended: what
SIGTERM led to, and processes that outlived it. Figures compare within a table alone: other work shared the machine while the layers were measured.

"""
LAYERS = "One native session behind each HTTP layer, answered on the server's own thread ({source}):"


def serving() -> str:
    """Servers beside each other, and what this one adds to the model alone."""
    parts = []
    for report in markdown.reports(PEERS, "serving"):
        source = markdown.source(report, BENCHMARKS)
        for part in report.content["parts"]:
            found = part["found"]
            if part["part"] == "workers":
                each = ", ".join(f"{one['workers']}: {one['memory_mb']} MB" for one in found)
                parts.append(
                    f"Memory of all processes (PSS) that serve wide-deep-criteo and multi30k-en-de, by workers: {each} ({source}).\n"
                )
            elif isinstance(found, list):
                title = LAYERS.format(source=source) if part["part"] == "layers" else f"One row a request ({source}):"
                parts.append(f"{title}\n\n{_servers(found)}")
            elif part["part"] == "rows":
                parts.append(
                    f"500 rows a request as TSV, answered in CSV: {found['served_rows_per_second']['median']:,.0f} rows/s, "
                    f"{found['share']:.2f} of `zoo run` in a process; at 70% of that load p99 "
                    f"{_tail(found['at_70_percent'])}, where requests come as a Poisson process "
                    f"{_tail(found['at_70_percent_poisson'])} ({source}).\n"
                )
            elif part["part"] == "lone":
                texts = [
                    f"a {name} {each['served_ms']['median']:.2f} ms, {each['added_ms']:+.2f} ms"
                    for name, each in found.items()
                ]
                parts.append(f"A lone request, and what that adds to the call alone: {'; '.join(texts)} ({source}).\n")
            else:
                parts.append(
                    f"multi30k-en-de, {found['clients']} clients with a sentence a request: "
                    f"{found['served_per_second']['median']:,.0f} sentences/s, {found['share']:.2f} of 512 in one call in "
                    f"a process, p99 {found['p99_ms']['median']:.0f} ms; a lone sentence {found['lone_added_ms']:+.2f} ms "
                    f"({source}).\n"
                )
    for report in markdown.reports(PEERS, "soak-serving"):
        found = report.content
        counts, memory, descriptors = found["counts"], found["memory_mb"], found["descriptors"]
        parts.append(
            f"`scripts/peers/serving/soak.py`, {found['minutes']:g} minutes, {found['rate']:,.0f} requests/s of at most "
            f"{found['greatest_rate']:,.0f}, {found['workers_killed']} workers killed, slow, broken and oversized clients "
            f"among the others: {counts['200']:,} answers, {counts.get('wrong', 0)} wrong, {counts.get('lost', 0)} requests "
            f"without an answer, {counts.get('503', 0)} of 503; memory {memory['first']:.0f} to {memory['last']:.0f} MB, "
            f"{memory['slope_per_minute']:+.1f} a minute, {descriptors['least']} to {descriptors['most']} descriptors "
            f"({markdown.source(report, BENCHMARKS)}).\n"
        )
    return "\n".join(["## Serving\n", SERVING + "\n".join(parts)]) if parts else ""


def clusters() -> str:
    """Scoring by several processes, and Ray, from the start of a process to its end."""
    parts = []
    for report in markdown.reports(PEERS, "cluster"):
        found, rows = report.content, []
        for way, each in found["results"].items():
            equal = {True: "the same bytes", False: "other bytes"}.get(each.get("equal"), "")
            memory = [f"{each[key]:,}" if key in each else "" for key in ("memory_mb", "worker_mb")]
            rate = f"{each['rows_per_second']:,}"
            rows.append([way, f"{each['rows']:,}", f"{each['seconds']:.1f}", rate, *memory, equal])
        head = ["", "rows", "seconds", "rows/s", "MB, largest process started", "MB, largest actor", "as one process"]
        parts.append(
            f"{found['model']}, {found['rows']:,} rows in {found['files']} Parquet files, from the start of the process to "
            f"its end, by `scripts/peers/distributed/cluster.py` ({markdown.source(report, BENCHMARKS)}). {found.get('note', '')}\n\n"
            f"{markdown.table(head, rows)}"
        )
    for report in markdown.reports(PEERS, "ray-serve"):
        found, rows = report.content, []
        for each in found["results"]:
            times = [f"{each[name]:,.1f}" for name in ("rate", "p50", "p99")]
            rows.append([each["way"], f"{each['rows']}", *times])
        head = ["", "rows a request", "requests/s", "p50, ms", "p99, ms"]
        parts.append(
            f"{found['model']}, a worker beside a replica, {found['clients']} clients, in turn, by "
            f"`scripts/peers/serving/ray_serve.py` ({markdown.source(report, BENCHMARKS)}). {found.get('note', '')}\n\n"
            f"{markdown.table(head, rows)}"
        )
    for report in markdown.reports(PEERS, "communication"):
        rows = []
        for model in report.content["models"]:
            for each in model["links"]:
                before, left = each["samples"] / each["seconds"], {at["machines"]: at for at in each["efficiency"]}
                rates = [f"{before:.1f}", f"{before * each['speedup']:.1f} ({each['speedup']:.2f}x)"]
                shares = [f"{share:.0%}" for share in each["share"]]
                paper = [f"{left[count][way]:.0%}" for count in (8, 128) for way in ("default", "tuned")]
                rows.append([model["model"], each["link"], *rates, *shares, *paper])
        head = ["", "link", "samples/s, default", "tuned", "exchange, share of a step", "tuned"]
        head += ["with 8 machines, default", "tuned", "with 128, default", "tuned"]
        parts.append(
            "Gradients of two processes, one core each, over links that `tc` and a relay shape, by "
            f"`scripts/peers/distributed/communication.py` ({markdown.source(report, BENCHMARKS)}). With more machines, on paper: "
            "the share of their own speed that is left, each with the same batch, where as much of the exchange lies "
            f"beside the backward pass as here.\n\n{markdown.table(head, rows)}"
        )
    return "\n".join(["## Several processes, and Ray\n", *parts]) if parts else ""


def _tail(found: Mapping[str, Any]) -> str:
    return f"{found['p99']['median']:.1f} ms, {found['p99_by_median']['median']:.1f} times the median"


def _ended(code: int | None) -> str:
    if code is None:
        return "not within 10 s"
    return f"exit {code}" if code >= 0 else f"by {signal.Signals(-code).name} itself"


def _servers(found: list[Mapping[str, Any]]) -> str:
    rows = []
    for each in found:
        if "left_out" in each:
            rows.append([each["server"], each["left_out"], *[""] * 7])
            continue
        rate, stop = each["requests_per_second"], each["stop"]
        rows.append(
            [
                f"{each['server']} {each['version']}",
                f"{rate['median']:,.0f} ({rate['spread'][0]:,.0f} to {rate['spread'][1]:,.0f})",
                *(f"{each[key]['median']:.2f}" for key in ("p50_ms", "p99_ms", "lone_p50_ms", "ready_seconds")),
                f"{each['memory_mb']['median']:.0f}",
                f"{_ended(stop['exit'])}, {stop['left']} left",
                f"{each['package_mb']:.0f}",
            ]
        )
    columns = ["server", "requests/s", "p50 ms", "p99 ms", "one connection, p50 ms", "s to ready", "MB (PSS)", "ended"]
    return markdown.table([*columns, "MB with what it requires"], rows)


def smaller() -> str:
    """Models before and after they were cut, and several contexts of one opened model."""
    parts = []
    for report in markdown.reports(PEERS, "smaller"):
        for found in report.content["models"]:
            before, after = found["quality"]
            rows = [
                [name, *(f"{each[key]['median']:.3f}" for key in ("before_ms", "after_ms")), f"{each['times']:.2f}x"]
                for name, each in found["engines"].items()
            ]
            peers = "".join(
                f"; {name}, its own pruning and training of {each['epochs']} epochs in {each['engine']}: "
                f"{found['metric']} {each['quality'][0]:.4f} -> {each['quality'][1]:.4f}, "
                f"{each['bytes'][0] / 1e6:.2f} -> {each['bytes'][1] / 1e6:.2f} MB"
                for name, each in found.get("peers", {}).items()
            )
            peers += "".join(f"; {name} is left out: {why}" for name, why in found.get("left_out", {}).items())
            parts.append(
                f"{found['model']}, batches of {found['batch_size']}, int8: {found['metric']} {before:.4f} -> {after:.4f}, "
                f"{found['bytes'][0] / 1e6:.2f} -> {found['bytes'][1] / 1e6:.2f} MB, by `scripts/peers/compression/compression.py` "
                f"({markdown.source(report, BENCHMARKS)}); peer: onnxruntime's own quantizer{peers}.\n\n"
                f"{markdown.table(['', 'before, ms', 'after, ms', 'times as fast'], rows)}"
            )
    for report in markdown.reports(PEERS, "contexts"):
        rows = [
            [
                each["model"],
                each["engine"],
                f"{each['batch_size']}",
                f"{each['times']:.2f}x",
                f"{each['megabytes']:+.1f}",
            ]
            for each in report.content["models"]
        ]
        parts.append(
            f"Two contexts beside one of an opened model, by `scripts/peers/serving/contexts.py` "
            f"({markdown.source(report, BENCHMARKS)}).\n\n"
            f"{markdown.table(['', 'engine', 'batch size', 'batches a second', 'MB more'], rows)}"
        )
    return "\n".join(["## Smaller, and several at once\n", *parts]) if parts else ""


def benchmarks_page() -> str:
    parts = [module.benchmarks(names) for module, names in families().items() if hasattr(module, "benchmarks")]
    return "\n".join(
        filter(
            None,
            [
                BENCHMARKS_HEAD,
                *parts,
                recommenders(BENCHMARKS),
                own_models(),
                serving(),
                clusters(),
                smaller(),
                environments(),
            ],
        )
    )


def readme(text: str) -> str:
    """README.md with the lines between its markers replaced."""
    start = text.index("\n", text.index("<!-- figures:")) + 1
    end = text.index("<!-- end of figures -->")
    lines = [line for name in SHIPPED.names() for line in rendered("headline", name) or ()]
    return text[:start] + "".join(f"{line}\n" for line in lines) + text[end:]


def main() -> None:
    wanted = {MODELS: models_page(), BENCHMARKS: benchmarks_page(), README: readme(README.read_text())}
    wanted[CHART] = chart.svg(chart.loads())
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
        sys.exit(f"out of date: {', '.join(stale)}; run: python scripts/render.py" if stale else 0)
    for path, text in wanted.items():
        files.write_text(path, text)


if __name__ == "__main__":
    main()
