"""Commands that measure models: evaluate, benchmark, plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from zoo.cli.options import (
    Numbers,
    Share,
    Words,
    as_json,
    batch_size,
    combined,
    engine,
    engines,
    evaluated_columns,
    on_error,
    preprocess,
    refuse,
    threads,
)
from zoo.cli.output import emit, interval, left_out, number, percent, table

batch_sizes = click.option(
    "--batch-size",
    "batch_sizes",
    type=Numbers(),
    default=None,
    help="Batch sizes. [default: 512 rows, 4 images, 32 sentences or texts; 1 for an .onnx file]",
)

REPEATS = 5  # permutations of a column, by default


@click.command()
@click.argument("model")
@click.option("--data", multiple=True, help="Labelled input; repeatable. [default: the model's sample]")
@click.option(
    "--precision",
    "precisions",
    type=Words(),
    default="fp32,int8",
    show_default=True,
    help="Precisions to compare with fp32.",
)
@click.option(
    "--importance",
    is_flag=True,
    help="Recommenders: permutation importance of every column, the drop of the AUC and the rise of the LogLoss.",
)
@click.option(
    "--repeats", type=click.IntRange(1), default=None, help="With --importance: permutations of a column. [default: 5]"
)
@combined(evaluated_columns, engine, threads, batch_size, on_error, as_json)
def evaluate(
    model: str, data: tuple[str, ...], as_json: bool, importance: bool, repeats: int | None, **options: Any
) -> None:
    """Compare the quality of fp32 and int8 (or bf16) on the same samples."""
    from zoo import api

    if repeats is not None and not importance:
        raise click.UsageError("--repeats requires --importance")
    report = api.evaluate(model, list(data) or None, importance=(repeats or REPEATS) if importance else 0, **options)

    def compared(part: Any, label: str) -> None:
        fp32, *others = part["metrics"]
        a = part["metrics"][fp32]
        for name in others:
            b, other = part["metrics"][name], part.get("others", {}).get(name, part)
            difference, bounds = other["difference"], other.get("interval", {})
            rows = [
                [key, f"{a[key]:.5f}", f"{b[key]:.5f}", f"{difference[key]:+.6f}", interval(bounds.get(key))]
                for key in a
            ]
            rows += [[key, "", "", f"{value:.6f}", ""] for key, value in difference.items() if key not in a]
            table([f"{label}{part['samples']:,} samples", fp32, name, f"{name} - {fp32}", "95% interval"], rows)

    def show() -> None:
        for label, part in report.get("labels", {"": report}).items():
            compared(part, f"{label}, " if label else "")
        if importance:
            columns_of = report["importance"].get("labels", {"": report["importance"]["columns"]})
            for label, importances in columns_of.items():
                cells = [
                    [
                        column["column"],
                        f"{column['auc_drop']:+.5f} ± {column['auc_drop_std']:.5f}",
                        f"{column['logloss_rise']:+.5f} ± {column['logloss_rise_std']:.5f}",
                    ]
                    for column in importances
                ]
                table([f"{label + ', ' if label else ''}importance", "AUC drop", "LogLoss rise"], cells)
        if report.get("weighted"):
            click.echo("metrics weighted by the log's weight column")
        if rate := report.get("negative_rate"):
            click.echo(f"trained on {rate:.4g} of the negatives: probabilities are those of a log with all of them")
        if kept := report.get("kept"):
            shares = ", ".join(f"{share:.1%} in {dtype}" for dtype, share in kept.items())
            click.echo(f"--output-dtype: recall of the ten nearest texts by float32: {shares}")

    emit(report, as_json, show)


@click.command()
@click.argument("model")
@click.argument("others", nargs=-1, metavar="[INT8.onnx...]")
@click.option(
    "--data",
    default=None,
    help="Raw input of the batches; .npz or images for an .onnx file. [default: the model's sample; random values]",
)
@click.option(
    "--precision", "precisions", type=Words(), default="fp32,int8", show_default=True, help="Precisions of a zoo model."
)
@engines
@batch_sizes
@click.option(
    "--rounds", default=15, show_default=True, help="Number of rounds; every configuration runs once per round."
)
@click.option(
    "--instances",
    default=1,
    show_default=True,
    help="Number of concurrent processes, each pinned to --threads cores.",
)
@click.option(
    "--scenario",
    type=click.Choice(["single-stream", "offline"]),
    default=None,
    help=(
        "Measure from image files of --data to classes, after the accuracy: single-stream (latency and throughput) "
        "or offline (throughput only)."
    ),
)
@click.option("--count", default=1000, show_default=True, help="Number of images that a scenario times.")
@click.option("--min-top1", type=Share(), default=None, help="Minimum top-1 accuracy for a configuration to be timed.")
@click.option(
    "--min-top5", type=Share(), default=None, help="Minimum top-5 accuracy for a configuration to be timed, e.g. 0.93."
)
@click.option(
    "--price-per-hour", type=float, default=None, help="Price of the machine; adds the cost per million images."
)
@combined(preprocess, threads, as_json)
def benchmark(model: str, others: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Measure throughput, latency and memory of MODEL in every engine and precision.

    MODEL may be an .onnx file, compared with further files of the same inputs, such as its int8 version.
    """
    from zoo import api
    from zoo.api.paths import is_file

    scenario = options["scenario"] is not None
    refuse(*("has no effect with --scenario", "rounds") if scenario else ("requires --scenario", "count"))
    if is_file(model):
        refuse("requires a zoo model; an .onnx file is timed as it is", "precisions")
    report = api.benchmark(model, others, **options)

    show = _show_timings if options["scenario"] is None else _show_scenario
    if any("speedup" in run for run in report["results"]):
        show = _show_files
    emit(report, as_json, lambda: show(report, options))


