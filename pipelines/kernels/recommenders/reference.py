"""Programs of recommenders in numpy: slow, and the definition of the results of the kernels, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import KINDS, Run


def run(program: ClickProgram, ids: NDArray[Any], numbers: Any = None, scales: Any = None) -> list[NDArray[np.float32]]:
    """Computes a program.

    Args:
        program: The program.
        ids: Integers [n, C], all in range.
        numbers: float32 [n, M]; None where the program has none.
        scales: float32 [n, B]; None where the program has none.

    Returns:
        The outputs, float32 [n, width] each; the sigmoid of `Total` may differ in its last bits.
    """
    computed = buffers(program, ids, numbers, scales)
    return [computed[slot] for slot in program.outputs]


def buffers(program: ClickProgram, ids: NDArray[Any], numbers: Any = None, scales: Any = None) -> list[NDArray[Any]]:
    """Computes all buffers of a program.

    Args:
        program: The program.
        ids: Integers [n, C], all in range.
        numbers: float32 [n, M]; None where the program has none.
        scales: float32 [n, B]; None where the program has none.

    Returns:
        Buffers after the last step, [n, width] each.
    """
    state = Run(ids, numbers, scales, [np.zeros((len(ids), width), KINDS[kind]) for kind, width in program.slots])
    for step in program.steps:
        step.compute(state)
    return state.buffers
