"""DLRM (Naumov et al. 2019): click-through rate from the columns of any log."""

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders import BOUND, SUMMARY

ENTRY = Entry(
    name="dlrm",
    title="DLRM (Naumov et al. 2019): click-through rate from the columns of any log",
    task="clicks",
    train="zoo.dlrm.train:train",
    settings="zoo.dlrm.train:TRAIN",
    finetune_settings="zoo.dlrm.train:FINETUNE",
    freeze="zoo.dlrm.freeze:freeze",
    from_onnx="zoo.recommenders.importers.rankers:from_onnx",
    rewrites="zoo.recommenders.export.rewrites:passes",
    evaluate="zoo.recommenders.metrics:evaluate",
    pipeline="zoo.recommenders.log_pipeline:LogPipeline",
    checkpoint="model.pt",
    recipe=QuantRecipe(observer="minmax", correct=False, keep_float=("dots.*",), bound=BOUND),
    native="zoo.recommenders.lowering.lower:fold_program",
    network="zoo.dlrm.freeze:network",
    prune="zoo.recommenders.training.pruning:PrunableLog",
    files=("sample.csv.gz",),
    report_sections="zoo.recommenders.report_sections:sections",
    summary=SUMMARY,
    processes="torch",
    schema=True,
)
