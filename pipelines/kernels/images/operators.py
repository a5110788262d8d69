"""Operators of the image kernels, validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.core.errors import RequestError


@dataclass(frozen=True)
class Resize:
    """Antialiased resampling and a crop: Pillow's `image.resize(size, BILINEAR or BICUBIC, box).crop(crop)`, bit-exact.

    (Pillow from version 13 begins with the columns if the image is more than twice as high as wide, or shrinks much
    more in height than in width, and then differs by one level at places. Here rows always come first, as in Pillow
    before 13.)

    Along each axis, from box [a, b) (float32) to n pixels, with s = (b - a) / n, r = max(s, 1), support = r (bilinear)
    or 2 r (bicubic):

        c_i   = a + (i + 1/2) s                     centre of output i
        w_i,x = f((x + 1/2 - c_i) / r)     max(int(c_i - support + 1/2), 0) <= x < min(int(c_i + support + 1/2), inputs)
        k_i,x = round(2^22 w_i,x / sum_x w_i,x)     half away from 0; w in float64, summed in order
        y_i   = clip((2^21 + sum_x k_i,x p_x) >> 22, 0, 255)

    f(x) = max(1 - |x|, 0), or the cubic of a = -1/2. The rows are resampled first, then the resulting bytes along the
    columns; only the crop is computed. Integers cannot overflow, as sum_x |k_i,x| < 2 * 2^22: partial sums that do are
    right modulo 2^32.

    Attributes:
        size: (width, height) of the whole result.
        crop: (left, top, right, bottom) in the result.
        bicubic: Bicubic interpolation; otherwise bilinear.
        box: Part of the image that is resampled, None for all.

    Raises:
        RequestError: The crop is empty or outside the size.
    """

    size: tuple[int, int]
    crop: tuple[int, int, int, int]
    bicubic: bool = False
    box: tuple[float, float, float, float] | None = None

    def __post_init__(self) -> None:
        (width, height), (left, top, right, bottom) = self.size, self.crop
        if not (0 <= left < right <= width < 2**31 and 0 <= top < bottom <= height < 2**31):
            raise RequestError(f"cannot crop {self.crop} from an image resized to {width} x {height}")


def windows(
    shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int] = (1, 1),
) -> tuple[int, int]:
    """Returns the number of windows along height and width of a padded tensor.

    Args:
        shape: (height, width, ...) of the tensor.
        kernel: (height, width) of a window.
        strides: Steps along height and width.
        pads: Padding at top, left, bottom and right.
        dilations: Steps between the elements of a window.
    """
    counts = [
        (shape[axis] + pads[axis] + pads[axis + 2] - (kernel[axis] - 1) * dilations[axis] - 1) // strides[axis] + 1
        for axis in range(2)
    ]
    return counts[0], counts[1]


def ceil_mode_pads(
    shape: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]
) -> tuple[int, ...]:
    """Returns the pads of a pool in ceil mode: the last windows are complete and begin in the tensor or before it.

    Args:
        shape: (height, width, ...) of the tensor.
        kernel: (height, width) of a window.
        strides: Steps along height and width.
        pads: Padding at top, left, bottom and right.
    """
    result = list(pads)
    for axis in range(2):
        covered = shape[axis] + pads[axis] + pads[axis + 2]
        count = -(-(covered - kernel[axis]) // strides[axis]) + 1
        if (count - 1) * strides[axis] >= shape[axis] + pads[axis]:
            count -= 1
        result[axis + 2] += max((count - 1) * strides[axis] + kernel[axis] - covered, 0)
    return tuple(result)


def same_pads(
    shape: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], lower: bool
) -> tuple[int, ...]:
    """Returns the pads with which there is a window for each stride of a tensor (`auto_pad` of ONNX).

    Args:
        shape: (height, width, ...) of the tensor.
        kernel: (height, width) of a window.
        strides: Steps along height and width.
        dilations: Steps between the elements of a window.
        lower: Whether an odd pad is larger at top and left (SAME_LOWER); else at bottom and right.
    """
    totals = [
        max(
            (-(-shape[axis] // strides[axis]) - 1) * strides[axis] + (kernel[axis] - 1) * dilations[axis] + 1,
            shape[axis],
        )
        - shape[axis]
        for axis in range(2)
    ]
    first = [-(-total // 2) if lower else total // 2 for total in totals]
    return (*first, *(total - before for total, before in zip(totals, first, strict=True)))
