"""Residual networks (He et al. 2016): ResNet-50, v1 and v1.5, and ResNet-26d."""

from pipelines.entry import Entry, QuantRecipe

RESNET50 = Entry(
    name="resnet50",
    title="ResNet-50: image classification",
    task="images",
    train="zoo.resnet.train:train",
    settings="zoo.resnet.train:RESNET50",
    finetune_settings="zoo.resnet.train:FINETUNE50",
    freeze="zoo.resnet.freeze:freeze",
    rewrites="zoo.images.rewrites:passes",
    evaluate="zoo.images.predict:evaluate",
    pipeline="zoo.images.predict:ImagePipeline",
    checkpoint="model.pt",
    recipe=QuantRecipe(search=True),
    harness="zoo.images.harness:harness",
)

RESNET26D = Entry(
    name="resnet26d",
    title="ResNet-26d: image classification, half the work of ResNet-50",
    task="images",
    train="zoo.resnet.train:train",
    settings="zoo.resnet.train:RESNET26D",
    finetune_settings="zoo.resnet.train:FINETUNE26D",
    freeze="zoo.resnet.freeze:freeze",
    rewrites="zoo.images.rewrites:passes",
    evaluate="zoo.images.predict:evaluate",
    pipeline="zoo.images.predict:ImagePipeline",
    checkpoint="model.pt",
    recipe=QuantRecipe(search=True),
    harness="zoo.images.harness:harness",
)
