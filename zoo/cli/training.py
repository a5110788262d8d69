"""Commands that create a float model: train, finetune, freeze, import, schema."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from zoo.cli.options import Words, as_json, columns, combined, on_error, refuse, training
from zoo.cli.output import INTERRUPTED, emit, fail, show, table

CLUSTER = ("address", "workers", "cores", "storage")  # options of training on Ray
CHECKPOINTS = ("state.*", "run.json")  # files that --resume needs, of a training and of a strategy
OPTIONS = ("seed", "epochs", "batch_size", "learning_rate", "teacher")  # training settings with their own option

negative_rate = click.option(
    "--negative-rate",
    type=click.FloatRange(0, 1, min_open=True),
    default=None,
    metavar="SHARE",
    help="Click logs: rate of negative downsampling, such as .05; probabilities are corrected.",
)


@click.command()
@click.argument("family")
@click.option(
    "--schema", default=None, help="Click logs: schema of the columns (zoo schema), or criteo. [default: inferred]"
)
@click.option(
    "--label",
    multiple=True,
    help="Click logs: column to predict, of 0 and 1 or with the values that are 1 (rating>=4, event=buy,cart); "
    "repeatable for families of several labels. [default: label, click, clicked, target or y]",
)
@click.option(
    "--held-out",
    type=float,
    default=None,
    help="Click logs: last rows to hold out, as a count or a fraction. [default: 0.1]",
)
@negative_rate
@click.option(
    "--preset",
    type=click.Choice(["draft"]),
    default=None,
    help="Translation: draft trains a draft model of --teacher for speculative decoding; -o is a new folder for a copy "
    "of the teacher with the draft, or the folder of the teacher.",
)
@training
def train(family: str, as_json: bool, held_out: float | None, negative_rate: float | None, **options: Any) -> None:
    """Train a model FAMILY (e.g. wide-deep) on your data.

    Supports distributed training under torchrun.
    """
    from zoo import api

    if held_out is not None:
        options["settings"] = (*options["settings"], f"held_out={held_out}")
    if negative_rate is not None:
        options["settings"] = (*options["settings"], f"negative_rate={negative_rate}")
    _trained(api.train, family, as_json, **options)


@click.command()
@click.argument("model")
@click.option(
    "--qat",
    is_flag=True,
    help="Quantization-aware training, at a tenth of the learning rate; trained ranges are kept. For translation, "
    "recommenders and image classifiers, preferably of the same classes (--set distillation=0.5 also distills from "
    "the float MODEL).",
)
@click.option(
    "--prune",
    default=None,
    metavar="GOAL",
    help="Structured pruning: int8 speedup on this machine (1.5x) or share of channels (ratio=.3); recommenders also "
    "prune embedding rows of values that occur less often (rows=5; 1.5x,rows=5).",
)
@click.option(
    "--strategy",
    default=None,
    metavar="FILE",
    help="JSON file with the schedule of distillation, pruning and quantization-aware training.",
)
@click.option(
    "--drop",
    type=float,
    default=None,
    help="With --prune or --strategy: maximum drop of the int8 metric. [default: .005 top-1, .001 AUC, .3 BLEU]",
)
@click.option(
    "--delta",
    default=None,
    metavar="PLACE",
    help="Also write the delta from MODEL (zoo delta): a file, or a folder or URL of deltas; scales of MODEL are kept.",
)
@click.option(
    "--freeze",
    type=click.Choice(["encoder"]),
    default=None,
    help="Translation: part that is not trained: the encoder, with the embeddings.",
)
@click.option(
    "--keep-data",
    default=None,
    metavar="DATA",
    help="Translation: pairs of the original domain of MODEL: a part measures BLEU before and after, the rest is mixed "
    "into the training (--set keep_share=.2).",
)
@click.option("--source-language", default=None, help="Translation: source language of a multilingual model.")
@click.option("--target-language", default=None, help="Translation: target language of a multilingual model.")
@click.option("--freeze-towers", is_flag=True, help="Recommenders: train only the embedding tables.")
@click.option(
    "--evict-after",
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Recommenders: evict ids that did not occur in the last N trainings, this one included.",
)
@click.option(
    "--evict-below",
    type=click.IntRange(1),
    default=None,
    metavar="COUNT",
    help="Recommenders: evict ids with fewer occurrences in all trainings, this one included.",
)
@negative_rate
@combined(columns)
@training
def finetune(
    model: str,
    qat: bool,
    as_json: bool,
    columns: Sequence[str],
    prune: str | None,
    strategy: str | None,
    drop: float | None,
    delta: str | None,
    freeze: str | None,
    freeze_towers: bool,
    evict_after: int | None,
    evict_below: int | None,
    negative_rate: float | None,
    **options: Any,
) -> None:
    """Fine-tune MODEL on your data, or compress it with --prune or --strategy.

    Translation and other text to text, also imported: --set adapters=RANK trains low-rank adapters and merges them into
    the weights.
    """
    from zoo import api

    pruning_options = {"prune": prune, "strategy": strategy, "drop": drop, "delta": delta}
    options |= (pruning := {name: setting for name, setting in pruning_options.items() if setting is not None})
    if options["on"] and pruning:
        raise click.UsageError(f"--{next(iter(pruning))} runs in one process; leave --on out")

    if qat:
        options["settings"] += ("qat=true",)
    if freeze_towers:
        options["settings"] += ("freeze_towers=true",)
    if freeze:
        options["settings"] += ("frozen=true",)
    own = {name: options.pop(name) for name in ("keep_data", "source_language", "target_language")}
    own |= {"evict_after": evict_after, "evict_below": evict_below, "negative_rate": negative_rate}
    options["settings"] += tuple(f"{name}={value}" for name, value in own.items() if value is not None)
    if columns:
        options["settings"] += (f"columns={','.join(columns)}",)
    _trained(api.finetune, model, as_json, **options)


@click.command()
@click.argument("model")
@click.option(
    "--from-pb",
    default=None,
    metavar="GRAPH",
    help="Frozen TensorFlow graph (.pb) or SavedModel; MODEL is its family: wide-deep.",
)
@click.option(
    "--from-onnx",
    default=None,
    metavar="RANKER",
    help="ONNX export of a ranker (torch-rechub, DeepCTR-Torch, FuxiCTR, ...); MODEL is its family: deepfm, "
    "dcn-v2, dlrm, autoint, finalmlp, gdcn, two-tower, wide-deep, mmoe, ple, esmm, or ranker for any.",
)
@click.option("--schema", default=None, help="With --from-onnx: schema of the log (zoo schema).")
@click.option(
    "--data", multiple=True, help="With --from-...: rows of the log; the first 4,096 are used for calibration."
)
@click.option("-o", "--output", default=None, help="With --from-... and --shortlist: folder of the new model.")
@click.option(
    "--columns",
    type=Words(),
    default=None,
    help="With --from-pb: column names of a row, as in the graph. [default: natural order] With --from-onnx: columns "
    "of the inputs, in order. [default: by name; for a single matrix: the schema's order]",
)
@click.option(
    "--output-node",
    default=None,
    metavar="NAME",
    help="With --from-...: name of the probability output, if there are several outputs; with several labels one name "
    "for each, separated by commas.",
)
@click.option(
    "--shortlist",
    default=None,
    metavar="DATA",
    help="Translation: parallel text, as in zoo import, or a Marian shortlist (lex.s2t); -o writes a copy of MODEL.",
)
@combined(on_error, as_json)
def freeze(model: str, data: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Export the checkpoint of MODEL as fp32.onnx, or import a third-party graph as an int8 model.

    Supported graphs are TensorFlow graphs of tf.feature_column, and rankers in ONNX with a schema of their log. Rows
    for TensorFlow graphs are tab-separated: label (0 or 1; optional), numeric columns, categorical columns; missing
    values are empty. A missing number takes the default of the graph's ParseExample, or 0; a missing category is not
    looked up.
    """
    from zoo import api

    show(api.freeze(model, data=list(data) or None, **options), as_json)


