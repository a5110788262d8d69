"""Two towers (Yi et al. 2019): users and items as vectors, from the columns of any log."""

from pipelines.models.entry import Entry
from pipelines.quantization.recipe import QuantRecipe
from zoo.clicks import SUMMARY

ENTRY = Entry(
    name="two-tower",
    title="Two towers (Yi et al. 2019): users and items as vectors, from the columns of any log",
    task="clicks",
    train="zoo.two_tower.train:train",
    settings="zoo.two_tower.train:TRAIN",
    finetune_settings="zoo.two_tower.train:FINETUNE",
    freeze="zoo.two_tower.freeze:freeze",
    from_onnx="zoo.clicks.from_onnx:from_onnx",
    rewrites="zoo.clicks.rewrites:passes",
    evaluate="zoo.clicks.metrics:evaluate",
    pipeline="zoo.clicks.score:LogPipeline",
    checkpoint="model.pt",
    recipe=QuantRecipe(observer="minmax", correct=False),
    files=("sample.csv.gz",),
    summary=SUMMARY,
    schema=True,
)
