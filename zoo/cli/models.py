"""Commands that list, download, build and describe models."""

from __future__ import annotations

from typing import Any

import click

import zoo
from zoo.cli.options import as_json, isa
from zoo.cli.output import emit, show, table, tree


@click.command("list")
@as_json
def list_models(as_json: bool) -> None:
    """List the pretrained models."""
    hub = zoo.hub()
    cards = [hub.card(name) for name in hub.names()]
    models = [{"name": card.name, "entry": card.entry, "description": card.description} for card in cards]
    emit(models, as_json, lambda: table(["name", "family", "description"], [list(model.values()) for model in models]))


@click.command()
@click.argument("model")
@as_json
def info(model: str, as_json: bool) -> None:
    """Describe a model, an .onnx file, a delta or a plan file.

    Prints the card, files, build record and quantization report of a model, the native support of an .onnx file, or the
    timings and selection of a plan file, and whether the plan is valid on this machine.
    """
    from zoo import api

    report = api.info(model)
    emit(report, as_json, lambda: tree({key: value for key, value in report.items() if key != "quantization"}))


@click.command()
@click.argument("model")
@as_json
def download(model: str, as_json: bool) -> None:
    """Download and verify the files of MODEL."""
    from zoo import api

    path = str(api.download(model))
    emit({"model": model, "path": path}, as_json, lambda: click.echo(path))


@click.command()
@click.argument("model")
@click.option("--force", is_flag=True, help="Rebuild every file.")
@as_json
def build(model: str, force: bool, as_json: bool) -> None:
    """Build missing or stale files of MODEL, up to int8.onnx."""
    from zoo import api

    show(api.build(model, force=force), as_json)


@click.command()
@click.argument("model")
@click.argument("repository", metavar="hf://ORG/NAME")
@click.option("--create", is_flag=True, help="Create the repository if there is none.")
@click.option("--private", is_flag=True, help="With --create: make it private.")
@click.option("--signature", metavar="KEY", default=None, help="Sign the files with a private key (PEM).")
@as_json
def push(model: str, repository: str, as_json: bool, **options: Any) -> None:
    """Upload MODEL with a model card to the Hugging Face Hub; HF_TOKEN or `hf auth login` has the token."""
    from zoo import api

    report = api.push(model, repository, **options)
    emit(report, as_json, lambda: click.echo(report["url"]))


@click.command()
@click.argument("model")
@click.option("--key", required=True, help="Public key of the signature (PEM).")
@as_json
def verify(model: str, key: str, as_json: bool) -> None:
    """Verify the signature of MODEL: hf://ORG/NAME, or a folder with all files of its repository."""
    from zoo import api

    report = api.verify(model, key)
    emit(report, as_json, lambda: click.echo(f"{len(report['files'])} files are as they were signed"))


@click.command()
@click.option(
    "--speed", is_flag=True, help="Also measure the peak int8 throughput of one core for each instruction set."
)
@isa
@as_json
def doctor(speed: bool, as_json: bool) -> None:
    """Check this machine: CPU, VNNI, versions, cache, and the int8 accuracy of every engine."""
    from zoo import api

    show(api.doctor(speed), as_json)
