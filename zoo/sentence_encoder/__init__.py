"""Sentence encoders: a text becomes a vector (Reimers and Gurevych 2019, "Sentence-BERT")."""

from pipelines.models.entry import Entry, RunOption
from pipelines.quantization.recipe import QuantRecipe

ENTRY = Entry(
    name="sentence-encoder",
    title="Sentence encoder: texts to vectors, BERT, RoBERTa, DistilBERT or MPNet",
    task="embedding",
    train="zoo.texts.training.train:train",
    settings="zoo.texts.training.train:ENCODER",
    finetune_settings="zoo.texts.training.train:ENCODER",
    freeze="zoo.texts.export.freeze:freeze",
    rewrites="zoo.texts.export.rewrites:passes",
    evaluate="zoo.texts.metrics:evaluate",
    pipeline="zoo.texts.models.sentence_encoder:SentencePipeline",
    importer="zoo.sentence_encoder.importing:IMPORTER",
    report_sections="zoo.texts.report_sections:sections",
    checkpoint="model.safetensors",
    # the products of attention are small: int8 would cost more than it saves
    recipe=QuantRecipe(keep_float=(r".*\.(products|found)",), smooth=True),
    files=("tokenizer.json", "config.json"),
    run_options=(
        RunOption("column", str, None, "of CSV, TSV, JSON lines or Parquet that holds the text. [default: text, ...]"),
        RunOption("output_dtype", str, "float32", "of the vectors: float32, float16, int8 or binary."),
        RunOption("prompt", str, None, "put before each text: one of the model's names, such as query, or a text."),
    ),
    summary=(
        "{texts:,} texts, {skipped:,} left out, {cut:,} cut, {texts_per_second:,.0f} texts/s, {precision} in {engine}"
    ),
)
