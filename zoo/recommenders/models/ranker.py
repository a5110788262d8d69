"""Rankers that come as ONNX graphs and match no family here: `zoo quantize RANKER.onnx --schema schema.json`."""

from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.family import ERROR_BOUND, RankingFamily

RANKER = RankingFamily(
    name="ranker",
    title="Ranker: click-through rate by an ONNX graph from elsewhere",
    checkpoint="ranker.onnx",
    recipe=QuantRecipe(observer="minmax", bound=ERROR_BOUND),
)
