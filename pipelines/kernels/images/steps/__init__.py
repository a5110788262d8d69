"""Steps of image programs, each one record: parameters, checks, numpy reference, packing and call of its kernel."""

from pipelines.kernels.images.steps.base import LARGEST, Packing, Run, Shape, Step
from pipelines.kernels.images.steps.convolution import Convolution
from pipelines.kernels.images.steps.elementwise import Addition, Lookup, Product, Sum
from pipelines.kernels.images.steps.layouts import Concatenation, Dequantize, Pixels, Resampling, Selection
from pipelines.kernels.images.steps.pools import AveragePool, GlobalAverage, MaxPool

STEPS: dict[str, type[Step]] = {step.method: step for step in Step.__subclasses__()}

__all__ = [
    "LARGEST",
    "STEPS",
    "Addition",
    "AveragePool",
    "Concatenation",
    "Convolution",
    "Dequantize",
    "GlobalAverage",
    "Lookup",
    "MaxPool",
    "Packing",
    "Pixels",
    "Product",
    "Resampling",
    "Run",
    "Selection",
    "Shape",
    "Step",
    "Sum",
]
