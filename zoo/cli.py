"""The `zoo` command: one thin function a verb over `zoo.verbs`.

`--json` prints exactly one JSON document on stdout; progress and notes go to stderr.
Exit 0 done, 1 the work failed, 2 the request was wrong.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import click

import zoo
from pipelines.core.errors import ZooError, plain
from zoo.options import (
    Duration,
    Numbers,
    Share,
    Words,
    as_json,
    batch_size,
    columns,
    correct,
    engine,
    max_memory,
    observer,
    on_error,
    precision,
    preprocess,
    search,
    threads,
    time_budget,
    together,
    training,
)

logger = logging.getLogger(__name__)

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
COSTLIEST = 10  # float operators that quantize names
CLUSTER = ("address", "workers", "cores", "storage")  # options of training on Ray
NAMED = ("seed", "epochs", "batch_size", "learning_rate", "teacher")  # settings of training with an option of their own


class Verbs(click.Group):
    """A group whose help wraps what its commands do, instead of cutting it."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their whole short help."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self.commands[name].get_short_help_str(limit=1000)) for name in self.list_commands(ctx)]
            )


class Run(click.Command):
    """`zoo run`, with the options that the families declare (`Entry.run_options`)."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own options, those of the families before the shared ones, --help."""
        own = super().get_params(ctx)
        at = next(i for i, option in enumerate(own) if option.name == "precision")
        if "zoo.run" not in ctx.meta:  # asked for several times in one call
            ctx.meta["zoo.run"] = self._of_families()
        return [*own[:at], *ctx.meta["zoo.run"], *own[at:]]

    @staticmethod
    def _of_families() -> list[click.Parameter]:
        """The options of all families; one of the same name and kind in several is one, with the help of each."""
        options: dict[str, click.Option] = {}
        for name, entry in zoo.entries().items():
            for option in entry.run_options:
                kind: Any = {"is_flag": True} if option.kind is bool else {"type": option.kind}
                default = "" if option.default in (None, False) else f" [default: {option.default}]"
                told = f"{entry.task.capitalize()}: {option.help}{default}"
                flag = click.Option([f"--{option.name.replace('_', '-')}"], default=None, help=told, **kind)
                if (other := options.setdefault(option.name, flag)) is flag:
                    continue
                if other.type is not flag.type:
                    logger.warning("the option %s of %s is left out: another family has it", option.name, name)
                elif told not in (other.help or ""):
                    other.help = f"{other.help} {told}"
        return list(options.values())


class Named(str):
    """A name on the command line: what names no file is no text, but families may ask for strings."""

    def __fspath__(self) -> str:
        return str(self)


class Once(logging.Filter):
    """Lets each message through once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is new."""
        text = record.getMessage()
        new = text not in self._seen
        self._seen.add(text)
        return new


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="int8-zoo", prog_name="zoo")
def cli() -> None:
    """Optimized INT8 models for CPUs. MODEL is a name from `zoo list` or a folder that a verb wrote."""


@cli.command("list")
@as_json
def list_models(as_json: bool) -> None:
    """The pretrained models."""
    hub = zoo.hub()
    cards = [hub.card(name) for name in hub.names()]
    models = [{"name": card.name, "entry": card.entry, "description": card.description} for card in cards]
    _print(models, as_json, lambda: _table(["name", "family", "what it is"], [list(each.values()) for each in models]))


@cli.command()
@click.argument("model")
@as_json
def info(model: str, as_json: bool) -> None:
    """What is known of MODEL: card, files, how it was built and quantized."""
    from zoo import verbs

    report = verbs.info(model)
    _print(report, as_json, lambda: _tree({key: value for key, value in report.items() if key != "quantization"}))


@cli.command()
@click.argument("model")
@as_json
def download(model: str, as_json: bool) -> None:
    """Fetch and verify the files of MODEL."""
    from zoo import verbs

    path = str(verbs.download(model))
    _print({"model": model, "path": path}, as_json, lambda: click.echo(path))


