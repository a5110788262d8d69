"""Click models that come as ONNX graphs and are of no family here: `zoo quantize RANKER.onnx --schema schema.json`."""

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders import BOUND, SUMMARY

ENTRY = Entry(
    name="ranker",
    title="Ranker: click-through rate by an ONNX graph from elsewhere",
    task="clicks",
    train="zoo.ranker.elsewhere:train",
    settings="zoo.ranker.elsewhere:TRAIN",
    finetune_settings="zoo.ranker.elsewhere:TRAIN",
    freeze="zoo.ranker.elsewhere:freeze",
    from_onnx="zoo.recommenders.importers.rankers:from_onnx",
    rewrites="zoo.recommenders.export.rewrites:passes",
    evaluate="zoo.recommenders.metrics:evaluate",
    pipeline="zoo.recommenders.log_pipeline:LogPipeline",
    checkpoint="ranker.onnx",
    recipe=QuantRecipe(observer="minmax", bound=BOUND),
    native="zoo.recommenders.lowering.lower:fold_program",
    files=("sample.csv.gz",),
    summary=SUMMARY,
)
