"""Post-training quantization to QDQ int8, and quantization-aware training by the same rules.

`Calibrator` does it in three lines; `calibrate` or `auto_calibrate` with `quantize` are its steps. The package imports
`core`, `graph` and `rewrites`. Its public names are loaded at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.quantization.calibration.auto_calibration import auto_calibrate
    from pipelines.quantization.calibration.calibrate import Observation, calibrate, observe
    from pipelines.quantization.calibration.table import CalibrationTable, TensorRange
    from pipelines.quantization.calibrator import Calibrator
    from pipelines.quantization.ptq import make_table
    from pipelines.quantization.quantizer import Operator, QuantReport, quantize
    from pipelines.quantization.recipe import OBSERVERS, QuantRecipe

__all__ = [
    "OBSERVERS",
    "CalibrationTable",
    "Calibrator",
    "Observation",
    "Operator",
    "QuantRecipe",
    "QuantReport",
    "TensorRange",
    "auto_calibrate",
    "calibrate",
    "make_table",
    "observe",
    "quantize",
]

_MODULES = {
    "auto_calibrate": "calibration.auto_calibration",
    "Observation": "calibration.calibrate",
    "calibrate": "calibration.calibrate",
    "observe": "calibration.calibrate",
    "CalibrationTable": "calibration.table",
    "TensorRange": "calibration.table",
    "Calibrator": "calibrator",
    "make_table": "ptq",
    "Operator": "quantizer",
    "QuantReport": "quantizer",
    "quantize": "quantizer",
    "OBSERVERS": "recipe",
    "QuantRecipe": "recipe",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
