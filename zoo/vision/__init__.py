"""What the image classifiers share."""

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe


def entry(name: str, title: str, family: str, key: str) -> Entry:
    """The entry of a network of the package zoo.`family`, whose train.py holds its settings under `key` and
    FINETUNE_`key`.
    """
    return Entry(
        name=name,
        title=title,
        task="images",
        train=f"zoo.{family}.train:train",
        settings=f"zoo.{family}.train:{key}",
        finetune_settings=f"zoo.{family}.train:FINETUNE_{key}",
        freeze=f"zoo.{family}.freeze:freeze",
        rewrites="zoo.vision.export.rewrites:passes",
        evaluate="zoo.vision.metrics:evaluate",
        pipeline="zoo.vision.inference:ImagePipeline",
        checkpoint="model.pt",
        processes="torch",
        recipe=QuantRecipe(search=True),
        harness="zoo.vision.timed_evaluation:harness",
        summary="{images:,} images, {skipped:,} left out, {images_per_second:,.0f} images/s, {precision} in {engine}",
        report_sections="zoo.vision.report_sections:sections",
        network=f"zoo.{family}.train:network",
        prune="zoo.vision.training.pruning:PrunableImages",
    )
