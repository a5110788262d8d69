"""The commands that compute with a model: run, serve; and export."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

import zoo
from zoo.cli.options import Duration, as_json, batch_size, engine, precision, threads, together
from zoo.cli.output import emit, tree

logger = logging.getLogger(__name__)


class Run(click.Command):
    """`zoo run`, with the options that the families declare (`Family.run_options`)."""

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


@click.command(cls=Run)
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
    from zoo import api

    check, shard, suffix = (options.pop(name) for name in ("check", "shard", "format"))
    on, cluster = options.pop("on"), {name: options.pop(name) for name in ("address", "workers")}
    if on is None and any(value is not None for value in cluster.values()):
        raise click.UsageError("--address and --workers are of --on ray")
    if shard and on:
        raise click.UsageError("--on ray takes all shards; leave --shard out")
    if check or shard or on:
        given = {name: value for name, value in options.items() if value is not None}
        if check:
            report = api.check(model)
        elif on:
            report = api.run_on_ray(model, list(inputs), output, format=suffix or "", **cluster, **given)
        else:
            report = api.run_shard(model, list(inputs), output, shard, format=suffix or "", **given)
        emit(report, as_json, lambda: tree({key: value for key, value in report.items() if key != "files"}))
        return
    if suffix:
        raise click.UsageError("--format is of --shard and --on; a single output is named by its suffix")
    if as_json and output == "-":
        raise click.UsageError("--json prints a summary on stdout, where the results would go; add -o FILE")
    given = {name: value for name, value in options.items() if value is not None}
    files = [each if each == "-" or "://" in each or "\t" in each else Named(each) for each in inputs]
    report = api.run(model, files or ["-"], output, **given)
    if as_json:
        emit(report, True, lambda: None)
    elif sys.stderr.isatty() or output != "-":
        entry = zoo.entry_of(model)
        own = [each.summary for each in entry.run_options if each.name in given and each.summary]
        click.echo((own or [entry.summary])[0].format(**report), err=True)


@click.command()
@click.argument("model")
@click.option("--to", required=True, type=click.Choice(["triton", "ovms"]), help="The server whose repository it is.")
@click.option("-o", "--output", required=True, help="The repository, a folder; what else it holds stays.")
@together(precision, threads)
@as_json
def export(model: str, as_json: bool, **options: Any) -> None:
    """Put MODEL into a model repository of NVIDIA Triton or the OpenVINO Model Server."""
    from zoo import api

    report = api.export(model, **options)
    emit(report, as_json, lambda: click.echo(f"{report['path']} ({report['config']})"))


@click.command()
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
    from zoo import api

    on, cluster = options.pop("on"), {name: options.pop(name) for name in ("address", "replicas", "max_models")}
    cluster = {name: value for name, value in cluster.items() if value is not None}
    if on:
        if options.pop("workers") is not None:
            raise click.UsageError("--on ray has --replicas in place of --workers")
        api.serve_on_ray(models, **options, **cluster)
        return
    if cluster:
        raise click.UsageError(f"--{next(iter(cluster)).replace('_', '-')} is of --on ray")
    api.serve(models, **options)