@cli.command(cls=Run)
@click.argument("model")
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option(
    "-o",
    "--output",
    default="-",
    help="Where results go: .csv, .csv.gz, .jsonl or .parquet; translations: or text. "
    "[default: stdout: CSV, text; images: a table]",
)
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default=None,
    help="Stop at bad input, or leave it out and count it. [default: raise; images and sentences: skip]",
)
@click.option(
    "--shard",
    default=None,
    metavar="I/N",
    help="Score the I-th of N shares of the input, which may be patterns and URLs; -o is a folder for the N together.",
)
@click.option(
    "--format",
    default=None,
    metavar="SUFFIX",
    help="With --shard or --on: .csv, .csv.gz, .jsonl or .parquet. [default: .parquet; text]",
)
@click.option(
    "--on", type=click.Choice(["ray"]), default=None, help="Score on a Ray cluster, by actors of one core each."
)
@click.option("--address", default=None, help="With --on ray: the cluster's, or auto. [default: one of this machine]")
@click.option(
    "--workers", type=int, default=None, help="With --on ray: how many actors. [default: the cluster's cores]"
)
@click.option("--check", is_flag=True, help="Say whether all shards of the folder MODEL are there, and their sums.")
@together(precision, engine, threads, batch_size, as_json)
def run(model: str, inputs: tuple[str, ...], output: str, as_json: bool, **options: Any) -> None:
    """Score raw INPUT with MODEL: files of rows or sentences, or images and folders; - or no input reads stdin (of
    images: paths).
    """
    from zoo import verbs

    check, shard, suffix = (options.pop(name) for name in ("check", "shard", "format"))
    on, cluster = options.pop("on"), {name: options.pop(name) for name in ("address", "workers")}
    if on is None and any(value is not None for value in cluster.values()):
        raise click.UsageError("--address and --workers are of --on ray")
    if shard and on:
        raise click.UsageError("--on ray takes all shards; leave --shard out")
    if check or shard or on:
        given = {name: value for name, value in options.items() if value is not None}
        if check:
            report = verbs.check(model)
        elif on:
            report = verbs.run_on_ray(model, list(inputs), output, format=suffix or "", **cluster, **given)
        else:
            report = verbs.run_shard(model, list(inputs), output, shard, format=suffix or "", **given)
        _print(report, as_json, lambda: _tree({key: value for key, value in report.items() if key != "files"}))
        return
    if suffix:
        raise click.UsageError("--format is of --shard and --on; a single output is named by its suffix")
    if as_json and output == "-":
        raise click.UsageError("--json prints a summary on stdout, where the results would go; add -o FILE")
    given = {name: value for name, value in options.items() if value is not None}
    files = [each if each == "-" or "://" in each or "\t" in each else Named(each) for each in inputs]
    report = verbs.run(model, files or ["-"], output, **given)
    if as_json:
        _print(report, True, lambda: None)
    elif sys.stderr.isatty() or output != "-":
        entry = zoo.entry_of(model)
        own = [each.summary for each in entry.run_options if each.name in given and each.summary]
        click.echo((own or [entry.summary])[0].format(**report), err=True)


@cli.command()
@click.argument("model")
@click.option("--to", required=True, type=click.Choice(["triton", "ovms"]), help="The server whose repository it is.")
@click.option("-o", "--output", required=True, help="The repository, a folder; what else it holds stays.")
@together(precision, threads)
@as_json
def export(model: str, as_json: bool, **options: Any) -> None:
    """Put MODEL into a model repository of NVIDIA Triton or the OpenVINO Model Server."""
    from zoo import verbs

    report = verbs.export(model, **options)
    _print(report, as_json, lambda: click.echo(f"{report['path']} ({report['config']})"))


@cli.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0 is every one.")
@click.option("--port", default=8000, show_default=True, help="0: any that is free.")
@click.option("--workers", type=int, default=None, help="Processes that compute. [default: cores / threads]")
@click.option("--max-batch", default=64, show_default=True, help="Requests that are computed together, at most.")
@click.option("--queue", default=256, show_default=True, help="Requests that may wait; 429 to those beyond.")
@click.option("--deadline", type=Duration(), default="30s", show_default=True, help="Of a request without timeout-ms.")
@click.option("--read-timeout", type=Duration(), default="20s", show_default=True, help="In which a body must come.")
@click.option("--grace", type=Duration(), default="30s", show_default=True, help="For what is on its way at the end.")
@click.option("--max-body", default=64 << 20, show_default=True, help="Bytes of a request.")
@click.option("--api-key-file", default=None, help="Keys, one a line; without one of them: 401.")
@click.option("--cors-origin", "cors_origins", multiple=True, help="Whose pages may ask; may be repeated.")
@click.option("--certfile", default=None, help="Certificate for TLS, PEM.")
@click.option("--keyfile", default=None, help="Its key, PEM.")
@click.option("--access-log", is_flag=True, help="A JSON line a request on stdout.")
@click.option("--watch", is_flag=True, help="Switch to a folder's new int8.onnx when there is one.")
@click.option("--on", type=click.Choice(["ray"]), default=None, help="Serve on a Ray cluster, by Ray Serve.")
@click.option("--address", default=None, help="With --on ray: the cluster's, or auto. [default: one of this machine]")
@click.option(
    "--replicas",
    default=None,
    metavar="N|MIN:MAX",
    help="With --on ray: as many, or as requests want. [default: 1:cores]",
)
@click.option("--max-models", type=int, default=None, help="With --on ray: open in a replica at once. [default: all]")
@together(precision, engine, threads)
def serve(models: tuple[str, ...], **options: Any) -> None:
    """Answer over HTTP with each MODEL, until SIGTERM or Ctrl-C: raw input, or tensors (Open Inference Protocol)."""
    from zoo import verbs

    on, cluster = options.pop("on"), {name: options.pop(name) for name in ("address", "replicas", "max_models")}
    cluster = {name: value for name, value in cluster.items() if value is not None}
    if on:
        if options.pop("workers") is not None:
            raise click.UsageError("--on ray has --replicas in place of --workers")
        verbs.serve_on_ray(models, **options, **cluster)
        return
    if cluster:
        raise click.UsageError(f"--{next(iter(cluster)).replace('_', '-')} is of --on ray")
    verbs.serve(models, **options)


