"""Wide & Deep (Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems") on Criteo click logs."""

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe
from zoo.clicks import BOUND, SUMMARY

LOGS = Entry(
    name="wide-deep-log",
    title="Wide & Deep (Cheng et al. 2016): click-through rate from the columns of any log",
    task="clicks",
    train="zoo.wide_deep.log.train:train",
    settings="zoo.wide_deep.log.train:TRAIN",
    finetune_settings="zoo.wide_deep.log.train:FINETUNE",
    freeze="zoo.wide_deep.log.freeze:freeze",
    from_onnx="zoo.clicks.from_onnx:from_onnx",
    rewrites="zoo.clicks.rewrites:passes",
    evaluate="zoo.clicks.metrics:evaluate",
    pipeline="zoo.clicks.score:LogPipeline",
    checkpoint="model.pt",
    recipe=QuantRecipe(observer="minmax", correct=False, bound=BOUND),
    native="zoo.clicks.fold_program:fold_program",
    network="zoo.wide_deep.log.freeze:network",
    prune="zoo.clicks.prune:PrunableLog",
    files=("sample.csv.gz",),
    summary=SUMMARY,
    processes="torch",
    schema=True,
)
ENTRY = Entry(
    name="wide-deep",
    title="Wide & Deep: click-through rate from 13 numbers and 26 hashed categories",
    task="clicks",
    train="zoo.wide_deep.train:train",
    settings="zoo.wide_deep.train:TRAIN",
    finetune_settings="zoo.wide_deep.train:FINETUNE",
    freeze="zoo.wide_deep.freeze:freeze",
    from_graph="zoo.wide_deep.freeze:from_graph",
    rewrites="zoo.clicks.rewrites:passes",
    evaluate="zoo.clicks.metrics:evaluate",
    pipeline="zoo.wide_deep.predict:CriteoPipeline",
    checkpoint="model.weights.h5",
    recipe=QuantRecipe(observer="minmax", correct=False),
    native="zoo.clicks.fold:fold",
    files=("sample.tsv.gz",),
    summary=SUMMARY,
    processes="tensorflow",
    by_schema="wide-deep-log",
    prune="zoo.wide_deep.prune:PrunableRows",
    report_sections="zoo.clicks.report_sections:sections",
)
