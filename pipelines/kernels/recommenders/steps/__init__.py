"""Steps of programs; each is one record with parameters, checks, numpy reference and the call of its kernel."""

from pipelines.kernels.recommenders.steps.base import BYTE, CODES, KINDS, SLACK, Run, Slots, Step
from pipelines.kernels.recommenders.steps.fields import CodeProduct, FieldAttention, GateCodes, SigmoidProduct
from pipelines.kernels.recommenders.steps.floats import (
    GatedSum,
    Leaky,
    Mixture,
    Normalize,
    Product,
    Tanh,
    Total,
    Weighted,
)
from pipelines.kernels.recommenders.steps.interactions import Cross, CrossLayer, Dots, Factorization
from pipelines.kernels.recommenders.steps.layers import CodeBytes, ColumnBytes, Dense, Mixed, Quantize
from pipelines.kernels.recommenders.steps.lookups import Gather, LookupSum, Numbers, QuantizedGather
from pipelines.kernels.recommenders.steps.sequences import (
    LANES,
    SEGMENTS,
    Activation,
    Dice,
    ScoredAttention,
    TargetAttention,
)
from pipelines.kernels.recommenders.steps.transformers import Rows, SequenceEncoder, TargetTransformer

STEPS: dict[str, type[Step]] = {step.__name__: step for step in Step.__subclasses__()}

__all__ = [
    "BYTE",
    "CODES",
    "KINDS",
    "LANES",
    "SEGMENTS",
    "SLACK",
    "STEPS",
    "Activation",
    "CodeBytes",
    "CodeProduct",
    "ColumnBytes",
    "Cross",
    "CrossLayer",
    "Dense",
    "Dice",
    "Dots",
    "Factorization",
    "FieldAttention",
    "GateCodes",
    "GatedSum",
    "Gather",
    "Leaky",
    "LookupSum",
    "Mixed",
    "Mixture",
    "Normalize",
    "Numbers",
    "Product",
    "Quantize",
    "QuantizedGather",
    "Rows",
    "Run",
    "ScoredAttention",
    "SequenceEncoder",
    "SigmoidProduct",
    "Slots",
    "Step",
    "Tanh",
    "TargetAttention",
    "TargetTransformer",
    "Total",
    "Weighted",
]
