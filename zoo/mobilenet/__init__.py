"""MobileNet V1 (Howard et al. 2017) and V2 (Sandler et al. 2018)."""

from pipelines.entry import Entry, QuantRecipe

MOBILENET_V1 = Entry(
    name="mobilenet-v1",
    title="MobileNet V1: image classification on small machines",
    task="images",
    train="zoo.mobilenet.train:train",
    settings="zoo.mobilenet.train:MOBILENET_V1",
    finetune_settings="zoo.mobilenet.train:FINETUNE_V1",
    freeze="zoo.mobilenet.freeze:freeze",
    rewrites="zoo.images.rewrites:passes",
    evaluate="zoo.images.predict:evaluate",
    pipeline="zoo.images.predict:ImagePipeline",
    checkpoint="model.pt",
    recipe=QuantRecipe(search=True),
    harness="zoo.images.harness:harness",
)

MOBILENET_V2 = Entry(
    name="mobilenet-v2",
    title="MobileNet V2: image classification on small machines, with inverted residuals",
    task="images",
    train="zoo.mobilenet.train:train",
    settings="zoo.mobilenet.train:MOBILENET_V2",
    finetune_settings="zoo.mobilenet.train:FINETUNE_V2",
    freeze="zoo.mobilenet.freeze:freeze",
    rewrites="zoo.images.rewrites:passes",
    evaluate="zoo.images.predict:evaluate",
    pipeline="zoo.images.predict:ImagePipeline",
    checkpoint="model.pt",
    recipe=QuantRecipe(search=True),
    harness="zoo.images.harness:harness",
)
