"""Float32 steps on runs of channels: softmax, linear layers of few weights, and choices of elements and pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.kernels.arrays import Array, require
from pipelines.kernels.images.steps.base import LARGEST, Packing, Run, Step, fits
from pipelines.kernels.images.steps.floats import Operand, PackedOperand
from pipelines.kernels.transformer.reference.rows import exponential, sum_lanes

if TYPE_CHECKING:
    from pipelines.kernels._native import ImageNetwork
    from pipelines.kernels.images.program import ImageProgram


@dataclass(frozen=True)
class Softmax(Step):
    """The softmax over each run of `size` channels of a pixel: e (1 / sum e), e = exp(x - max), see `sum_lanes`.

    Attributes:
        x: The tensor that is read.
        to: The tensor that is written; its channels are as many of x from `first` on.
        first: First channel of x.
        size: Channels of a run.
    """

    x: Operand
    to: Operand
    first: int
    size: int
    method: ClassVar[str] = "softmax"

    @property
    def out(self) -> int:
        """Number of the tensor that is written."""
        return self.to.tensor

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = self.x.read(self, program, written)
        rows, columns, count = self.to.write(self, program, written)
        fits(self, (rows, columns) == (height, width) and self.size >= 1 and count % self.size == 0)
        fits(self, 0 <= self.first <= channels - count)

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x.tensor,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        height, width, count = run.shapes[self.to.tensor]
        runs = self.x.real(run)[..., self.first : self.first + count].reshape(height, width, -1, self.size)
        with np.errstate(invalid="ignore"):
            weights = exponential(runs - runs.max(axis=3, keepdims=True))
            real = weights * (np.float32(1) / sum_lanes(weights))[..., None]
        self.to.store(run, real.reshape(height, width, count))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.first, self.size

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand, first: int, size: int) -> None:
        """See `Step`."""
        network.softmax(x=x, out=out, first=first, size=size)


@dataclass(frozen=True, eq=False)
class GroupLinear(Step):
    """One linear layer of floats for each run of channels: the products' `sum_lanes`, plus a bias.

    Attributes:
        x: The tensor that is read, runs of `inputs` channels.
        to: The tensor that is written, as many runs of `outputs` channels.
        weight: float32 [outputs, inputs].
        bias: float32 [outputs].
    """

    x: Operand
    to: Operand
    weight: Array
    bias: Array
    method: ClassVar[str] = "group_linear"

    @property
    def out(self) -> int:
        """Number of the tensor that is written."""
        return self.to.tensor

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = self.x.read(self, program, written)
        fits(self, self.weight.ndim == 2 and min(self.weight.shape) >= 1)
        outputs, inputs = self.weight.shape
        require("GroupLinear", "weight", self.weight, np.float32, (outputs, inputs))
        require("GroupLinear", "bias", self.bias, np.float32, (outputs,))
        shape = self.to.write(self, program, written)
        fits(self, channels % inputs == 0 and shape == (height, width, channels // inputs * outputs))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x.tensor,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = self.x.real(run)
        runs = x.reshape(*x.shape[:2], -1, 1, self.weight.shape[1])
        self.to.store(run, (sum_lanes(runs * self.weight) + self.bias).reshape(*x.shape[:2], -1))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.to.packed(), self.weight, self.bias

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: PackedOperand, weight: Array, bias: Array) -> None:
        """See `Step`."""
        network.group_linear(x=x, out=out, weight=weight, bias=bias)


def ranked(x: NDArray[np.float32]) -> NDArray[np.int64]:
    """Orders values from the largest: of equal ones the first comes first, and NaN last.

    Args:
        x: float32 of any shape.

    Returns:
        int64 of the same shape: indices of the last axis.
    """
    places = np.broadcast_to(np.arange(x.shape[-1]), x.shape)
    return np.lexsort((places, -x, np.isnan(x)), axis=-1)


@dataclass(frozen=True)
class TopK(Step):
    """The largest channels of each pixel and their indices, in the order of `ranked`.

    Attributes:
        x: The tensor that is read.
        out: Number of the float tensor that is written: in each pixel `count` values, then as many indices.
        count: Number of channels that are chosen.
        largest: Whether the largest values are chosen; else the smallest ones.
    """

    x: Operand
    out: int
    count: int
    largest: bool = True
    method: ClassVar[str] = "top_k"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, channels = self.x.read(self, program, written)
        fits(self, 1 <= self.count <= channels <= LARGEST)
        fits(self, program.write(self, self.out, written, floats=True) == (height, width, 2 * self.count))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return (self.x.tensor,)

    def compute(self, run: Run) -> None:
        """See `Step`."""
        x = self.x.real(run)
        order = ranked(x if self.largest else -x)[..., : self.count]
        values = np.take_along_axis(x, order, -1)
        run.tensors[self.out] = np.concatenate([values, order.astype(np.float32)], -1)

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x.packed(), self.out, self.count, self.largest

    @staticmethod
    def add_to(network: ImageNetwork, x: PackedOperand, out: int, count: int, largest: bool) -> None:
        """See `Step`."""
        network.top_k(x=x, out=out, count=count, largest=largest)


@dataclass(frozen=True)
class Choice(Step):
    """The pixels of x with the indices that another step computes; NaN is 0, indices outside are the nearest ones.

    Attributes:
        x: Number of the tensor that is read.
        indices: Number of the float tensor of indices: an element for each pixel of `out`.
        out: Number of the tensor that is written, of floats or bytes as x.
    """

    x: int
    indices: int
    out: int
    method: ClassVar[str] = "choice"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        floats = self.x in program.floats
        channels = program.read(self, self.x, written, floats)[2]
        shape = program.read(self, self.indices, written, floats=True)
        height, width, same = program.write(self, self.out, written, floats)
        fits(self, channels == same and height * width == int(np.prod(shape)))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return self.x, self.indices

    def compute(self, run: Run) -> None:
        """See `Step`."""
        pixels, places = run.tensors[self.x], run.tensors[self.indices].ravel()
        pixels = pixels.reshape(-1, pixels.shape[2])
        places = np.clip(np.nan_to_num(places, nan=0), 0, len(pixels) - 1).astype(np.int64)
        run.tensors[self.out] = pixels[places].reshape(run.shapes[self.out])

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.x, self.indices, self.out

    @staticmethod
    def add_to(network: ImageNetwork, x: int, indices: int, out: int) -> None:
        """See `Step`."""
        network.choice(x=x, indices=indices, out=out)


@dataclass(frozen=True)
class Suppression(Step):
    """Boxes of the highest scores of each class that overlap no chosen one (NonMaxSuppression of ONNX).

    Boxes of a class are taken in the order of `ranked`. One is left out if its intersection with a chosen box is more
    than `overlap` of their union.

    Attributes:
        boxes: Number of the float tensor of boxes: pixels of [y, x, y, x] of two corners or, if `centered`, of
            [x, y, width, height] with x and y of the centre.
        scores: Number of the float tensor of scores: as many pixels, whose channels are classes.
        out: Number of the float tensor that is written, [1 + classes `most`, 1, 3]: the number of boxes in the first
            row, then rows [0, class, box] by class, zeros behind them.
        most: Largest number of boxes of a class.
        overlap: Largest share of the union.
        least: Boxes have a score above it; NaN: all have.
        centered: See `boxes`.
    """

    boxes: int
    scores: int
    out: int
    most: int
    overlap: float
    least: float
    centered: bool = False
    method: ClassVar[str] = "suppression"

    def check(self, program: ImageProgram, written: set[int]) -> None:
        """See `Step`."""
        height, width, four = program.read(self, self.boxes, written, floats=True)
        rows, columns, classes = program.read(self, self.scores, written, floats=True)
        fits(self, four == 4 and height * width == rows * columns and 1 <= self.most <= rows * columns)
        fits(self, program.write(self, self.out, written, floats=True) == (1 + classes * self.most, 1, 3))

    def reads(self) -> tuple[int, ...]:
        """See `Step`."""
        return self.boxes, self.scores

    def compute(self, run: Run) -> None:
        """See `Step`."""
        scores = run.tensors[self.scores]
        scores, corners = scores.reshape(-1, scores.shape[2]), self._corners(run.tensors[self.boxes].reshape(-1, 4))
        out, count = np.zeros(run.shapes[self.out], np.float32), 0
        for number, values in enumerate(scores.T):
            order = ranked(values)
            left = order[np.isnan(self.least) | (values[order] > np.float32(self.least))]
            for _ in range(self.most):
                if not len(left):
                    break
                count += 1
                out[count, 0, 1:] = number, left[0]
                left = left[1:][~self._overlaps(corners[left[0]], corners[left[1:]])]
        out[0, 0, 0] = count
        run.tensors[self.out] = out

    def _corners(self, boxes: NDArray[np.float32]) -> NDArray[np.float32]:
        """The least x, least y, most x and most y of boxes, float32 [boxes, 4]."""
        if self.centered:
            half = boxes[:, 2:] / np.float32(2)
            return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], 1)
        first, second = boxes[:, 1::-1], boxes[:, 3:1:-1]
        return np.concatenate([np.where(second < first, second, first), np.where(first < second, second, first)], 1)

    def _overlaps(self, box: NDArray[np.float32], boxes: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Whether boxes [k, 4] overlap one of them [4]."""
        least, most = boxes[:, :2], boxes[:, 2:]
        low, high = np.where(least < box[:2], box[:2], least), np.where(box[2:] < most, box[2:], most)
        with np.errstate(all="ignore"):
            sizes, own = most - least, box[2:] - box[:2]
            shared, area, own_area = (side[..., 0] * side[..., 1] for side in (high - low, sizes, own))
            union = own_area + area - shared
            apart = (high <= low).any(1) | (shared <= 0) | (area <= 0) | (own_area <= 0) | (union <= 0)
            return np.asarray(~apart & (shared / union > np.float32(self.overlap)))

    def packed(self, packing: Packing) -> tuple[Any, ...]:
        """See `Step`."""
        return self.boxes, self.scores, self.out, self.most, self.overlap, self.least, self.centered

    @staticmethod
    def add_to(
        network: ImageNetwork,
        boxes: int,
        scores: int,
        out: int,
        most: int,
        overlap: float,
        least: float,
        centered: bool,
    ) -> None:
        """See `Step`."""
        network.suppression(
            boxes=boxes, scores=scores, out=out, most=most, overlap=overlap, least=least, centered=centered
        )