@click.command("import")
@click.argument("source")
@click.option("-o", "--output", default=None, help="Folder of the new model.")
@click.option("--format", default=None, metavar="NAME", help="Format of SOURCE. [default: detected]")
@click.option("--source-language", default=None, help="Translation: source language of a multilingual model.")
@click.option("--target-language", default=None, help="Translation: target language of a multilingual model.")
@click.option(
    "--prompt", default=None, help="Translation: text before every source, such as a task of T5: 'summarize: '."
)
@click.option(
    "--shortlist",
    default=None,
    metavar="DATA",
    help="Translation: parallel text (SOURCE,TARGET or a file of source TAB target) to build a lexical shortlist of; "
    "the speedup grows with the vocabulary.",
)
@click.option(
    "--pooling", default=None, help="Sentence encoders without a pooling configuration: mean, cls, max, last, ..."
)
@click.option(
    "--normalize",
    is_flag=True,
    default=None,
    help="Sentence encoders without a normalization layer: L2-normalize embeddings.",
)
@click.option(
    "--int8/--no-int8",
    default=True,
    help="Also build int8, calibrated on texts of the package; print its quality on held-out ones. [default: --int8]",
)
@click.option(
    "--keep-float",
    is_flag=True,
    help="Keep the float weights beside int8. [default: rebuilt from SOURCE on demand]",
)
@click.option(
    "--task", default=None, help="Sentence encoders with task adapters: name of the task, such as retrieval.query."
)
@click.option(
    "--template",
    default=None,
    metavar="NAME|FILE",
    help="Rerankers without a chat template for pairs (--format cross-encoder): qwen3-reranker, mxbai-rerank-v2, or a "
    "file NAME.jinja.",
)
@click.option("--force", is_flag=True, help="Replace the model in the output folder.")
@as_json
def import_model(source: str, output: str | None, as_json: bool, **options: Any) -> None:
    """Import a model of another toolkit as a model folder.

    SOURCE is a folder of transformers or its hub id ORG/NAME or hf://ORG/NAME@REVISION, which is downloaded, a model of
    Marian or Firefox (.npz, .bin), or a folder of CTranslate2. Of transformers: MarianMT, M2M-100, NLLB, mBART, BART,
    T5, mT5, UMT5, Pegasus, PLBART, MVP, Blenderbot, Blenderbot-small, FSMT; sentence and sparse encoders,
    cross-encoders, text and token classifiers, extractive question answering and masked language models of BERT,
    RoBERTa, XLM-R, DistilBERT, MPNet, ALBERT, ELECTRA, DeBERTa, ModernBERT, Nomic-BERT, GTE, Jina, T5, Qwen3,
    EmbeddingGemma and others. All problems are reported together, before anything is written. No code of the model is
    executed.
    """
    from zoo import api

    try:
        report = api.import_model(source, output, **options)
    except KeyboardInterrupt:
        from pipelines.models.hub import CARD
        from pipelines.models.pipeline import PRECISIONS

        if output is None or not Path(output, CARD).is_file() or Path(output, PRECISIONS["int8"]).is_file():
            raise
        fail(f"interrupted; {output} has the float model, for int8 run: zoo build {output}", INTERRUPTED)
    show(report, as_json)