@cli.command()
@click.argument("family")
@click.option("--schema", default=None, help="What a click log's columns are (zoo schema). [default: inferred]")
@click.option("--label", default=None, help="A click log's column to predict. [default: click, label, ...]")
@click.option(
    "--held-out",
    type=float,
    default=None,
    help="How many of a click log's last rows are held out: a count, or a share. [default: 0.1]",
)
@training
def train(family: str, as_json: bool, held_out: float | None, **options: Any) -> None:
    """Train a model FAMILY (e.g. wide-deep) on own data.

    Several processes share the work: under torchrun; wide-deep on rows of Criteo's form where each process has
    TensorFlow's TF_CONFIG: {"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}, the
    index from 0 on and all else alike.
    """
    from zoo import verbs

    if held_out is not None:
        options["settings"] = (*options["settings"], f"held_out={held_out}")
    _trained(verbs.train, family, as_json, **options)


@cli.command()
@click.argument("model")
@click.option(
    "--qat",
    is_flag=True,
    help="Train with the rounding of int8, and keep the ranges found so: image classifiers, best of the "
    "classes that MODEL has, then at a "
    "tenth of the learning rate. --set distillation=0.5 also learns from MODEL as it is in float.",
)
@click.option(
    "--prune",
    default=None,
    metavar="GOAL",
    help="Cut channels, and train on: until int8 is so many times as fast on this machine (1.5x), or a share of them "
    "(ratio=.3).",
)
@click.option(
    "--strategy",
    default=None,
    metavar="FILE",
    help="JSON that says from which epoch to which a teacher is listened to, channels are cut, int8 is trained for.",
)
@click.option(
    "--drop",
    type=float,
    default=None,
    help="With --prune or --strategy: how much of its metric int8 may lose. [default: .005 top-1, .001 AUC, .3 BLEU]",
)
@together(columns)
@training
def finetune(
    model: str,
    qat: bool,
    as_json: bool,
    columns: Sequence[str],
    prune: str | None,
    strategy: str | None,
    drop: float | None,
    **options: Any,
) -> None:
    """Go on training MODEL on own data; or make it smaller, by --prune or a --strategy."""
    from zoo import verbs

    given = {"prune": prune, "strategy": strategy, "drop": drop}
    options |= (smaller := {name: each for name, each in given.items() if each is not None})
    if options["on"] and smaller:
        raise click.UsageError(f"--{next(iter(smaller))} cuts and trains in one process; leave --on out")

    if qat:
        options["settings"] += ("qat=true",)
    if columns:
        options["settings"] += (f"columns={','.join(columns)}",)
    _trained(verbs.finetune, model, as_json, **options)


