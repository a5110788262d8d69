"""Cross-encoders: pairs of texts are scored, to rerank search results (Nogueira and Cho 2019)."""

from pipelines.models.family import RunOption
from pipelines.quantization.recipe import QuantRecipe
from zoo.texts.family import TextFamily
from zoo.texts.training.config import TrainConfig

CROSS_ENCODER = TextFamily(
    name="cross-encoder",
    title="Cross-encoder: pairs of texts to scores, BERT, RoBERTa, DistilBERT or MPNet",
    task="ranking",
    scores=True,
    config=TrainConfig(max_length=0),
    # products of attention, and a head that sees one row a pair, are small: int8 would cost more than it saves
    recipe=QuantRecipe(keep_float=(r".*\.(products|found)", r"(dense|classifier)(\..*)?|scores"), smooth=True),
    run_options=(
        RunOption("column", str, None, "two of CSV, TSV, JSON lines or Parquet: query,text. [default: the first two]"),
        RunOption("raw", bool, False, "scores before the sigmoid or softmax."),
    ),
    summary=(
        "{texts:,} pairs, {skipped:,} left out, {cut:,} cut, {texts_per_second:,.0f} pairs/s, {precision} in {engine}"
    ),
)
