"""The family of Transformers for translation (Vaswani et al. 2017, "Attention Is All You Need")."""

from pipelines.models.family import RunOption
from pipelines.quantization.recipe import QuantRecipe
from zoo.translation.family import TranslationFamily

TRANSFORMER_MT = TranslationFamily(
    name="transformer-mt",
    title="Transformer: translation of sentences, encoder-decoder with beam search",
    # the MatMuls of attention are small: int8 would cost more than it saves
    recipe=QuantRecipe(correct=False, keep_float=(r".*\.(products|found)",)),
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
)
