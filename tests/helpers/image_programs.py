"""Programs of the image kernels, and their results in native code beside the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.kernels import extension
from pipelines.kernels.images import native, reference
from pipelines.kernels.images.program import ImageProgram


def program(shape: tuple[int, ...], tensors: list[Any], steps: list[Any], results: int, **more: Any) -> ImageProgram:
    """A program from [C, H, W] bytes to flat results."""
    return ImageProgram(
        "image", ("logits",), more.pop("dtype", "uint8"), shape, tuple(tensors), tuple(steps), (results,), **more
    )


def same_bits(found: ImageProgram, samples: Any) -> None:
    """Every instruction set gives the reference's bits, on one thread and on two."""
    wanted = np.stack([reference.run(found, sample) for sample in samples])
    for isa in extension.isas():
        network = native.pack(found, isa).open()
        for threads in (1, 2):
            np.testing.assert_array_equal(network(samples, threads), wanted, err_msg=f"{isa}, {threads} threads")
