"""Click models that come as ONNX graphs and are of no family here: `zoo quantize RANKER.onnx --schema schema.json`."""

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe
from zoo.clicks import BOUND, SUMMARY

ENTRY = Entry(
    name="ranker",
    title="Ranker: click-through rate by an ONNX graph from elsewhere",
    task="clicks",
    train="zoo.ranker.elsewhere:train",
    settings="zoo.ranker.elsewhere:TRAIN",
    finetune_settings="zoo.ranker.elsewhere:TRAIN",
    freeze="zoo.ranker.elsewhere:freeze",
    from_onnx="zoo.clicks.from_onnx:from_onnx",
    rewrites="zoo.clicks.rewrites:passes",
    evaluate="zoo.clicks.metrics:evaluate",
    pipeline="zoo.clicks.score:LogPipeline",
    checkpoint="ranker.onnx",
    recipe=QuantRecipe(observer="minmax", bound=BOUND),
    native="zoo.clicks.fold_program:fold_program",
    files=("sample.csv.gz",),
    summary=SUMMARY,
)
