"""Commands that build an int8 model: rewrite, calibrate, quantize, tune."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from pipelines.core.errors import ZooError
from zoo.cli.options import (
    Duration,
    Share,
    Words,
    as_json,
    columns,
    combined,
    correct,
    effort,
    max_memory,
    observer,
    on_error,
    preprocess,
    refuse,
    search,
    threads,
    time_budget,
)
from zoo.cli.output import count, emit, number, percent, show, table

COSTLIEST = 10  # float operators listed by quantize


@click.command()
@click.argument("model")
@click.option("-o", "--output", default=None, help="Output file, for an .onnx file.")
@as_json
def rewrite(model: str, output: str | None, as_json: bool) -> None:
    """Apply the graph rewrites to MODEL, or the shared ones to an .onnx file."""
    from zoo import api

    show(api.rewrite(model, output), as_json)


@click.command()
@click.argument("model")
@click.option(
    "--data",
    "--calibration-data",
    "data",
    multiple=True,
    help="Raw input; for an .onnx file: .npz files (repeatable), a folder of .npz files, or a folder of images. "
    "[default: samples kept by training]",
)
@click.option(
    "-o", "--output", default=None, help="Calibration table. [default: calibration.json in the model's folder]"
)
@click.option(
    "--samples",
    type=int,
    default=None,
    help="Number of samples. [default: all for an .onnx file; 256 images, 4096 rows, 256 sentences]",
)
@max_memory
@combined(columns, observer, correct, search, effort, preprocess, on_error, as_json)
def calibrate(model: str, data: tuple[str, ...], output: str | None, as_json: bool, **options: Any) -> None:
    """Calibrate the activation ranges of MODEL or of an .onnx file."""
    from zoo import api

    show(api.calibrate(model, one_or_list(data), output, **options), as_json)


def one_or_list(values: tuple[str, ...]) -> str | list[str] | None:
    """Returns the value of a repeatable option.

    Args:
        values: Values of the option.

    Returns:
        None, a single value, or a list.
    """
    return list(values) if len(values) > 1 else values[0] if values else None


@click.command()
@click.argument("model")
@click.option("-o", "--output", default=None, help="Int8 model. [default: int8.onnx in the model's folder]")
@click.option(
    "--calibration-data",
    "--data",
    "calibration_data",
    multiple=True,
    help="For an .onnx file: .npz files with one array per graph input (repeatable), a folder of .npz files, or a "
    "folder of images. With --schema: the log.",
)
@click.option(
    "--schema",
    default=None,
    help="Schema of a click log (zoo schema): imports the .onnx file as a ranker of this log; -o is its model folder.",
)
@click.option(
    "--columns",
    type=Words(),
    default=None,
    help="With --schema: columns of the inputs, in order. [default: by name; for a single matrix: the schema's order]",
)
@click.option(
    "--output-node",
    default=None,
    metavar="NAME",
    help="With --schema: name of the probability output, if the graph has several outputs; with several labels one "
    "name for each, separated by commas.",
)
@click.option("--table", default=None, help="Existing calibration table.")
@click.option("--keep-float", multiple=True, metavar="REGEX", help="Names of operators that stay float; repeatable.")
@click.option("--reduced-range", is_flag=True, help="7-bit weights, for CPUs without VNNI.")
@click.option("--float-tables", is_flag=True, help="Keep embedding tables in float.")
@click.option(
    "--dynamic",
    multiple=True,
    metavar="REGEX",
    help="Names of Gemm and MatMul with dynamic quantization (fast in onnxruntime); repeatable.",
)
@click.option("--symmetric", is_flag=True, help="Use zero point 128 for signed activations.")
@click.option(
    "--report", "report_path", default=None, help="Also write a report of the quantization error, .html or .json."
)
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="List every operator instead of counts by type and the most expensive float operators.",
)
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    help="Engine that an .onnx file is written for: auto or onnxruntime (SiLU and LeakyRelu are int8 operators), or "
    "openvino (convolutions are computed with the activation functions behind them); the file runs in both.",
)
@combined(max_memory, time_budget, effort, preprocess, observer, correct, search, on_error, as_json)
def quantize(model: str, output: str | None, as_json: bool, show_all: bool, **options: Any) -> None:
    """Quantize MODEL or an .onnx file to int8."""
    from zoo import api
    from zoo.api.paths import is_file

    for name in ("table", "schema"):
        if options[name] is not None:
            own = ("search", "on_error") if name == "table" else ("table",)
            refuse(f"has no effect with --{name}", *own, "preprocess", "max_memory", "time_budget")
    if not is_file(model):
        refuse(f"requires an .onnx file; run: zoo calibrate {model}", "max_memory", "time_budget", "on_error")
    options["calibration_data"] = one_or_list(options["calibration_data"])
    report = api.quantize(model, output, **options)
    summary = report.get("summary")

    def show() -> None:
        if summary is not None:
            click.echo(summary["line"])
        if "structure" in report:
            click.echo(f"{report['family']}: {report['structure']['why']}")
            moved = report["probability"]
            click.echo(
                f"int8 moves a probability by at most {moved['largest']:.4f} (mean {moved['mean']:.5f}) on "
                f"{moved['rows']:,} rows"
            )
        operators = report["operators"]
        if show_all:
            rows = [[node["name"], node["type"], node["precision"], node["reason"]] for node in operators]
            table(["operator", "type", "precision", "note"], rows)
        else:
            kinds = Counter(node["type"] for node in operators if node["precision"] != "integer")
            counts = Counter((node["type"], node["precision"]) for node in operators)
            precisions = ("int8", "float")
            rows = [[kind, *(str(counts[kind, form] or "") for form in precisions)] for kind, _ in kinds.most_common()]
            table(["type", *precisions], rows)
            if summary is not None and summary["costliest"]:
                left = summary["costliest"][:COSTLIEST]
                rows = [[node["name"], node["type"], count(node["cost"]), node["reason"]] for node in left]
                table(["costliest float operators", "type", "MACs or elements", "reason"], rows)
        if summary is not None and summary["prepared"]:
            click.echo(f"{summary['prepared']}: program of the native engine; copy it with the model")
        click.echo(report["path"])

    emit(report, as_json, show)


@click.command()
@click.argument("model")
@click.option(
    "--evaluation-data",
    multiple=True,
    required=True,
    help=(
        ".npz of the graph's inputs and, if known, label; a folder of images, labelled or not; or a zoo "
        "model's labelled raw input."
    ),
)
@click.option(
    "--calibration-data",
    multiple=True,
    help="Unlabelled samples for calibration. [default: every fifth evaluation sample; a zoo model's own samples]",
)
@click.option("--max-drop", type=Share(), default="0.5%", show_default=True, help="Maximum drop of the metric.")
@click.option(
    "--time-budget", "seconds", type=Duration(), default="20m", show_default=True, help="Time limit of the search."
)
@click.option("-o", "--output", required=True, help="Int8 model; the log of all trials is written to the same folder.")
@click.option(
    "--report", "report_path", default=None, help="Also write a report of the selected model, .html or .json."
)
@click.option("--batch-size", default=1, show_default=True, help="Batch size, also for the latency.")
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    help="Engine for evaluation and timing: auto (the fastest), onnxruntime, openvino, or native if the model "
    "supports it.",
)
@combined(preprocess, threads, as_json)
def tune(
    model: str,
    evaluation_data: tuple[str, ...],
    calibration_data: tuple[str, ...],
    output: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Search for the fastest int8 version of MODEL or of an .onnx file within a maximum quality drop."""
    from zoo import api

    calibrating = one_or_list(calibration_data)
    report = api.tune(model, one_or_list(evaluation_data), output, calibration_data=calibrating, **options)

    def show() -> None:
        rows = []
        for trial in report["trials"]:
            figures = [percent(trial["drop"]), number(trial["sqnr_db"], 1), number(trial.get("milliseconds"), 3)]
            rows.append([trial["name"], *figures, "kept" if trial["best"] else trial.get("error", "")])
        table(["recipe", f"{report['metric']} drop", "SQNR dB", "ms", ""], rows)
        click.echo(
            f"{report['path']} in {report['engine']}; float {report['fp32_ms']:.3f} ms in {report['fp32_engine']}; "
            f"stopped: {report['stopped']}"
        )

    emit(report, as_json, show)
    if not report["met"]:
        best = report["best"]
        raise ZooError(
            f"the maximum drop is exceeded by {percent(report['missed_by'])}: the best model, {best['name']} in "
            f"{report['path']}, drops {report['metric']} by {percent(best['drop'])}; raise --max-drop or --time-budget"
        )
