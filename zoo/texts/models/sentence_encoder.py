"""Sentence encoders: a text becomes a vector (Reimers and Gurevych 2019, "Sentence-BERT")."""

from pipelines.models.family import RunOption
from pipelines.quantization.recipe import QuantRecipe
from zoo.texts.family import TextFamily

SENTENCE_ENCODER = TextFamily(
    name="sentence-encoder",
    title="Sentence encoder: texts to vectors, BERT, RoBERTa, DistilBERT or MPNet",
    task="embedding",
    scores=False,
    # the products of attention are small: int8 would cost more than it saves
    recipe=QuantRecipe(keep_float=(r".*\.(products|found)",), smooth=True),
    run_options=(
        RunOption("column", str, None, "of CSV, TSV, JSON lines or Parquet that holds the text. [default: text, ...]"),
        RunOption("output_dtype", str, "float32", "of the vectors: float32, float16, int8 or binary."),
        RunOption("prompt", str, None, "put before each text: one of the model's names, such as query, or a text."),
    ),
    summary=(
        "{texts:,} texts, {skipped:,} left out, {cut:,} cut, {texts_per_second:,.0f} texts/s, {precision} in {engine}"
    ),
)
