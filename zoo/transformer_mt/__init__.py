"""Translation by a Transformer (Vaswani et al. 2017, "Attention Is All You Need")."""

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe

ENTRY = Entry(
    name="transformer-mt",
    title="Transformer: translation of sentences, encoder-decoder with beam search",
    task="translation",
    train="zoo.transformer_mt.train:train",
    settings="zoo.transformer_mt.train:TRAIN",
    finetune_settings="zoo.transformer_mt.train:FINETUNE",
    freeze="zoo.transformer_mt.freeze:freeze",
    rewrites="zoo.transformer_mt.rewrites:passes",
    evaluate="zoo.transformer_mt.predict:evaluate",
    pipeline="zoo.transformer_mt.predict:TranslationPipeline",
    checkpoint="model.pt",
    # products of attention are small: bytes would cost more than they save
    recipe=QuantRecipe(correct=False, keep_float=(r".*\.(products|found)",)),
    report_sections="zoo.transformer_mt.report_sections:sections",
)