@cli.command()
@click.argument("model")
@click.option(
    "--from-pb",
    default=None,
    metavar="GRAPH",
    help="A frozen TensorFlow graph (.pb) or a SavedModel; MODEL is its family: wide-deep.",
)
@click.option(
    "--from-onnx",
    default=None,
    metavar="RANKER",
    help="An ONNX export of a click model (torch-rechub, DeepCTR-Torch, FuxiCTR, ...); MODEL is its family: deepfm, "
    "dcn-v2, dlrm, two-tower, wide-deep-log, or ranker for any.",
)
@click.option("--schema", default=None, help="With --from-onnx: what the log's columns are (zoo schema).")
@click.option("--data", multiple=True, help="With --from-...: rows of the log; the first 4,096 calibrate.")
@click.option("-o", "--output", default=None, help="With --from-... and --shortlist: folder for the model.")
@click.option(
    "--columns",
    type=Words(),
    default=None,
    help="With --from-pb: a row's columns by their names in the graph. [default: I2 before I10] With --from-onnx: "
    "those that feed its inputs, in order. [default: by name; of one matrix: the schema's order]",
)
@click.option(
    "--output-node", default=None, metavar="NAME", help="With --from-...: the probability, where there are several."
)
@click.option(
    "--shortlist",
    default=None,
    metavar="DATA",
    help="Translation: as zoo import's, or a text one of Marian (lex.s2t); with -o for a copy of MODEL.",
)
@together(on_error, as_json)
def freeze(model: str, data: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Turn the checkpoint of MODEL into fp32.onnx; or a graph from elsewhere into an int8 model.

    Such a graph is one made of tf.feature_column, or a ranker in ONNX with a schema of its log. Rows of the former are
    tab separated: label (0 or 1; optional), the numbers, the categories; one value a column, empty where missing. A
    missing number counts as what the graph's ParseExample says, else 0; a missing category looks nothing up.
    """
    from zoo import verbs

    _show(verbs.freeze(model, data=list(data) or None, **options), as_json)


@cli.command("import")
@click.argument("source")
@click.option("-o", "--output", default=None, help="Folder for the model.")
@click.option("--format", default=None, metavar="NAME", help="What SOURCE is. [default: told by what is in it]")
@click.option("--source-language", default=None, help="Translation: that of the text, where the model has several.")
@click.option("--target-language", default=None, help="Translation: the one to translate into.")
@click.option(
    "--shortlist",
    default=None,
    metavar="DATA",
    help="Translation: parallel text (SOURCE,TARGET or a file of source TAB target) of which to learn which words the "
    "translation of a sentence may have: the quicker, the larger the vocabulary.",
)
@click.option("--pooling", default=None, help="Sentence encoders whose folder tells none: mean, cls or max.")
@click.option(
    "--normalize",
    is_flag=True,
    default=None,
    help="Sentence encoders whose folder does not say so: vectors of length 1.",
)
@as_json
def import_model(source: str, output: str | None, as_json: bool, **options: Any) -> None:
    """Turn a model of another toolkit into a model folder.

    SOURCE is a folder of transformers (MarianMTModel, M2M-100 and NLLB, mBART, BART), a sentence encoder or
    cross-encoder (BERT, RoBERTa, XLM-R, DistilBERT, MPNet), or its hub id ORG/NAME, which is fetched. All that is wrong
    with it is said at once, before anything is written; nothing of it is executed.
    """
    from zoo import verbs

    _show(verbs.import_model(source, output, **options), as_json)


@cli.command()
@click.argument("log")
@click.option("-o", "--output", default=None, help="Where the schema goes, as JSON; else it is only shown.")
@click.option("--label", default=None, metavar="COLUMN", help="What is predicted: a column of 0 and 1.")
@click.option("--delimiter", default=None, metavar="CHARACTER", help="Between the columns of CSV. [default: found]")
@as_json
def schema(log: str, output: str | None, label: str | None, delimiter: str | None, as_json: bool) -> None:
    """What the columns of a click LOG are: numbers, categories, lists, the label, how each is encoded, and why.

    LOG is CSV or TSV with a header, JSON lines (also .gz) or Parquet. The JSON that -o writes can be edited.
    """
    from zoo import verbs
    from zoo.clicks.schema import COLUMNS

    report = verbs.schema(log, output, label=label, delimiter=delimiter)
    _print(report["schema"], as_json, lambda: _table(COLUMNS, report["table"]))
    if output is not None and not as_json:
        click.echo(report["path"])


@cli.command()
@click.argument("model")
@click.option("-o", "--output", default=None, help="Where the result goes, for an .onnx file.")
@as_json
def rewrite(model: str, output: str | None, as_json: bool) -> None:
    """Apply the graph rewrites to MODEL, or the shared ones to an .onnx file."""
    from zoo import verbs

    _show(verbs.rewrite(model, output), as_json)


def one_or_list(values: tuple[str, ...]) -> str | list[str] | None:
    """What an option that may be repeated gives: None, its one value, or all."""
    return list(values) if len(values) > 1 else values[0] if values else None


@cli.command()
@click.argument("model")
@click.option(
    "--data",
    "--calibration-data",
    "data",
    multiple=True,
    help="Raw input; .npz, may be repeated, a folder of them or of images for an .onnx file. [default: samples kept by "
    "training]",
)
@click.option(
    "-o", "--output", default=None, help="Where the table goes. [default: calibration.json of the model's folder]"
)
@click.option(
    "--samples",
    type=int,
    default=None,
    help="How many samples to use. [default: all for an .onnx file; 256 images, 4096 rows, 256 sentences]",
)
@max_memory
@together(columns, observer, correct, search, preprocess, on_error, as_json)
def calibrate(model: str, data: tuple[str, ...], output: str | None, as_json: bool, **options: Any) -> None:
    """Choose the activation ranges of MODEL or of an .onnx file."""
    from zoo import verbs

    _show(verbs.calibrate(model, one_or_list(data), output, **options), as_json)


@cli.command()
@click.argument("model")
@click.option(
    "-o", "--output", default=None, help="Where the int8 model goes. [default: int8.onnx of the model's folder]"
)
@click.option(
    "--calibration-data",
    "--data",
    "calibration_data",
    multiple=True,
    help="For an .onnx file: .npz with one array per graph input, may be repeated; a folder of them; or of images. "
    "With --schema: the log.",
)
@click.option(
    "--schema",
    default=None,
    help="What a click log's columns are (zoo schema): the .onnx file is a ranker of it, made a model folder -o.",
)
@click.option(
    "--columns",
    type=Words(),
    default=None,
    help="With --schema: those that feed the inputs, in order. [default: by name; of one matrix: the schema's order]",
)
@click.option(
    "--output-node", default=None, metavar="NAME", help="With --schema: the probability, where there are several."
)
@click.option("--table", default=None, help="A calibration table made before.")
@click.option(
    "--keep-float", multiple=True, metavar="REGEX", help="Operators that stay float, by name; may be repeated."
)
@click.option("--reduced-range", is_flag=True, help="7-bit weights, for CPUs without VNNI.")
@click.option("--float-tables", is_flag=True, help="Keep embedding tables float.")
@click.option(
    "--dynamic",
    multiple=True,
    metavar="REGEX",
    help="Gemm and MatMul whose input is quantized at run time (onnxruntime's strength).",
)
@click.option("--symmetric", is_flag=True, help="Zero point 128 for activations with negatives.")
@click.option(
    "--report", "report_path", default=None, help="Also measure the result and write a report, .html or .json."
)
@click.option("--all", "show_all", is_flag=True, help="List every operator, not their types and the costliest alone.")
@together(max_memory, time_budget, preprocess, observer, correct, search, on_error, as_json)
def quantize(model: str, output: str | None, as_json: bool, show_all: bool, **options: Any) -> None:
    """Quantize MODEL or an .onnx file to int8."""
    from zoo import verbs

    options["calibration_data"] = one_or_list(options["calibration_data"])
    report = verbs.quantize(model, output, **options)
    summary = report.get("summary")

    def show() -> None:
        if summary is not None:
            click.echo(summary["line"])
        if "structure" in report:
            click.echo(f"{report['family']}: {report['structure']['why']}")
        operators = report["operators"]
        if show_all:
            rows = [[each["name"], each["type"], each["precision"], each["reason"]] for each in operators]
            _table(["operator", "type", "precision", "note"], rows)
        else:
            kinds = Counter(each["type"] for each in operators if each["precision"] != "integer")
            counts = Counter((each["type"], each["precision"]) for each in operators)
            precisions = ("int8", "float")
            rows = [[kind, *(str(counts[kind, each] or "") for each in precisions)] for kind, _ in kinds.most_common()]
            _table(["type", *precisions], rows)
            if summary is not None and summary["costliest"]:
                left = summary["costliest"][:COSTLIEST]
                rows = [[each["name"], each["type"], _count(each["cost"]), each["reason"]] for each in left]
                _table(["costliest float operators", "type", "MACs or elements", "why"], rows)
        click.echo(report["path"])

    _print(report, as_json, show)


@cli.command()
@click.argument("model")
@click.option("--data", multiple=True, required=True, help="Labelled input; may be repeated.")
@click.option(
    "--precision",
    "precisions",
    type=Words(),
    default="fp32,int8",
    show_default=True,
    help="What is compared with fp32.",
)
@together(columns, engine, threads, batch_size, on_error, as_json)
def evaluate(model: str, data: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Quality of fp32 and int8 (or bf16) on the same samples, and their difference."""
    from zoo import verbs

    report = verbs.evaluate(model, list(data), **options)

    def show() -> None:
        fp32, *others = report["metrics"]
        a = report["metrics"][fp32]
        for name in others:
            b, compared = report["metrics"][name], report.get("others", {}).get(name, report)
            difference, interval = compared["difference"], compared.get("interval", {})
            rows = [
                [key, f"{a[key]:.5f}", f"{b[key]:.5f}", f"{difference[key]:+.6f}", _interval(interval.get(key))]
                for key in a
            ]
            rows += [[key, "", "", f"{value:.6f}", ""] for key, value in difference.items() if key not in a]
            _table([f"{report['samples']:,} samples", fp32, name, f"{name} - {fp32}", "95% interval"], rows)
        if kept := report.get("kept"):
            shares = ", ".join(f"{share:.1%} in {dtype}" for dtype, share in kept.items())
            click.echo(f"--output-dtype: of the ten nearest texts by float32 stay {shares}")

    _print(report, as_json, show)


@cli.command()
@click.argument("model")
@click.argument("others", nargs=-1, metavar="[INT8.onnx...]")
@click.option(
    "--data",
    default=None,
    help="Raw input to take the batches from; .npz for an .onnx file. [default: the model's sample; random numbers]",
)
@click.option("--precision", "precisions", type=Words(), default="fp32,int8", show_default=True, help="Of a zoo model.")
@click.option(
    "--engine", "engines", type=Words(), default=None, help="[default: all that the machine and the model have]"
)
@click.option(
    "--batch-size",
    "batch_sizes",
    type=Numbers(),
    default=None,
    help="[default: 512 rows, 4 images; 1 for an .onnx file]",
)
@click.option("--rounds", default=15, show_default=True, help="Turns of every configuration.")
@click.option(
    "--instances",
    default=1,
    show_default=True,
    help="Processes that run at once, each pinned to --threads cores of its own.",
)
@click.option(
    "--scenario",
    type=click.Choice(["single-stream", "offline"]),
    default=None,
    help=(
        "From the image files of --data to classes, after the accuracy: one by one, and as a stream; or "
        "as a stream alone."
    ),
)
@click.option("--count", default=1000, show_default=True, help="Images that a scenario times.")
@click.option(
    "--min-top1", type=Share(), default=None, help="Time nothing where the share of right first classes is less."
)
@click.option(
    "--min-top5", type=Share(), default=None, help="The same of the right class among the first five, e.g. 0.93."
)
@click.option("--price-per-hour", type=float, default=None, help="Of the machine; adds the cost of a million images.")
@together(threads, as_json)
def benchmark(model: str, others: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Throughput, latency and memory of MODEL: engines and precisions in turn in one run.

    MODEL may be an .onnx file, timed beside others with the same inputs, such as its int8 form.
    """
    from zoo import verbs

    report = verbs.benchmark(model, others, **options)

    def show_files() -> None:
        rows = []
        for each in report["results"]:
            figures = [each["engine"], each["precision"], str(each["batch_size"]), f"{each['latency_ms']['p50']:.3f}"]
            figures += [f"{each['latency_ms']['p95']:.3f}", f"{each['samples_per_second']:,.1f}"]
            rows.append(
                [*figures, _number(each["speedup"], 2), f"{each['bytes'] / 1e6:.2f}", f"{each['memory_mb']:.0f}"]
            )
        speedup = f"vs {report['model']}"
        _table(["engine", "file", "batch", "p50 ms", "p95 ms", "samples/s", speedup, "file MB", "peak MB"], rows)
        _left_out(report)
        click.echo(f"{report['environment']['cpu']}, {options['threads']} thread(s) an instance")

    def show_scenario() -> None:
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
        for each in report["results"]:
            latency, split, offline = each.get("latency_ms", {}), each.get("split_ms", {}), each["offline"]
            rows.append([each["engine"], each["precision"], *(_percent(each.get(key)) for key in ("top1", "top5"))])
            rows[-1] += [_number(latency.get(key), 3) for key in ("mean", "p50", "p90", "p99")]
            rows[-1] += [" / ".join(f"{ms:.3f}" for ms in split.values())]
            rows[-1] += [f"{offline['images_per_second']:,.1f}", str(offline["batch_size"]), f"{each['memory_mb']:.0f}"]
            rows[-1] += [_number(each.get("cost_per_million"), 2)]
        _table([*columns, "images/s", "batch", "MB", "cost of 1M"], rows)
        where = f"{report['images']:,} images timed, {report['samples']:,} judged"
        click.echo(f"{where}; {report['environment']['cpu']}, {options['threads']} thread(s) for the model")

    def show() -> None:
        split = "pre / model / post ms" if options["instances"] == 1 else "model ms"
        columns = ["engine", "precision", "batch", "inst.", "samples/s", "p50 ms", "p95 ms", "p99 ms", split, "MB"]
        rows = [
            [
                each["engine"],
                each["precision"],
                str(each["batch_size"]),
                str(each["instances"]),
                f"{each['samples_per_second']:,.0f}",
            ]
            + [f"{each['latency_ms'][key]:.3f}" for key in ("p50", "p95", "p99")]
            + [" / ".join(f"{ms:.3f}" for ms in each["split_ms"].values()), f"{each['memory_mb']:.0f}"]
            for each in report["results"]
        ]
        _table(columns, rows)
        click.echo(f"{report['environment']['cpu']}, {options['threads']} thread(s) an instance")

    files = any("speedup" in each for each in report["results"])
    _print(report, as_json, show_files if files else show if options["scenario"] is None else show_scenario)


@cli.command()
@click.argument("model")
@click.option("--force", is_flag=True, help="Make every file anew.")
@as_json
def build(model: str, force: bool, as_json: bool) -> None:
    """Make every file of MODEL that is missing or stale, up to int8.onnx."""
    from zoo import verbs

    _show(verbs.build(model, force=force), as_json)


@cli.command()
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
    help="The same, unlabelled. [default: every fifth evaluation sample; a zoo model's own samples]",
)
@click.option("--max-drop", type=Share(), default="0.5%", show_default=True, help="What the metric may lose.")
@click.option("--time-budget", "seconds", type=Duration(), default="20m", show_default=True, help="When to stop.")
@click.option("-o", "--output", required=True, help="Where the int8 model goes; the log of all trials lies beside it.")
@click.option("--report", "report_path", default=None, help="Also write a report of the model found, .html or .json.")
@click.option(
    "--batch-size", default=1, show_default=True, help="Samples the model sees at once, also for the latency."
)
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    help="What models are judged and timed in: auto (the quickest), onnxruntime, openvino, or native of the models "
    "that have it.",
)
@together(preprocess, threads, as_json)
def tune(
    model: str,
    evaluation_data: tuple[str, ...],
    calibration_data: tuple[str, ...],
    output: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Search for the quickest int8 form of MODEL or of an .onnx file that loses no more than allowed."""
    from zoo import verbs

    calibrating = one_or_list(calibration_data)
    report = verbs.tune(model, one_or_list(evaluation_data), output, calibration_data=calibrating, **options)

    def show() -> None:
        rows = []
        for each in report["trials"]:
            figures = [_percent(each["drop"]), _number(each["sqnr_db"], 1), _number(each.get("milliseconds"), 3)]
            rows.append([each["name"], *figures, "kept" if each["best"] else each.get("error", "")])
        _table(["recipe", f"{report['metric']} lost", "SQNR dB", "ms", ""], rows)
        click.echo(
            f"{report['path']} in {report['engine']}; fp32 {report['fp32_ms']:.3f} ms in {report['fp32_engine']}; "
            f"stopped: {report['stopped']}"
        )

    _print(report, as_json, show)
    if not report["met"]:
        best = report["best"]
        raise ZooError(
            f"the goal is missed by {_percent(report['missed_by'])}: the best model, {best['name']}, loses "
            f"{_percent(best['drop'])} of "
            f"{report['metric']}; {report['path']} holds it; allow more with --max-drop, or a longer search with "
            "--time-budget"
        )


@cli.command()
@click.argument("model")
@click.option(
    "-o",
    "--output",
    default=None,
    help="Where the plan goes. [default: MODEL.plan, or model.plan in the model's folder]",
)
@click.option(
    "--data",
    default=None,
    help="What to time with: raw input, or .npz for an .onnx file. [default: the model's sample; zeros]",
)
@click.option(
    "--precision", "precisions", type=Words(), default=None, help="fp32, int8, bf16. [default: int8; a file as it is]"
)
@click.option(
    "--engine", "engines", type=Words(), default=None, help="[default: all that the machine and the model have]"
)
@click.option("--threads", type=Numbers(), default="1", show_default=True, help="Threads of the engine.")
@click.option("--batch-size", "batch_sizes", type=Numbers(), default=None, help="[default: 512; 1 for an .onnx file]")
@as_json
def plan(model: str, output: str | None, as_json: bool, **options: Any) -> None:
    """Time engines, precisions, threads and batch sizes for MODEL or an .onnx file; write the quickest, compiled, into
    a plan file.
    """
    from zoo import verbs

    report = verbs.plan(model, output, **options)

    def show() -> None:
        chosen = [
            tuple(each[key] for key in ("engine", "precision", "threads", "batch_size")) for each in report["profiles"]
        ]
        rows = []
        for each in report["timings"]:
            key = tuple(each[name] for name in ("engine", "precision", "threads", "batch_size"))
            times = [f"{each['milliseconds']:.3f}", f"{each['samples_per_second']:,.0f}"]
            rows.append([*map(str, key), *times, "chosen" if key in chosen else ""])
        _table(["engine", "precision", "threads", "batch", "ms", "samples/s", ""], rows)
        _left_out(report)
        for each in report["profiles"]:
            others = [
                other
                for other in report["timings"]
                if other["batch_size"] == each["batch_size"] and other["engine"] != each["engine"]
            ]
            if others:
                best = max(others, key=lambda other: other["samples_per_second"])
                gain = each["samples_per_second"] / best["samples_per_second"]
                click.echo(f"batch {each['batch_size']}: {each['engine']}, {gain:.2f}x {best['engine']}")
        click.echo(report["path"])

    _print(report, as_json, show)


@cli.command()
@click.option(
    "--speed", is_flag=True, help="Also how many int8 products a core makes in registers, the limit of layers."
)
@as_json
def doctor(speed: bool, as_json: bool) -> None:
    """What this machine can do: CPU, VNNI, versions, cache, and a check of int8 against float."""
    from zoo import verbs

    _show(verbs.doctor(speed), as_json)


@cli.group()
def cluster() -> None:
    """Clusters of machines, which Ray runs."""


@cluster.command("yaml")
@click.option("--cloud", required=True, type=click.Choice(["aws", "gcp", "azure", "kuberay", "local"]))
@click.option("-o", "--output", required=True, help="The file.")
@click.option("--workers", default=2, show_default=True, help="Nodes beside the head.")
@click.option("--instance", default=None, help="Kind of machine of the workers. [default: one with AVX512-VNNI]")
@click.option("--name", default="int8-zoo", show_default=True, help="Of the cluster.")
@click.option("--region", default=None, help="[default: us-west-2, us-west1, westus2]")
@click.option("--project", default=None, help="Google Cloud: the project's id.")
@click.option("--hosts", type=Words(), default=(), help="local: addresses of own machines, the head first.")
@click.option("--user", default="ubuntu", show_default=True, help="Who comes in by SSH.")
@click.option("--cores", default=8, show_default=True, help="kuberay: of a worker.")
@click.option("--claim", default=None, help="kuberay: a volume claim that all have at /shared.")
@click.option("--package", default=None, help="What pip installs. [default: this version, with ray and train]")
@click.option("--command", default=None, help="What to run there; kuberay: as a RayJob, which ends the cluster.")
@click.option("--spot", is_flag=True, help="Workers that the cloud may take back.")
@as_json
def cluster_yaml(as_json: bool, **options: Any) -> None:
    """Write the file with which ray up or kubectl brings a cluster up."""
    from zoo import verbs

    _show(verbs.cluster_yaml(options.pop("cloud"), options.pop("output"), **options), as_json)


def _trained(verb: Callable[..., dict[str, Any]], model: str, as_json: bool, **options: Any) -> None:
    from zoo.training import is_first

    settings: dict[str, str] = {}
    for text in options.pop("settings"):
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--set {text!r} is not NAME=VALUE")
        settings[name.strip().replace("-", "_")] = value
    if options.pop("tune_communication"):
        settings["tune_communication"] = "true"
    settings |= {name: str(options[name]) for name in NAMED if options[name] is not None}
    left = {name: value for name, value in options.items() if name not in NAMED}
    output = left.pop("output")
    on, given = left.pop("on"), {name: left.pop(name) for name in CLUSTER}
    cluster = {name: value for name, value in given.items() if value is not None}
    if on is None and cluster:
        raise click.UsageError(f"--{next(iter(cluster))} is of --on ray")
    if on:
        from zoo import verbs

        verb, left = functools.partial(verbs.train_on_ray, verb.__name__), {"workers": 1, **cluster, **left}
    try:
        report = verb(model, list(left.pop("data")), output, settings=settings, **left)
    except KeyboardInterrupt:
        if not os.path.isdir(os.path.join(output, "checkpoint")):  # noqa: PTH112, PTH118
            raise
        _fail("interrupted; the same command with --resume goes on from the last checkpoint", INTERRUPTED)
    if is_first():
        _show(report, as_json)


def _left_out(report: Mapping[str, Any]) -> None:
    """Say what was not timed, and why."""
    for problem in report["failed"]:
        click.echo(f"left out: {problem}", err=True)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3f}%"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _interval(bounds: Sequence[float] | None) -> str:
    return f"[{bounds[0]:+.6f}, {bounds[1]:+.6f}]" if bounds else ""


def _show(report: Mapping[str, Any], as_json: bool) -> None:
    _print(report, as_json, lambda: _tree(report))


def _print(report: Any, as_json: bool, show: Callable[[], Any]) -> None:
    if as_json:
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        show()


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*map(plain, row))
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 250).print(table)


