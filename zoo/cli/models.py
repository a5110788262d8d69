"""The commands that list, fetch, build and describe models."""

from __future__ import annotations

import click

import zoo
from zoo.cli.options import as_json
from zoo.cli.output import emit, show, table, tree


@click.command("list")
@as_json
def list_models(as_json: bool) -> None:
    """The pretrained models."""
    hub = zoo.hub()
    cards = [hub.card(name) for name in hub.names()]
    models = [{"name": card.name, "entry": card.entry, "description": card.description} for card in cards]
    emit(models, as_json, lambda: table(["name", "family", "what it is"], [list(each.values()) for each in models]))


@click.command()
@click.argument("model")
@as_json
def info(model: str, as_json: bool) -> None:
    """What is known of MODEL: card, files, how it was built and quantized; of an .onnx file, whether the native kernels
    run it; of a plan, what was timed and chosen, and whether it holds here.
    """
    from zoo import api

    report = api.info(model)
    emit(report, as_json, lambda: tree({key: value for key, value in report.items() if key != "quantization"}))


@click.command()
@click.argument("model")
@as_json
def download(model: str, as_json: bool) -> None:
    """Fetch and verify the files of MODEL."""
    from zoo import api

    path = str(api.download(model))
    emit({"model": model, "path": path}, as_json, lambda: click.echo(path))


@click.command()
@click.argument("model")
@click.option("--force", is_flag=True, help="Make every file anew.")
@as_json
def build(model: str, force: bool, as_json: bool) -> None:
    """Make every file of MODEL that is missing or stale, up to int8.onnx."""
    from zoo import api

    show(api.build(model, force=force), as_json)


@click.command()
@click.option(
    "--speed", is_flag=True, help="Also how many int8 products a core makes in registers, the limit of layers."
)
@as_json
def doctor(speed: bool, as_json: bool) -> None:
    """What this machine can do: CPU, VNNI, versions, cache, and a check of int8 against float."""
    from zoo import api

    show(api.doctor(speed), as_json)
