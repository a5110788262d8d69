"""Cross-encoders: pairs of texts are scored, to rerank what a search found (Nogueira and Cho 2019)."""

from pipelines.models.entry import Entry, RunOption
from pipelines.quantization.recipe import QuantRecipe

ENTRY = Entry(
    name="cross-encoder",
    title="Cross-encoder: pairs of texts to scores, BERT, RoBERTa, DistilBERT or MPNet",
    task="ranking",
    train="zoo.texts.training.train:train",
    settings="zoo.texts.training.train:SCORER",
    finetune_settings="zoo.texts.training.train:SCORER",
    freeze="zoo.texts.export.freeze:freeze",
    rewrites="zoo.texts.export.rewrites:passes",
    evaluate="zoo.texts.metrics:evaluate",
    pipeline="zoo.texts.models.cross_encoder:RankingPipeline",
    importer="zoo.cross_encoder.importing:IMPORTER",
    report_sections="zoo.texts.report_sections:sections",
    checkpoint="model.safetensors",
    # products of attention, and a head that sees one row a pair, are small: int8 would cost more than it saves
    recipe=QuantRecipe(keep_float=(r".*\.(products|found)", r"(dense|classifier)(\..*)?|scores"), smooth=True),
    files=("tokenizer.json", "config.json"),
    run_options=(
        RunOption("column", str, None, "two of CSV, TSV, JSON lines or Parquet: query,text. [default: the first two]"),
        RunOption("raw", bool, False, "scores before the sigmoid or softmax."),
    ),
    summary=(
        "{texts:,} pairs, {skipped:,} left out, {cut:,} cut, {texts_per_second:,.0f} pairs/s, {precision} in {engine}"
    ),
)
