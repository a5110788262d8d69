"""Image kernels in native code."""

from __future__ import annotations

from typing import Any

from pipelines.kernels.arrays import contiguous
from pipelines.kernels.extension import required
from pipelines.kernels.images.operators import Resize


def resize(image: Any, resizing: Resize, out: Any, isa: str = "") -> None:
    """`Resize` of image uint8 [H, W, 3] into out uint8 [3, h, w], both C-contiguous; h and w are those of the crop.

    Raises ValueError or TypeError for other arrays or a box that is empty or not within the image, RequestError without
    kernels.
    """
    required().resize(contiguous(image), resizing.size, resizing.crop, resizing.bicubic, resizing.box, out, isa)
