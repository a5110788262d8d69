"""Commands that run a model: run, rank, serve, export."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

import zoo
from zoo.cli.options import (
    Duration,
    as_json,
    batch_size,
    combined,
    engine,
    network,
    precision,
    refuse,
    run_threads,
    threads,
)
from zoo.cli.output import emit, show, tree

logger = logging.getLogger(__name__)
TASKS = {"clicks": "recommenders"}  # names of tasks in the help, where they differ


class Run(click.Command):
    """`zoo run`, with the options that the families declare (`Family.run_options`)."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns the options of the command, with the options of the families before the shared options.

        Args:
            ctx: Context of the call.
        """
        own = super().get_params(ctx)
        index = next(i for i, option in enumerate(own) if option.name == "precision")
        if "zoo.run" not in ctx.meta:  # called several times per command
            ctx.meta["zoo.run"] = self._of_families()
        return [*own[:index], *ctx.meta["zoo.run"], *own[index:]]

    @staticmethod
    def _of_families() -> list[click.Parameter]:
        """The options of all families. Options of the same name and type are one, whose help names the tasks."""
        options: dict[str, click.Option] = {}
        helps: dict[str, dict[str, list[str]]] = {}  # {option: {help: tasks}}
        for name, entry in zoo.entries().items():
            for option in entry.run_options:
                kind: Any = {"is_flag": True} if option.kind is bool else {"type": option.kind}
                flag = click.Option([f"--{option.name.replace('_', '-')}"], default=None, **kind)
                if options.setdefault(option.name, flag).type is not flag.type:
                    logger.warning(
                        "the option %s of %s is ignored: another family has an option of this name and another type",
                        option.name,
                        name,
                    )
                    continue
                default = "" if option.default in (None, False, "") else f" [default: {option.default}]"
                tasks = helps.setdefault(option.name, {}).setdefault(f"{option.help}{default}", [])
                if (task := TASKS.get(entry.task, entry.task)) not in tasks:
                    tasks.append(task)
        for name, texts in helps.items():
            options[name].help = " ".join(f"{', '.join(tasks).capitalize()}: {text}" for text, tasks in texts.items())
        return list(options.values())


class InputPath(str):
    """Input given on the command line: a path, never raw text."""

    def __fspath__(self) -> str:
        return str(self)


@click.command(cls=Run)
@click.argument("model")
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option(
    "-o",
    "--output",
    default="-",
    help="Output file: .csv, .csv.gz, .jsonl or .parquet; for translation also text. "
    "[default: stdout: CSV or text; images: a table]",
)
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default=None,
    help="raise: stop at invalid input; skip: leave it out and count it. [default: raise; images and sentences: skip]",
)
@click.option(
    "--shard",
    default=None,
    metavar="I/N",
    help="Score shard I of N; inputs may be glob patterns and URLs, -o is the folder that all shards share.",
)
@click.option(
    "--format",
    default=None,
    metavar="SUFFIX",
    help="With --shard or --on: output format .csv, .csv.gz, .jsonl or .parquet. [default: .parquet; text]",
)
@click.option("--on", type=click.Choice(["ray"]), default=None, help="Score on a Ray cluster, with single-core actors.")
@click.option("--address", default=None, help="With --on ray: cluster address, or auto. [default: a local cluster]")
@click.option(
    "--workers", type=int, default=None, help="With --on ray: number of actors. [default: the cluster's cores]"
)
@click.option(
    "--check", is_flag=True, help="Check that all shards in the folder MODEL are complete, and print their totals."
)
@combined(network, precision, engine, run_threads, batch_size, as_json)
def run(model: str, inputs: tuple[str, ...], output: str, as_json: bool, **options: Any) -> None:
    """Run MODEL on raw INPUT: files of rows or sentences, or images and folders.

    MODEL may be the .onnx file of an image network: a detector, a segmentation network, a classifier or an encoder.
    Without INPUT, or with -, stdin is read (image models: paths).
    """
    from zoo import api

    check, shard, suffix = (options.pop(name) for name in ("check", "shard", "format"))
    on, cluster = options.pop("on"), {name: options.pop(name) for name in ("address", "workers")}
    if check:
        refuse("has no effect with --check", *(*options, *cluster, "output", "shard", "format", "on"))
        if inputs:
            raise click.UsageError(f"--check takes the folder of the shards alone, found {inputs[0]}, too")
    if on is None and any(value is not None for value in cluster.values()):
        raise click.UsageError("--address and --workers require --on ray")
    if shard and on:
        raise click.UsageError("--on ray scores all shards; leave --shard out")
    if check or shard or on:
        chosen = {name: value for name, value in options.items() if value is not None}
        if check:
            report = api.check(model)
        elif on:
            report = api.run_on_ray(model, list(inputs), output, format=suffix or "", **cluster, **chosen)
        else:
            report = api.run_shard(model, list(inputs), output, shard, format=suffix or "", **chosen)
        emit(report, as_json, lambda: tree({key: value for key, value in report.items() if key != "files"}))
        return
    if suffix:
        raise click.UsageError("--format requires --shard or --on; the suffix of -o selects the format otherwise")
    _require_one_writer(as_json, output)
    chosen = {name: value for name, value in options.items() if value is not None}
    files = [path if path == "-" or "://" in path or "\t" in path else InputPath(path) for path in inputs]
    model = str(zoo.located(model))
    report = api.run(model, files or ["-"], output, **chosen)
    if as_json:
        emit(report, True, lambda: None)
    elif sys.stderr.isatty() or output != "-":
        entry = zoo.entry_of(model)
        own = [option.summary for option in entry.run_options if option.name in chosen and option.summary]
        click.echo((own or [entry.summary])[0].format(**report), err=True)


def _require_one_writer(as_json: bool, output: str) -> None:
    """Raises a usage error if the report and the results both go to stdout."""
    if as_json and output == "-":
        raise click.UsageError("--json and the results both write to stdout; add -o FILE")


@click.command()
@click.argument("model")
@click.option("--user", required=True, metavar="FILE", help="The user: a file of one JSON object or one row.")
@click.option("--items", required=True, metavar="FILE", help="The candidates: a log with the items' columns.")
@click.option("--top", default=10, show_default=True, help="Number of items to print.")
@click.option(
    "--exclude",
    multiple=True,
    metavar="ID",
    help="Id of an item to leave out, such as one that the user has seen; repeatable.",
)
@click.option(
    "--by",
    default=None,
    metavar="LABEL",
    help="Models of several labels: the label that orders the items, or a sum such as 'clicked + 2 bought'. "
    "[default: the first label]",
)
@click.option("-o", "--output", default="-", help="Output file: .csv, .csv.gz, .jsonl or .parquet. [default: stdout]")
@combined(precision, engine, threads, as_json)
def rank(model: str, output: str, as_json: bool, **options: Any) -> None:
    """Rank the items of a file for one user: the probability of a click, the best first.

    The user's columns are read and computed once, so this is faster than a full row per item.
    """
    from zoo import api

    _require_one_writer(as_json, output)
    report = api.rank(model, options.pop("user"), options.pop("items"), output, **options)
    if as_json:
        emit(report, True, lambda: None)
    elif sys.stderr.isatty() or output != "-":
        ordered = f" by {report['by']}" if "by" in report else ""
        click.echo(
            f"the best {report['ranked']:,} of {report['items']:,} items{ordered}, {report['precision']} in "
            f"{report['engine']}",
            err=True,
        )


@click.command()
@click.argument("model")
@click.option(
    "--to",
    required=True,
    type=click.Choice(["triton", "ovms", "sentence-transformers", "huggingface", "npz", "safetensors"]),
    help="Target model server; sentence-transformers: a folder for SentenceTransformer; huggingface: a folder for "
    "AutoModelForSeq2SeqLM, of an imported translation model; npz or safetensors: a file of a recommender's embedding "
    "tables.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    help="Folder of the model repository (other contents are kept), or the new folder or file.",
)
@combined(precision, threads)
@as_json
def export(model: str, as_json: bool, **options: Any) -> None:
    """Export MODEL to Triton, the OpenVINO Model Server, sentence-transformers or transformers, or its tables."""
    from zoo import api
    from zoo.api.paths import is_file

    if (to := options["to"]) not in ("triton", "sentence-transformers"):
        refuse(f"has no effect with --to {to}", "threads", *(("precision",) if to != "ovms" else ()))
    if is_file(model):
        refuse("requires a zoo model; an .onnx file is exported as it is", "precision")
    report = api.export(model, **options)
    rows = ", ".join(f"{name} {count:,}" for name, count in report.get("columns", {}).items())
    files = f"{len(report.get('files', ()))} files"
    about = report.get("config") or (f"rows: {rows}" if rows else files)
    emit(report, as_json, lambda: click.echo(f"{report['path']} ({about})"))


@click.command()
@click.argument("old")
@click.argument("new")
@click.option(
    "-o",
    "--output",
    required=True,
    help="File of the delta; or a folder or URL (s3://, redis://HOST/DB#KEY, ...) of numbered deltas, to which it is "
    "added; with --apply: folder of the new model.",
)
@click.option("--all", "whole", is_flag=True, help="Also write the changes of the float model and its weights.")
@click.option("--apply", is_flag=True, help="Apply the delta NEW, written with --all, to the model OLD.")
@as_json
def delta(old: str, new: str, output: str, whole: bool, apply: bool, as_json: bool) -> None:
    """Write the difference of the models OLD and NEW, for zoo serve --deltas; or apply it to a copy of OLD."""
    from zoo import api

    show(api.delta(old, new, output, apply=apply, whole=whole), as_json)


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind; 0.0.0.0 for all interfaces.")
@click.option("--port", default=8000, show_default=True, help="Port; 0 for any free port.")
@click.option("--workers", type=int, default=None, help="Inference processes. [default: cores / threads]")
@click.option("--max-batch", default=64, show_default=True, help="Maximum dynamic batch size, in requests.")
@click.option("--queue", default=256, show_default=True, help="Maximum number of queued requests; status 429 beyond.")
@click.option("--deadline", type=Duration(), default="30s", show_default=True, help="Default request timeout.")
@click.option(
    "--read-timeout", type=Duration(), default="20s", show_default=True, help="Timeout for receiving a request body."
)
@click.option("--grace", type=Duration(), default="30s", show_default=True, help="Graceful shutdown timeout.")
@click.option("--max-body", default=64 << 20, show_default=True, help="Maximum request size in bytes.")
@click.option(
    "--api-key-file", default=None, help="File of API keys, one per line; requests without a valid key get status 401."
)
@click.option("--cors-origin", "cors_origins", multiple=True, help="Allowed CORS origin; repeatable.")
@click.option("--certfile", default=None, help="TLS certificate, PEM.")
@click.option("--keyfile", default=None, help="TLS private key, PEM.")
@click.option("--access-log", is_flag=True, help="Access log on stdout, one JSON line per request.")
@click.option(
    "--items",
    multiple=True,
    metavar="[MODEL=]FILE",
    help="Items that a recommender ranks for users by their ids (:rank); repeatable.",
)
@click.option(
    "--deltas",
    multiple=True,
    metavar="[MODEL=]PLACE",
    help="Folder or URL (s3://, redis://HOST/DB#KEY, ...) of deltas to apply in order (zoo delta); repeatable.",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Reload a model when its graph (int8.onnx; fp32: rewritten.onnx) or its items change.",
)
@click.option("--on", type=click.Choice(["ray"]), default=None, help="Serve on a Ray cluster with Ray Serve.")
@click.option("--address", default=None, help="With --on ray: cluster address, or auto. [default: a local cluster]")
@click.option(
    "--replicas",
    default=None,
    metavar="N|MIN:MAX",
    help="With --on ray: number of replicas, fixed or autoscaled. [default: 1:cores]",
)
@click.option(
    "--max-models",
    type=int,
    default=None,
    help="With --on ray: maximum number of open models per replica. [default: all]",
)
@combined(network, precision, engine, threads)
def serve(models: tuple[str, ...], **options: Any) -> None:
    """Serve MODELs over HTTP until SIGTERM or Ctrl-C: raw input, tensors, or the text APIs of OpenAI and others."""
    from zoo import api

    on, cluster = options.pop("on"), {name: options.pop(name) for name in ("address", "replicas", "max_models")}
    cluster = {name: value for name, value in cluster.items() if value is not None}
    if on:
        if options.pop("workers") is not None:
            raise click.UsageError("--on ray takes --replicas instead of --workers")
        api.serve_on_ray(models, **options, **cluster)
        return
    if cluster:
        raise click.UsageError(f"--{next(iter(cluster)).replace('_', '-')} requires --on ray")
    api.serve(models, **options)
