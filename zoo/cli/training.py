"""The commands that make a float model: train, finetune, freeze, import; and schema."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from zoo.cli.options import Words, as_json, columns, on_error, together, training
from zoo.cli.output import INTERRUPTED, emit, fail, show, table

CLUSTER = ("address", "workers", "cores", "storage")  # options of training on Ray
BEGUN = ("state.*", "run.json")  # in a checkpoint: what --resume goes on from, of a training and of a strategy
NAMED = ("seed", "epochs", "batch_size", "learning_rate", "teacher")  # settings of training with an option of their own


@click.command()
@click.argument("family")
@click.option("--schema", default=None, help="A click log's columns (zoo schema), or criteo. [default: inferred]")
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

    Several processes share the work under torchrun.
    """
    from zoo import api

    if held_out is not None:
        options["settings"] = (*options["settings"], f"held_out={held_out}")
    _trained(api.train, family, as_json, **options)


@click.command()
@click.argument("model")
@click.option(
    "--qat",
    is_flag=True,
    help="Train with the rounding of int8, at a tenth of the learning rate, and keep the ranges found so: translation, "
    "click models of any log, and image classifiers, best of the classes that MODEL has (--set distillation=0.5 also "
    "learns from MODEL as it is in float).",
)
@click.option(
    "--prune",
    default=None,
    metavar="GOAL",
    help="Cut channels, and train on: until int8 is so many times as fast on this machine (1.5x), or a share of them "
    "(ratio=.3); of click models also rows of embeddings whose values are seen less often (rows=5; 1.5x,rows=5).",
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
    from zoo import api

    given = {"prune": prune, "strategy": strategy, "drop": drop}
    options |= (smaller := {name: each for name, each in given.items() if each is not None})
    if options["on"] and smaller:
        raise click.UsageError(f"--{next(iter(smaller))} cuts and trains in one process; leave --on out")

    if qat:
        options["settings"] += ("qat=true",)
    if columns:
        options["settings"] += (f"columns={','.join(columns)}",)
    _trained(api.finetune, model, as_json, **options)


@click.command()
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
    "dcn-v2, dlrm, two-tower, wide-deep, or ranker for any.",
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
    from zoo import api

    show(api.freeze(model, data=list(data) or None, **options), as_json)


@click.command("import")
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

    SOURCE is a folder of transformers (MarianMTModel, M2M-100 and NLLB, mBART, BART; a sentence encoder or
    cross-encoder of BERT, RoBERTa, XLM-R, DistilBERT, MPNet) or its hub id ORG/NAME, which is fetched, a model of
    Marian or Firefox (.npz, .bin), or a folder of CTranslate2. All that is wrong with it is said at once, before
    anything is written; nothing of it is executed.
    """
    from zoo import api

    show(api.import_model(source, output, **options), as_json)


@click.command()
@click.argument("log")
@click.option("-o", "--output", default=None, help="Where the schema goes, as JSON; else it is only shown.")
@click.option("--label", default=None, metavar="COLUMN", help="What is predicted: a column of 0 and 1.")
@click.option("--delimiter", default=None, metavar="CHARACTER", help="Between the columns of CSV. [default: found]")
@together(on_error, as_json)
def schema(log: str, output: str | None, as_json: bool, **options: Any) -> None:
    """What the columns of a click LOG are: numbers, categories, lists, the label, how each is encoded, and why.

    LOG is CSV or TSV with a header, JSON lines (also .gz) or Parquet. The JSON that -o writes can be edited.
    """
    from zoo import api
    from zoo.recommenders.data.schema import COLUMNS

    report = api.schema(log, output, **options)
    emit(report["schema"], as_json, lambda: table(COLUMNS, report["table"]))
    if output is not None and not as_json:
        click.echo(report["path"])


def _trained(verb: Callable[..., dict[str, Any]], model: str, as_json: bool, **options: Any) -> None:
    from zoo.training.runs import is_first

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
        from zoo import api

        verb, left = functools.partial(api.train_on_ray, verb.__name__), {"workers": 1, **cluster, **left}
    try:
        report = verb(model, list(left.pop("data")), output, settings=settings, **left)
    except KeyboardInterrupt:
        if not any(any(Path(output).glob(f"checkpoint/{each}")) for each in BEGUN):
            raise
        fail("interrupted; the same command with --resume goes on from the last checkpoint", INTERRUPTED)
    if is_first():
        show(report, as_json)
