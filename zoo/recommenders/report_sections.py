"""Sections on recommenders in MODELS.md and docs/benchmarks/, rendered from report files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import zoo
from pipelines.analysis import markdown
from pipelines.models.hub import Hub

OVERVIEW = "rows/s of the model in batches of 512"


def overview(name: str) -> dict[str, str]:
    """Renders the cells of a model in the overview table.

    Args:
        name: Name of the model.

    Returns:
        {column: cell}; {} if nothing was measured.
    """
    qualities, speeds = _reports(name, "quality"), _reports(name, "speed")
    if not qualities or not speeds:
        return {}
    metrics = markdown.newest(qualities).content["metrics"]
    return {
        "AUC": f"{metrics['fp32']['auc']:.4f} / {metrics['int8']['auc']:.4f}",
        **{markdown.cpu_column(speed): _speed_up(speed) for speed in speeds},
        "MB": markdown.stored_megabytes(zoo.SHIPPED / name),
    }


def _speed_up(speed: markdown.Report) -> str:
    """The throughput of int8 and its ratio to fp32, each in its fastest engine, at the largest batch size."""
    int8, fp32 = (_quickest(speed, precision, _largest(speed)) for precision in ("int8", "fp32"))
    rate = int8["samples_per_second"]
    return f"{rate:,.0f} ({rate / fp32['samples_per_second']:.2f}x)"


def sections(name: str) -> str:
    """Renders the body of a model's section in MODELS.md.

    Args:
        name: Name of the model.

    Returns:
        Markdown.
    """
    details = Hub(zoo.SHIPPED).card(name).details
    log = "rows.tsv" if name == "wide-deep-criteo" else "log.csv"
    parts = [f"- **Run:** `zoo run {name} {log} -o scores.csv`", f"- **Input:** {details['input']}"]
    if qualities := _reports(name, "quality"):
        parts.append(_quality(markdown.newest(qualities)))
    parts += [_speed_by_engine(speed) for speed in _reports(name, "speed")]
    return "\n".join(parts)


def benchmarks(names: Sequence[str]) -> str:
    """Renders the page of recommenders in docs/benchmarks/.

    Args:
        names: Names of the models.

    Returns:
        Markdown.
    """
    kinds = {
        "quality": ("quantizers", _beside_quantizers),
        "speed": ("engines", _speed),
        "peers": ("native kernels and other engines", _peers),
        "instances": ("parallel instances", _instances),
        "stream": ("`zoo run`", _stream),
        "runs": ("raw rows to scores", _whole_processes),
    }
    parts = []
    for name in names:
        for kind, (title, render) in kinds.items():
            rendered = [render(report) for report in _reports(name, kind)]
            parts += [f"## {name}: {title}\n", *rendered] if any(rendered) else []
        if trainings := _reports(name, "training"):
            parts += [f"## {name}: training\n", _training(trainings)]
    return "\n".join(["# Click-through rate\n", *parts]) if parts else ""


def _reports(name: str, kind: str) -> list[markdown.Report]:
    return markdown.reports(zoo.SHIPPED / name / "reports", kind)


def _largest(speed: markdown.Report) -> int:
    """The largest batch size of a report."""
    return int(max(result["batch_size"] for result in speed.content["results"]))


def _quickest(speed: markdown.Report, precision: str, size: int) -> dict[str, Any]:
    """The result of the fastest engine at a batch size."""
    results = [e for e in speed.content["results"] if (e["precision"], e["batch_size"]) == (precision, size)]
    return max(results, key=lambda result: float(result["samples_per_second"]))


def _gain(result: dict[str, Any], speed: markdown.Report) -> float:
    """Throughput relative to fp32 in the same engine, or in the fastest engine if this one has no fp32."""
    size = result["batch_size"]
    fp32 = {
        other["engine"]: other["samples_per_second"]
        for other in speed.content["results"]
        if (other["precision"], other["batch_size"]) == ("fp32", size)
    }
    return float(result["samples_per_second"] / fp32.get(result["engine"], max(fp32.values())))


def _metric_rows(
    measured: Iterable[tuple[str, dict[str, float], dict[str, float] | None]], keys: Sequence[str]
) -> list[list[str]]:
    """Cells of (label, metrics, difference to fp32 or None)."""
    return [
        [label, *(f"{metrics[key]:.4f}" for key in keys), f"{moved['max_probability']:.4f}" if moved else ""]
        for label, metrics, moved in measured
    ]


def _metric_columns(keys: Sequence[str]) -> list[str]:
    labels = {"auc": "AUC", "logloss": "LogLoss", "calibration_error": "calibration error"}
    return ["", *(labels.get(key, key) for key in keys), "max probability error"]


def _quality(report: markdown.Report) -> str:
    content = report.content
    keys = list(content["metrics"]["fp32"])
    measured = [("fp32", content["metrics"]["fp32"], None), ("int8", content["metrics"]["int8"], content["difference"])]
    if native := content.get("native"):
        measured.append(("int8, native", native["metrics"], native["difference"]))
    low, high = content["interval"]["auc"]
    again = content["model"] == "wide-deep-criteo"
    after = "The shipped weights were retrained on all rows with the same recipe. " if again else ""
    return (
        f"- **Quality** on {content['data']} ({content['samples']:,} rows, {content['clicks']:,} clicks; "
        f"{markdown.link(report.path, markdown.MODELS)}). {after}"
        f"AUC of int8 minus fp32, 95% interval by paired bootstrap: {low:+.5f} to {high:+.5f}.\n\n"
        + markdown.table(_metric_columns(keys), _metric_rows(measured, keys))
    )


def _speed_by_engine(report: markdown.Report) -> str:
    size = _largest(report)
    results = {(e["precision"], e["engine"], e["batch_size"]): e for e in report.content["results"]}
    rows = []
    for engine in sorted({key[1] for key in results}):
        cells = [engine]
        for precision in ("fp32", "int8"):
            result = results.get((precision, engine, size))
            cells.append(f"{result['samples_per_second']:,.0f}" if result else "")
        cells.append(f"{_gain(results['int8', engine, size], report):.2f}x")
        for precision in ("fp32", "int8"):
            single = results.get((precision, engine, 1))
            cells.append(f"{single['latency_ms']['p50']:.3f}" if single else "")
        rows.append(cells)
    columns = [
        "engine",
        "fp32 rows/s",
        "int8 rows/s",
        "int8 speed-up (native: over the faster fp32)",
        "one row, fp32 ms",
        "one row, int8 ms",
    ]
    return (
        f"- **Speed** of the model, batches of {size} and single rows ({markdown.source(report, markdown.MODELS)}):\n\n"
        + markdown.table(columns, rows)
    )


def _beside_quantizers(report: markdown.Report) -> str:
    content = report.content
    if not content.get("peers"):
        return ""
    keys = list(content["metrics"]["fp32"])
    measured = [("fp32", content["metrics"]["fp32"], None), ("int8", content["metrics"]["int8"], content["difference"])]
    measured += [(f"int8 by {peer}", e["metrics"], e["difference"]) for peer, e in content["peers"].items()]
    moved = content["metrics"]["int8"]["auc"] - content["metrics"]["fp32"]["auc"]
    title = f"int8 changes the AUC of fp32 by {moved:+.4f}.\n\n"
    return f"{title}On {content['data']} ({markdown.source(report, markdown.BENCHMARKS)}).\n\n" + markdown.table(
        _metric_columns(keys), _metric_rows(measured, keys)
    )


def _speed(report: markdown.Report) -> str:
    rows = []
    for result in sorted(report.content["results"], key=lambda e: (-e["batch_size"], e["precision"], e["engine"])):
        latency = " / ".join(f"{result['latency_ms'][key]:.3f}" for key in ("p50", "p95", "p99"))
        split = " / ".join(f"{ms:.3f}" for ms in result["split_ms"].values())
        rows.append(
            [
                str(result["batch_size"]),
                result["precision"],
                result["engine"],
                f"{result['samples_per_second']:,.0f}",
                f"{_gain(result, report):.2f}x",
                latency,
                split,
                f"{result['memory_mb']:.0f}",
            ]
        )
    columns = [
        "batch size",
        "precision",
        "engine",
        "rows/s, model only",
        "speed-up over fp32 (native: over the faster)",
        "p50 / p95 / p99 ms",
        "pre / model / post ms",
        "process MB",
    ]
    return f"On {markdown.source(report, markdown.BENCHMARKS)}.\n\n" + markdown.table(columns, rows)


def _peers(report: markdown.Report) -> str:
    """Throughput and maximum probability error of all engines on the same weights and inputs."""
    results = report.content["results"]
    cases = list(dict.fromkeys((result["ids"], result["batch_size"]) for result in results))
    engines = list(dict.fromkeys(result["engine"] for result in results))
    rates = {(e["engine"], e["ids"], e["batch_size"]): e["samples_per_second"] for e in results}
    rows = []
    for engine in engines:
        moved = max(result["max_probability"] for result in results if result["engine"] == engine)
        cells = [f"{rates[engine, *case]:,.0f}" if (engine, *case) in rates else "" for case in cases]
        rows.append([engine, *cells, f"{moved:.4f}"])
    best = ["best zoo engine / best peer"]
    for case in cases:
        of_case = {engine: rates[engine, *case] for engine in engines if (engine, *case) in rates}
        ours = max(rate for engine, rate in of_case.items() if engine.startswith("zoo-"))
        theirs = max(rate for engine, rate in of_case.items() if not engine.startswith("zoo-"))
        best.append(f"{ours / theirs:.2f}x")
    columns = ["rows/s", *(f"{ids}, batch size {size}" for ids, size in cases), "max probability error"]
    return (
        "Same weights and inputs, model only, ids drawn from a Zipf distribution (1.1) and uniformly, by "
        f"`scripts/peers/recommenders/wide_deep.py` ({markdown.source(report, markdown.BENCHMARKS)}).\n\n"
        + markdown.table(columns, [*rows, [*best, ""]])
    )


def _instances(report: markdown.Report) -> str:
    results = report.content["results"]
    rows = [
        [
            result["precision"],
            result["engine"],
            str(result["instances"]),
            f"{result['samples_per_second']:,.0f}",
            f"{result['memory_mb']:.0f}",
        ]
        for result in results
    ]
    columns = ["precision", "engine", "instances", "rows/s, total", "MB, total (PSS)"]
    rates = {result["engine"]: result["samples_per_second"] for result in results if result["precision"] == "int8"}
    peer = max(rates.keys() - {"native"}, key=rates.__getitem__)
    return (
        f"Native kernels: {rates['native'] / rates[peer]:.2f}x the rows/s of {peer} on the same int8 model.\n\n"
        f"Pinned processes, batch size {results[0]['batch_size']} ({markdown.source(report, markdown.BENCHMARKS)}).\n\n"
    ) + markdown.table(columns, rows)


def _stream(report: markdown.Report) -> str:
    content = report.content
    split = ", ".join(f"{stage} {microseconds:.2f}" for stage, microseconds in content["split_us"].items())
    return (
        f"{content['rows']:,} synthetic rows, file to file: {content['rows_per_second']:,.0f} rows/s, peak memory "
        f"{content['peak_memory_mb']:.0f} MB; microseconds a row: {split} ({content['precision']} in "
        f"{content['engine']}; {markdown.source(report, markdown.BENCHMARKS)}).\n"
    )


def _whole_processes(report: markdown.Report) -> str:
    results = report.content["results"]
    rows = [
        [
            result["way"],
            f"{result['rows_per_second']:,.0f}",
            f"{result['rows_per_second'] / results[0]['rows_per_second']:.1f}x",
            f"{result['peak_memory_mb']:.0f}",
            f"{result['max_probability']:.4f}",
        ]
        for result in results
    ]
    columns = ["process, file to file", "rows/s", "relative to the first", "peak MB", "max difference to the first"]
    content = report.content
    return (
        f"{content['rows']:,} rows, process start included, by `scripts/peers/recommenders/runs.py` "
        f"({markdown.source(report, markdown.BENCHMARKS)}).\n\n" + markdown.table(columns, rows)
    )


def _training(trainings: Sequence[markdown.Report]) -> str:
    rows = []
    for report in trainings:
        content, seconds = report.content, report.content["seconds"]
        loop = seconds.get("train") or sum(seconds[part] for part in ("wait", "step", "save"))
        layers = " x ".join(map(str, content["hidden"]))
        rows.append(
            [
                f"{markdown.source(report, markdown.BENCHMARKS)}, load average {content['load_average'][1]:.1f}",
                f"{content['trained_rows']:,} (`{content['data']}`)",
                f"{layers}; {content['buckets']:,} buckets of {content['embedding_size']} a field",
                f"{content['batch_size']:,}",
                f"{content['trained_rows'] / loop:,.0f}",
                f"{content['trained_rows'] / seconds['step']:,.0f}" if "step" in seconds else "",
                f"{100 * seconds['wait'] / loop:.2f}%" if "wait" in seconds else "",
                f"{seconds['read']:,.0f} s" if "read" in seconds else "",
                f"{content['process_seconds']:,.0f} s, {content['processor_seconds']:,.0f} s of CPU time",
                f"{content['peak_memory_mb']:,.0f}",
            ]
        )
    facts = [
        "rows",
        "layers",
        "batch size",
        "training loop, rows/s",
        "training step, rows/s",
        "time waiting for input",
        "reading, hashing and storing the rows, once",
        "process",
        "peak memory (resident), MB",
    ]
    columns, *cells = zip(*rows, strict=True)
    lines = [[fact, *values] for fact, values in zip(facts, cells, strict=True)]
    return "One epoch, one thread, not pinned.\n\n" + markdown.table(["", *columns], lines)
