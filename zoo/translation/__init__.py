"""Translation by a Transformer (Vaswani et al. 2017, "Attention Is All You Need")."""

from pipelines.models.entry import Entry, RunOption
from pipelines.quantization.recipe import QuantRecipe

ENTRY = Entry(
    name="transformer-mt",
    title="Transformer: translation of sentences, encoder-decoder with beam search",
    task="translation",
    train="zoo.translation.training.train:train",
    settings="zoo.translation.training.train:TRAIN",
    finetune_settings="zoo.translation.training.train:FINETUNE",
    freeze="zoo.translation.export.freeze:freeze",
    rewrites="zoo.translation.export.rewrites:passes",
    evaluate="zoo.translation.metrics:evaluate",
    pipeline="zoo.translation.inference:TranslationPipeline",
    importer="zoo.translation.importers:IMPORTER",
    shortlist="zoo.translation.search.shortlist:for_model",
    prune="zoo.translation.training.pruning:PrunableText",
    checkpoint="model.pt",
    processes="torch",
    # the MatMuls of attention are small: int8 would cost more than it saves
    recipe=QuantRecipe(correct=False, keep_float=(r".*\.(products|found)",)),
    files=("vocabulary.model", "shortlist.npz"),
    run_options=(
        RunOption(
            "beam", int, None, "hypotheses followed at once; 1 is greedy search. [default: 4, or the model's own]"
        ),
        RunOption("n_best", int, 1, "so many for each sentence, at most the beam."),
        RunOption("scores", bool, False, "mean log probability of a token before each."),
        RunOption("sentences", bool, False, "the sentences of a line are translated one by one."),
        RunOption("source_language", str, None, "what the text is in, for a model of several languages."),
        RunOption("target_language", str, None, "what it is translated into."),
        RunOption("max_tokens", int, None, "of a translation. [default: the model's, or twice its source's and 10]"),
    ),
    summary=(
        "{sentences:,} sentences, {skipped:,} left out, {sentences_per_second:,.0f} sentences/s, "
        "{precision} in {engine}"
    ),
    report_sections="zoo.translation.report_sections:sections",
)