def _show_files(report: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Prints the timings of ONNX files."""
    rows = []
    for run in report["results"]:
        figures = [run["engine"], run["precision"], str(run["batch_size"]), f"{run['latency_ms']['p50']:.3f}"]
        figures += [f"{run['latency_ms']['p95']:.3f}", f"{run['samples_per_second']:,.1f}"]
        rows.append([*figures, number(run["speedup"], 2), f"{run['bytes'] / 1e6:.2f}", f"{run['memory_mb']:.0f}"])
    speedup = f"vs {report['model']}"
    table(["engine", "file", "batch", "p50 ms", "p95 ms", "samples/s", speedup, "file MB", "peak MB"], rows)
    left_out(report)
    click.echo(f"{report['environment']['cpu']}, {options['threads']} thread(s) per instance")


def _show_scenario(report: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Prints the timings of a scenario, from image file to label."""
    columns = [
        "engine",
        "precision",
        "top-1",
        "top-5",
        "mean ms",
        "p50",
        "p90",
        "p99",
        "decode / pre / model / post ms",
    ]
    rows = []
    for run in report["results"]:
        latency, split, offline = run.get("latency_ms", {}), run.get("split_ms", {}), run["offline"]
        rows.append([run["engine"], run["precision"], *(percent(run.get(key)) for key in ("top1", "top5"))])
        rows[-1] += [number(latency.get(key), 3) for key in ("mean", "p50", "p90", "p99")]
        rows[-1] += [" / ".join(f"{ms:.3f}" for ms in split.values())]
        rows[-1] += [f"{offline['images_per_second']:,.1f}", str(offline["batch_size"]), f"{run['memory_mb']:.0f}"]
        rows[-1] += [number(run.get("cost_per_million"), 2)]
    table([*columns, "images/s", "batch", "MB", "cost of 1M"], rows)
    where = f"{report['images']:,} images timed, {report['samples']:,} evaluated"
    click.echo(f"{where}; {report['environment']['cpu']}, {options['threads']} thread(s) for the model")


def _show_timings(report: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Prints the timings of a zoo model."""
    split = "pre / model / post ms" if options["instances"] == 1 else "model ms"
    columns = ["engine", "precision", "batch", "inst.", "samples/s", "p50 ms", "p95 ms", "p99 ms", split, "MB"]
    rows = [
        [
            run["engine"],
            run["precision"],
            str(run["batch_size"]),
            str(run["instances"]),
            f"{run['samples_per_second']:,.0f}",
        ]
        + [f"{run['latency_ms'][key]:.3f}" for key in ("p50", "p95", "p99")]
        + [" / ".join(f"{ms:.3f}" for ms in run["split_ms"].values()), f"{run['memory_mb']:.0f}"]
        for run in report["results"]
    ]
    table(columns, rows)
    click.echo(f"{report['environment']['cpu']}, {options['threads']} thread(s) per instance")


@click.command()
@click.argument("model")
@click.option(
    "-o",
    "--output",
    default=None,
    help="Plan file. [default: MODEL.plan, or model.plan in the model's folder]",
)
@click.option(
    "--data",
    default=None,
    help="Raw input to time with; .npz or images for an .onnx file. [default: the model's sample; zeros]",
)
@click.option(
    "--precision",
    "precisions",
    type=Words(),
    default=None,
    help="Precisions to try: fp32, int8, bf16. [default: int8,fp32; an .onnx file as it is]",
)
@engines
@click.option("--threads", type=Numbers(), default="1", show_default=True, help="Numbers of intra-op threads to try.")
@batch_sizes
@combined(preprocess, as_json)
def plan(model: str, output: str | None, as_json: bool, **options: Any) -> None:
    """Time engines, precisions, threads and batch sizes of MODEL or an .onnx file; write the fastest to a plan file."""
    from zoo import api

    report = api.plan(model, output, **options)

    def show() -> None:
        chosen = [
            tuple(pick[key] for key in ("engine", "precision", "threads", "batch_size")) for pick in report["profiles"]
        ]
        rows = []
        for run in report["timings"]:
            key = tuple(run[name] for name in ("engine", "precision", "threads", "batch_size"))
            times = [f"{run['milliseconds']:.3f}", f"{run['samples_per_second']:,.0f}"]
            rows.append([*map(str, key), *times, "chosen" if key in chosen else ""])
        table(["engine", "precision", "threads", "batch", "ms", "samples/s", ""], rows)
        left_out(report)
        for run in report["profiles"]:
            others = [
                other
                for other in report["timings"]
                if other["batch_size"] == run["batch_size"] and other["engine"] != run["engine"]
            ]
            if others:
                best = max(others, key=lambda other: other["samples_per_second"])
                gain = run["samples_per_second"] / best["samples_per_second"]
                click.echo(f"batch {run['batch_size']}: {run['engine']}, {gain:.2f}x {best['engine']}")
        click.echo(report["path"])

    emit(report, as_json, show)
