"""MobileNet V1 (Howard et al. 2017) and V2 (Sandler et al. 2018)."""

from zoo.vision import entry

MOBILENET_V1 = entry("mobilenet-v1", "MobileNet V1: image classification on small machines", "mobilenet", "V1")
MOBILENET_V2 = entry(
    "mobilenet-v2", "MobileNet V2: image classification on small machines, with inverted residuals", "mobilenet", "V2"
)
