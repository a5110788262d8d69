"""Residual networks (He et al. 2016): ResNet-50, v1 and v1.5, and ResNet-26d."""

from zoo.vision import entry

RESNET50 = entry("resnet50", "ResNet-50: image classification", "resnet", "RESNET50")
RESNET26D = entry("resnet26d", "ResNet-26d: image classification, half the work of ResNet-50", "resnet", "RESNET26D")
