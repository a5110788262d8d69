"""Options shared by several commands, and the types of their values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

Function = TypeVar("Function", bound=Callable[..., Any])


class Numbers(click.ParamType[Any]):
    """Comma-separated integers."""

    name = "N,N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType.convert`: "1,2" becomes (1, 2)."""
        try:
            return tuple(int(number) for number in value.split(",")) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is no comma-separated list of whole numbers", param, ctx)


class Threads(click.ParamType[Any]):
    """A number of threads, or "auto"."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType.convert`: "auto" becomes the number of cores, see `Processors.threads`."""
        from pipelines.core import machine  # slow to import for most commands

        if value == "auto":
            return machine.processors().threads
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is no whole number, nor auto", param, ctx)


class Words(click.ParamType[Any]):
    """Comma-separated names."""

    name = "NAME,NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType.convert`: "a,b" becomes ("a", "b")."""
        if not isinstance(value, str):
            return value
        words = tuple(word.strip() for word in value.split(",") if word.strip())
        return words or self.fail(f"{value!r} has no names", param, ctx)


class Share(click.ParamType[Any]):
    """A fraction: "0.5%" or 0.005."""

    name = "SHARE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType.convert`: "0.5%" becomes 0.005."""
        try:
            share = float(str(value).removesuffix("%")) / (100 if str(value).endswith("%") else 1)
        except ValueError:
            share = -1.0
        return share if 0 <= share <= 1 else self.fail(f"{value!r} is not a share such as 0.5% or 0.005", param, ctx)


class Duration(click.ParamType[Any]):
    """A duration in seconds: "90s", "20m", "1.5h", or a number."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType.convert`: "20m" becomes 1200.0."""
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


