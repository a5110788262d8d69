"""Wide & Deep (Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems") on Criteo click logs."""

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders import BOUND, SUMMARY

LOGS = Entry(
    name="wide-deep-log",
    title="Wide & Deep (Cheng et al. 2016): click-through rate from the columns of any log",
    task="clicks",
    train="zoo.wide_deep.log.train:train",
    settings="zoo.wide_deep.log.train:TRAIN",
    finetune_settings="zoo.wide_deep.log.train:FINETUNE",
    freeze="zoo.wide_deep.log.freeze:freeze",
    from_onnx="zoo.recommenders.importers.rankers:from_onnx",
    rewrites="zoo.recommenders.export.rewrites:passes",
    evaluate="zoo.recommenders.metrics:evaluate",
    pipeline="zoo.recommenders.log_pipeline:LogPipeline",
    checkpoint="model.pt",
    recipe=QuantRecipe(observer="minmax", correct=False, bound=BOUND),
    native="zoo.recommenders.lowering.lower:fold_program",
    network="zoo.wide_deep.log.freeze:network",
    prune="zoo.recommenders.training.pruning:PrunableLog",
    files=("sample.csv.gz",),
    summary=SUMMARY,
    processes="torch",
    schema=True,
)
ENTRY = Entry(
    name="wide-deep",
    title="Wide & Deep: click-through rate from 13 numbers and 26 hashed categories",
    task="clicks",
    train="zoo.recommenders.criteo.train:train",
    settings="zoo.recommenders.criteo.train:TRAIN",
    finetune_settings="zoo.recommenders.criteo.train:FINETUNE",
    freeze="zoo.recommenders.criteo.freeze:freeze",
    from_graph="zoo.recommenders.criteo.freeze:from_graph",
    rewrites="zoo.recommenders.export.rewrites:passes",
    evaluate="zoo.recommenders.metrics:evaluate",
    pipeline="zoo.recommenders.criteo.inference:CriteoPipeline",
    checkpoint="model.weights.h5",
    recipe=QuantRecipe(observer="minmax", correct=False),
    native="zoo.recommenders.lowering.lower:fold_program",
    files=("sample.tsv.gz",),
    summary=SUMMARY,
    processes="tensorflow",
    by_schema="wide-deep-log",
    prune="zoo.recommenders.criteo.pruning:PrunableRows",
    report_sections="zoo.recommenders.report_sections:sections",
)
