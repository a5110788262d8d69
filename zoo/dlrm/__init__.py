"""DLRM (Naumov et al. 2019): click-through rate from the columns of any log."""

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe
from zoo.clicks import BOUND, SUMMARY

ENTRY = Entry(
    name="dlrm",
    title="DLRM (Naumov et al. 2019): click-through rate from the columns of any log",
    task="clicks",
    train="zoo.dlrm.train:train",
    settings="zoo.dlrm.train:TRAIN",
    finetune_settings="zoo.dlrm.train:FINETUNE",
    freeze="zoo.dlrm.freeze:freeze",
    from_onnx="zoo.clicks.from_onnx:from_onnx",
    rewrites="zoo.clicks.rewrites:passes",
    evaluate="zoo.clicks.metrics:evaluate",
    pipeline="zoo.clicks.score:LogPipeline",
    checkpoint="model.pt",
    recipe=QuantRecipe(observer="minmax", correct=False, keep_float=("dots.*",), bound=BOUND),
    native="zoo.clicks.fold_program:fold_program",
    network="zoo.dlrm.freeze:network",
    prune="zoo.clicks.prune:PrunableLog",
    files=("sample.csv.gz",),
    report_sections="zoo.clicks.report_sections:sections",
    summary=SUMMARY,
    processes="torch",
    schema=True,
)