@click.command()
@click.argument("logs", nargs=-1, required=True, metavar="LOG...")
@click.option("-o", "--output", default=None, help="JSON file of the schema. [default: only print it]")
@click.option(
    "--label",
    multiple=True,
    metavar="COLUMN",
    help="Column to predict, of 0 and 1 or with the values that are 1 (rating>=4, event=buy,cart); repeatable.",
)
@click.option("--delimiter", default=None, metavar="CHARACTER", help="Delimiter of CSV. [default: detected]")
@click.option("--category", multiple=True, metavar="COLUMN", help="Column that is a category; repeatable.")
@click.option("--number", multiple=True, metavar="COLUMN", help="Column that is a number; repeatable.")
@click.option("--vector", multiple=True, metavar="COLUMN", help="Column of lists of numbers of one length; repeatable.")
@click.option("--ignore", multiple=True, metavar="COLUMN", help="Column that is not used; repeatable.")
@click.option("--family", default=None, help="Family to be trained: din, bst and sasrec read sequences.")
@combined(on_error, as_json)
def schema(logs: tuple[str, ...], output: str | None, as_json: bool, **options: Any) -> None:
    """Infer the schema of a click LOG: type and encoding of every column, with the reason.

    LOG is CSV or TSV with a header, JSON lines (also .gz) or Parquet: files, folders of files, or quoted patterns,
    whose rows are one log. Folders named column=value add the column (Hive partitions). The JSON that -o writes can
    be edited.
    """
    from zoo import api

    report = api.schema(list(logs), output, **options)
    emit(report["schema"], as_json, lambda: table(report["columns"], report["table"]))
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
    settings |= {name: str(options[name]) for name in OPTIONS if options[name] is not None}
    others = {name: value for name, value in options.items() if name not in OPTIONS}
    output = others.pop("output")
    on, cluster_options = others.pop("on"), {name: others.pop(name) for name in CLUSTER}
    cluster = {name: value for name, value in cluster_options.items() if value is not None}
    if on is None and cluster:
        raise click.UsageError(f"--{next(iter(cluster))} requires --on ray")
    if on:
        from zoo import api

        refuse("runs in one process; leave --on out", "preset")
        verb, others = functools.partial(api.train_on_ray, verb.__name__), {"workers": 1, **cluster, **others}
    try:
        report = verb(model, list(others.pop("data")), output, settings=settings, **others)
    except KeyboardInterrupt:
        if not any(any(Path(output).glob(f"checkpoint/{pattern}")) for pattern in CHECKPOINTS):
            raise
        fail("interrupted; resume from the last checkpoint with --resume", INTERRUPTED)
    if is_first():
        show(report, as_json)