def _with_isa(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Sets $ZOO_ISA, which the processes that a command starts inherit."""
    from pipelines.core import settings
    from pipelines.core.errors import RequestError
    from pipelines.kernels import extension

    before = os.environ.get("ZOO_ISA")

    def restore() -> None:
        if before is None:
            os.environ.pop("ZOO_ISA", None)
        else:
            os.environ["ZOO_ISA"] = before

    if value is not None:
        os.environ["ZOO_ISA"] = value
        ctx.call_on_close(restore)
    if settings.isa():
        try:
            extension.isas()  # refuses an instruction set that is not there
        except RequestError:
            restore()  # the context of a refused command is not closed
            raise


def combined(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Combines options into one decorator, in this order.

    Args:
        *options: Decorators of click.

    Returns:
        Decorator.
    """

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def refuse(fault: str, *names: str) -> None:
    """Raises a usage error if the command line has one of these options.

    Args:
        fault: Rest of the message, such as "requires --data".
        *names: Names of parameters of the command.
    """
    context = click.get_current_context()
    for option in context.command.get_params(context):
        if option.name in names and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{max(option.opts, key=len)} {fault}")


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
precision = click.option(
    "--precision",
    default="int8",
    show_default=True,
    help="fp32, int8, or bf16 (fp32 computed in bfloat16 by OpenVINO, if the CPU supports it).",
)
FORM = "form"  # key of a command's context


def _keep_form(context: click.Context, _: click.Parameter, value: tuple[str, ...]) -> None:
    context.meta[FORM] = value


def _with_form(context: click.Context, _: click.Parameter, value: str) -> str:
    """The engine native in the form that --form names."""
    forms = context.meta.get(FORM)
    if forms and value not in ("auto", "native"):
        raise click.UsageError(f"--form selects among the forms of the engine native; found --engine {value}")
    if forms and len(forms) > 1:
        raise click.UsageError(f"found --form {','.join(forms)}, expected one form; zoo benchmark compares several")
    return f"native:{forms[0]}" if forms else value


def _with_forms(context: click.Context, _: click.Parameter, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The engines, native in all forms that --form names."""
    forms = context.meta.get(FORM)
    if not forms:
        return value
    if value and "native" not in value:
        raise click.UsageError(f"--form selects among the forms of the engine native; found --engine {','.join(value)}")
    named = [f"native:{form}" for form in forms]
    return (*(name for name in value or () if name != "native"), *named)


form = click.option(
    "--form",
    type=Words(),
    default=(),
    is_eager=True,
    expose_value=False,
    callback=_keep_form,
    help="Recommenders in the engine native: form of the first layer, as `zoo info` lists them. "
    "[default: the fastest on this machine]",
)
engine = combined(
    click.option(
        "--engine",
        default="auto",
        show_default=True,
        callback=_with_form,
        help="auto (the fastest on this machine), onnxruntime, openvino or native.",
    ),
    form,
)
engines = combined(
    click.option(
        "--engine",
        "engines",
        type=Words(),
        default=None,
        callback=_with_forms,
        help="Inference engines. [default: all that the machine and the model support]",
    ),
    form,
)
isa = click.option(
    "--isa",
    metavar="NAME",
    default=None,
    expose_value=False,
    is_eager=True,
    callback=_with_isa,
    help="Fastest instruction set that the native kernels may use, such as avx512, avx_vnni or avx2; "
    "`zoo doctor` lists them. [default: $ZOO_ISA, else any]",
)


def _threads(more: str = "") -> Callable[[Function], Function]:
    """--threads and --isa, with `more` in the help of --threads."""
    text = f"Number of intra-op threads, or auto: one for each (performance) core that the process may use.{more}"
    return combined(click.option("--threads", type=Threads(), default=1, show_default=True, help=text), isa)


threads = _threads()
run_threads = _threads(" Also the number of blocks of input that are computed concurrently.")
batch_size = click.option(
    "--batch-size",
    type=int,
    default=None,
    help="Batch size. [default: 512 rows, 4 images, 32 sentences]",
)
on_error = click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="raise: stop at an invalid row; skip: leave it out and count it.",
)


def _columns(more: str = "") -> Callable[[Function], Function]:
    """--column, with `more` in its help."""
    text = f"Text encoders: columns of texts and label in a table, e.g. query,text,label. [default: by name]{more}"
    return click.option("--column", "columns", type=Words(), default=(), help=text)


columns = _columns()
evaluated_columns = _columns(" Recommenders: the column of the users, for GAUC.")
observer = click.option(
    "--observer",
    default=None,
    help="Range estimator: auto, minmax, percentile, mse or kl. [default: the recipe's]",
)
max_memory = click.option(
    "--max-memory",
    default="128MB",
    show_default=True,
    help="Memory limit of the calibration: model and observed activations.",
)
time_budget = click.option(
    "--time-budget",
    type=Duration(),
    default="5m",
    show_default=True,
    help="Time limit of the weight and bias correction of an .onnx file; remaining layers are not corrected.",
)
preprocess = click.option(
    "--preprocess",
    default=None,
    metavar="FILE",
    help="JSON file with the image preprocessing of an .onnx file; for folders of images.",
)
network = combined(
    click.option(
        "--task",
        default=None,
        metavar="NAME",
        help="Task of an .onnx file: detect, segment, classify or embed. [default: that of the network]",
    ),
    click.option(
        "--labels",
        default=None,
        metavar="FILE",
        help="Class names of an .onnx file: one a line, JSON, or imagenet, coco or coco91. "
        "[default: those of the network]",
    ),
    preprocess,
    click.option("--confidence", type=float, default=None, help="Detectors: minimum score. [default: 0.25]"),
    click.option(
        "--iou", type=float, default=None, help="Detectors: threshold of the non-maximum suppression. [default: 0.7]"
    ),
)
correct = click.option(
    "--correct/--no-correct",
    default=None,
    help="Adaptive weight rounding and bias correction. [default: yes]",
)
search = click.option(
    "--search/--no-search",
    default=None,
    help="Also try channel equalization, weight clipping and other ranges, and keep the candidate with the highest "
    "output SQNR; takes minutes.",
)
effort = click.option(
    "--effort",
    default=None,
    metavar="NAME",
    help="Calibration effort for an .onnx file: fast (ranges chosen on a few samples, bias correction only), default, "
    "or best (every choice evaluated on all samples). [default: default]",
)
training = combined(
    click.option(
        "--data",
        multiple=True,
        required=True,
        help="Files (click logs: also folders and quoted patterns), a folder written by datasets, or a hub id; "
        "repeatable.",
    ),
    click.option("-o", "--output", required=True, help="Folder of the trained model."),
    click.option("--resume", is_flag=True, help="Resume from the last checkpoint in the output folder."),
    click.option("--seed", type=int, default=None, help="Random seed."),
    click.option("--epochs", type=int, default=None, help="Number of epochs."),
    click.option("--batch-size", type=int, default=None, help="Training batch size."),
    click.option("--learning-rate", type=float, default=None, help="Learning rate."),
    click.option(
        "--teacher",
        default=None,
        help="Teacher model of the same task for knowledge distillation.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="Any other training setting; repeatable.",
    ),
    click.option(
        "--tune-communication",
        is_flag=True,
        help="Benchmark gradient exchange first and use the fastest setting; cached. Translation and images.",
    ),
    click.option("--on", type=click.Choice(["ray"]), default=None, help="Train on a Ray cluster."),
    click.option("--address", default=None, help="With --on ray: cluster address, or auto. [default: a local cluster]"),
    click.option(
        "--workers",
        default=None,
        metavar="N|MIN:MAX",
        help="With --on ray: number of processes; MIN:MAX takes as many as are available.",
    ),
    click.option("--cores", type=int, default=None, help="With --on ray: cores per worker. [default: 1]"),
    click.option(
        "--storage",
        default=None,
        help="With --on ray: shared folder or URL for checkpoints. [default: folder of the output]",
    ),
    on_error,
    as_json,
)
