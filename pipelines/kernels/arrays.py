"""Checks of arrays for the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError

Array = NDArray[Any]


def require(operator: str, name: str, array: Array, dtype: type, shape: tuple[int, ...]) -> None:
    """Checks dtype and shape of an array.

    Args:
        operator: Name of the operator, for the error message.
        name: Name of the array.
        array: The array.
        dtype: Expected dtype.
        shape: Expected shape.

    Raises:
        RequestError: Dtype or shape differ.
    """
    if array.dtype != dtype or array.shape != shape:
        raise RequestError(
            f"{operator} has {name} {array.dtype} {list(array.shape)}; expected {np.dtype(dtype)} {list(shape)}"
        )


def contiguous(array: Any) -> Any:
    """Makes an array C-contiguous and aligned.

    Args:
        array: Array of any dtype and shape, or what NumPy makes one of.

    Returns:
        The array itself if it is C-contiguous and aligned, else a copy of the same dtype and shape.
    """
    usable = isinstance(array, np.ndarray) and array.flags.c_contiguous and array.flags.aligned
    return array if usable else np.require(array, requirements=("C_CONTIGUOUS", "ALIGNED"))
