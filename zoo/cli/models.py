"""Commands that list, download, build and describe models."""

from __future__ import annotations

import click

import zoo
from zoo.cli.options import as_json
from zoo.cli.output import emit, show, table, tree


@click.command("list")
@as_json
def list_models(as_json: bool) -> None:
    """List the pretrained models."""
    hub = zoo.hub()
    cards = [hub.card(name) for name in hub.names()]
    models = [{"name": card.name, "entry": card.entry, "description": card.description} for card in cards]
    emit(models, as_json, lambda: table(["name", "family", "description"], [list(each.values()) for each in models]))


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
@click.option(
    "--speed", is_flag=True, help="Also measure the peak int8 throughput of one core for each instruction set."
)
@as_json
def doctor(speed: bool, as_json: bool) -> None:
    """Check this machine: CPU, VNNI, versions, cache, and the int8 accuracy of every engine."""
    from zoo import api

    show(api.doctor(speed), as_json)
