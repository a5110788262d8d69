"""Options that several verbs of the `zoo` command share, and the types of their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])


class Numbers(click.ParamType[Any]):
    """A comma list of whole numbers."""

    name = "N,N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """ "1,2" -> (1, 2)."""
        try:
            return tuple(int(each) for each in value.split(",")) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is not a comma list of whole numbers", param, ctx)


class Words(click.ParamType[Any]):
    """A comma list of names."""

    name = "NAME,NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """ "a,b" -> ("a", "b")."""
        if not isinstance(value, str):
            return value
        words = tuple(each.strip() for each in value.split(",") if each.strip())
        return words or self.fail(f"{value!r} names nothing", param, ctx)


class Share(click.ParamType[Any]):
    """A share: "0.5%" or 0.005."""

    name = "SHARE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """ "0.5%" -> 0.005."""
        try:
            share = float(str(value).removesuffix("%")) / (100 if str(value).endswith("%") else 1)
        except ValueError:
            share = -1.0
        return share if 0 <= share <= 1 else self.fail(f"{value!r} is not a share such as 0.5% or 0.005", param, ctx)


class Duration(click.ParamType[Any]):
    """Seconds: "90s", "20m", "1.5h", or a number."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """ "20m" -> 1200.0."""
        text = str(value)
        try:
            seconds = float(text.rstrip("smh")) * {"m": 60, "h": 3600}.get(text[-1:], 1)
        except ValueError:
            seconds = -1.0
        return (
            seconds
            if 0 <= seconds < math.inf
            else self.fail(f"{value!r} is not a time such as 90s, 20m or 1.5h", param, ctx)
        )


def together(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Several options as one decorator, in this order."""

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
precision = click.option(
    "--precision",
    default="int8",
    show_default=True,
    help="fp32, int8, or bf16: fp32 computed in bfloat16 by openvino, where the CPU can.",
)
engine = click.option(
    "--engine",
    default="auto",
    show_default=True,
    help="auto (the quickest on this machine), onnxruntime, openvino or native.",
)
threads = click.option(
    "--threads", default=1, show_default=True, help="Threads of the engine; `run` scores so many blocks at once."
)
batch_size = click.option(
    "--batch-size",
    type=int,
    default=None,
    help="Samples the model sees at once. [default: 512 rows, 4 images, 32 sentences]",
)
on_error = click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="Stop at a bad row, or leave it out and count it.",
)
columns = click.option(
    "--column",
    "columns",
    type=Words(),
    default=(),
    help="Encoders of texts: of a table, those of the texts and the label, e.g. query,text,label. [default: by name]",
)
observer = click.option(
    "--observer",
    default=None,
    help="How ranges are chosen: auto, minmax, percentile, mse or kl. [default: the recipe's]",
)
max_memory = click.option(
    "--max-memory",
    default="128MB",
    show_default=True,
    help="What the model and the activations observed at once may take in calibration.",
)
time_budget = click.option(
    "--time-budget",
    type=Duration(),
    default="5m",
    show_default=True,
    help="What correcting the layers of an .onnx file may take; those that it does not suffice for go without.",
)
preprocess = click.option(
    "--preprocess",
    default=None,
    metavar="FILE",
    help="JSON that says how an image becomes the .onnx file's input; for folders of images.",
)
correct = click.option(
    "--correct/--no-correct",
    default=None,
    help="Round weights so that their errors cancel on the samples, take shifts out of the biases. [default: yes]",
)
search = click.option(
    "--search/--no-search",
    default=None,
    help="Also try equalized channels, clipped weights and other ranges, keep what the outputs lose least by; "
    "takes minutes.",
)
training = together(
    click.option(
        "--data",
        multiple=True,
        required=True,
        help="Files, a folder written by datasets, or a hub id; may be repeated.",
    ),
    click.option("-o", "--output", required=True, help="Folder for the trained model."),
    click.option("--resume", is_flag=True, help="Go on from the last checkpoint in the output folder."),
    click.option("--seed", type=int, default=None, help="Seed of everything random."),
    click.option("--epochs", type=int, default=None),
    click.option("--batch-size", type=int, default=None),
    click.option("--learning-rate", type=float, default=None),
    click.option(
        "--teacher",
        default=None,
        help="A model of the same task to learn from: its translations, soft labels or probabilities.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="Any other setting of the model's recipe; may be repeated.",
    ),
    click.option(
        "--tune-communication",
        is_flag=True,
        help="Time first how processes exchange gradients fastest here; remembered. Translation, images.",
    ),
    click.option("--on", type=click.Choice(["ray"]), default=None, help="Train on a Ray cluster, in processes."),
    click.option(
        "--address", default=None, help="With --on ray: the cluster's, or auto. [default: one of this machine]"
    ),
    click.option(
        "--workers",
        default=None,
        metavar="N|MIN:MAX",
        help="With --on ray: processes; of MIN to MAX what there is.",
    ),
    click.option("--cores", type=int, default=None, help="With --on ray: of each worker. [default: 1]"),
    click.option(
        "--storage",
        default=None,
        help="With --on ray: a folder that all nodes see, or a URL, for checkpoints. [default: beside the output]",
    ),
    on_error,
    as_json,
)
