"""What the image kernels compute, validated."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.core.errors import RequestError


@dataclass(frozen=True)
class Resize:
    """Antialiased resampling and a crop: Pillow's `image.resize(size, BILINEAR or BICUBIC, box).crop(crop)`, bit for
    bit.

    (Pillow from 13 on begins with the columns where the image is more than twice as high as wide, or shrinks much more
    in height than in width, and is then a step off at places. Here the rows come first always, as in Pillow before 13.)

    Along each axis, from box [a, b) (float32) to n pixels, with s = (b - a) / n, r = max(s, 1), support = r (bilinear)
    or 2 r (bicubic):

        c_i   = a + (i + 1/2) s                     centre of output i
        w_i,x = f((x + 1/2 - c_i) / r)     max(int(c_i - support + 1/2), 0) <= x < min(int(c_i + support + 1/2), inputs)
        k_i,x = round(2^22 w_i,x / sum_x w_i,x)     half away from 0; w in float64, summed in order
        y_i   = clip((2^21 + sum_x k_i,x p_x) >> 22, 0, 255)

    f(x) = max(1 - |x|, 0), or the cubic of a = -1/2. First along the rows, then, from these bytes, down the columns;
    only what the crop needs is computed. Integers cannot overflow, as sum_x |k_i,x| < 2 * 2^22: partial sums that do
    are right modulo 2^32.

    size: (width, height) of the whole result. crop: (left, top, right, bottom) in it. box: the part of the image that
    becomes it, None for all. Raises RequestError for a crop that is empty or not within the size.
    """

    size: tuple[int, int]
    crop: tuple[int, int, int, int]
    bicubic: bool = False
    box: tuple[float, float, float, float] | None = None

    def __post_init__(self) -> None:
        (width, height), (left, top, right, bottom) = self.size, self.crop
        if not (0 <= left < right <= width < 2**31 and 0 <= top < bottom <= height < 2**31):
            raise RequestError(f"cannot crop {self.crop} from an image resized to {width} x {height}")