def _tree(value: Mapping[str, Any], depth: int = 0) -> None:
    for key, each in value.items():
        if isinstance(each, Mapping) and each:
            click.echo(f"{'  ' * depth}{key}:")
            _tree(each, depth + 1)
        else:
            text = ", ".join(map(str, each)) if isinstance(each, list | tuple) else str(each)
            click.echo(plain(f"{'  ' * depth}{key}: {text if len(text) < 400 else text[:400] + ' ...'}"))


class _Plain(logging.Formatter):
    """Lines in which nothing of a model or a file speaks to the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
        return plain(super().format(record))


def main() -> None:
    """Entry point of the `zoo` command."""
    handler = logging.StreamHandler()
    handler.addFilter(Once())
    handler.setFormatter(_Plain("zoo: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # what is wrong with an image is said where it is read
    warnings.filterwarnings("ignore", module="PIL")
    try:
        call(sys.argv[1:])
    except SystemExit as end:
        if (
            end.code == INTERRUPTED
        ):  # all clean-up is done; an engine interrupted while compiling may not let the interpreter end
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise


def call(arguments: Sequence[str]) -> None:
    """Run the command with these arguments; SystemExit with the exit code, and one line on stderr, where it fails."""
    try:
        cli(list(arguments), prog_name="zoo", standalone_mode=False)
    except getattr(click.exceptions, "NoArgsIsHelpError", ()) as error:  # click 8.2 and later
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "zoo"
        _fail(f"{error.format_message().rstrip('.')}; see: {where} --help", 2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", INTERRUPTED)
    except ZooError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(plain(f"zoo: {' '.join(message.split())}"), err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
