"""Wide & Deep (Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems"): one family under two names.

Rows of Criteo's form, which have no header, and logs with columns of their own differ in the range of their numbers,
and with it in the rewrites of the first layer and the recipe: a model's card has the name.
"""

from dataclasses import replace

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders import BOUND, SUMMARY

ENTRY = Entry(
    name="wide-deep",
    title="Wide & Deep: click-through rate from 13 numbers and 26 hashed categories",
    task="clicks",
    train="zoo.recommenders.models.wide_deep:train",
    settings="zoo.recommenders.models.wide_deep:CRITEO",
    finetune_settings="zoo.recommenders.models.wide_deep:CRITEO_FINETUNE",
    freeze="zoo.recommenders.models.wide_deep:freeze",
    from_graph="zoo.recommenders.importers.tensorflow.importing:from_graph",
    rewrites="zoo.recommenders.export.rewrites:passes_without_header",
    evaluate="zoo.recommenders.metrics:evaluate",
    pipeline="zoo.recommenders.log_pipeline:LogPipeline",
    checkpoint="model.pt",
    former_checkpoint="model.weights.h5",
    recipe=QuantRecipe(observer="minmax", correct=False),
    native="zoo.recommenders.lowering.lower:fold_program",
    network="zoo.recommenders.models.wide_deep:network",
    prune="zoo.recommenders.training.pruning:PrunableLog",
    files=("sample.tsv.gz",),
    report_sections="zoo.recommenders.report_sections:sections",
    summary=SUMMARY,
    processes="torch",
    schema=True,
    by_schema="wide-deep-log",
)
LOGS = replace(
    ENTRY,
    name="wide-deep-log",
    title="Wide & Deep (Cheng et al. 2016): click-through rate from the columns of any log",
    settings="zoo.recommenders.models.wide_deep:LOG",
    finetune_settings="zoo.recommenders.models.wide_deep:LOG_FINETUNE",
    from_graph="",
    from_onnx="zoo.recommenders.importers.rankers:from_onnx",
    rewrites="zoo.recommenders.export.rewrites:passes",
    recipe=QuantRecipe(observer="minmax", correct=False, bound=BOUND),
    files=("sample.csv.gz",),
    report_sections="",
    by_schema="",
)
