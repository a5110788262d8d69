"""Steps of image programs, each one record: parameters, checks, numpy reference, packing and call of its kernel."""

from typing import Any

from pipelines.kernels.images.steps.activation import FloatClip, FloatFloor, FloatLog, FloatQuotient
from pipelines.kernels.images.steps.base import LARGEST, Packing, Run, Shape, Step
from pipelines.kernels.images.steps.convolution import Convolution, FloatConvolution
from pipelines.kernels.images.steps.elementwise import Addition, Lookup, Product, Sum
from pipelines.kernels.images.steps.floats import (
    ChannelScale,
    FloatActivation,
    FloatCopy,
    FloatDepthwise,
    FloatDifference,
    FloatLookup,
    FloatMean,
    FloatProduct,
    FloatSum,
    Normalization,
    Operand,
)
from pipelines.kernels.images.steps.groups import Choice, GroupLinear, Softmax, Suppression, TopK
from pipelines.kernels.images.steps.layouts import Concatenation, Dequantize, Pixels, Resampling, Selection, Stacking
from pipelines.kernels.images.steps.pools import AveragePool, GlobalAverage, MaxPool
from pipelines.kernels.images.steps.sampling import PixelSums, Sampling
from pipelines.kernels.images.steps.spatial import GroupNormalization, Interpolation, ResponseGate
from pipelines.kernels.images.steps.tokens import Attention, Gathering, MatrixProduct


def _concrete(step: Any) -> list[type[Step]]:
    """The step and its subclasses that have a method of their own."""
    concrete = [kind for subclass in step.__subclasses__() for kind in _concrete(subclass)]
    return [step, *concrete] if "method" in vars(step) else concrete


STEPS: dict[str, type[Step]] = {step.method: step for step in _concrete(Step)}

__all__ = [
    "LARGEST",
    "STEPS",
    "Addition",
    "Attention",
    "AveragePool",
    "ChannelScale",
    "Choice",
    "Concatenation",
    "Convolution",
    "Dequantize",
    "FloatActivation",
    "FloatClip",
    "FloatConvolution",
    "FloatCopy",
    "FloatDepthwise",
    "FloatDifference",
    "FloatFloor",
    "FloatLog",
    "FloatLookup",
    "FloatMean",
    "FloatProduct",
    "FloatQuotient",
    "FloatSum",
    "Gathering",
    "GlobalAverage",
    "GroupLinear",
    "GroupNormalization",
    "Interpolation",
    "Lookup",
    "MatrixProduct",
    "MaxPool",
    "Normalization",
    "Operand",
    "Packing",
    "PixelSums",
    "Pixels",
    "Product",
    "Resampling",
    "ResponseGate",
    "Run",
    "Sampling",
    "Selection",
    "Shape",
    "Softmax",
    "Stacking",
    "Step",
    "Sum",
    "Suppression",
    "TopK",
]
