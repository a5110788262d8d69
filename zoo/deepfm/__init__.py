"""DeepFM (Guo et al. 2017): click-through rate from the columns of any log."""

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders import BOUND, SUMMARY

ENTRY = Entry(
    name="deepfm",
    title="DeepFM (Guo et al. 2017): click-through rate from the columns of any log",
    task="clicks",
    train="zoo.deepfm.train:train",
    settings="zoo.deepfm.train:TRAIN",
    finetune_settings="zoo.deepfm.train:FINETUNE",
    freeze="zoo.deepfm.freeze:freeze",
    from_onnx="zoo.recommenders.importers.rankers:from_onnx",
    rewrites="zoo.recommenders.export.rewrites:passes",
    evaluate="zoo.recommenders.metrics:evaluate",
    pipeline="zoo.recommenders.log_pipeline:LogPipeline",
    checkpoint="model.pt",
    recipe=QuantRecipe(observer="minmax", correct=False, bound=BOUND),
    native="zoo.recommenders.lowering.lower:fold_program",
    network="zoo.deepfm.freeze:network",
    prune="zoo.recommenders.training.pruning:PrunableLog",
    files=("sample.csv.gz",),
    report_sections="zoo.recommenders.report_sections:sections",
    summary=SUMMARY,
    processes="torch",
    schema=True,
)
