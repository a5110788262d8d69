"""Sparse Adam for large embedding tables: a step reads and writes only the rows of its batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed, nn

from pipelines.core.machine import BLOCK_ROWS
from zoo.training.runs import Processes

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's
GROWTH = 1 / math.sqrt(BETA2)  # of the learning rate of an idle row, a step
RATIO = BETA1 * GROWTH  # of an idle row's steps, one to the next
MAX_LOG_GROWTH = 40.0  # logarithm of a growth beyond which nothing is left to shrink


@dataclass
class RowState:
    """Some rows of a table with the state of their optimizer.

    Attributes:
        weight: float32 [n, size].
        average: Running average of the weight, float32 [n, size].
        first: First moment, float32 [n, size].
        second: Second moment, float32 [n, size].
        last_step: The step that a row is made up to, int64 [n].
    """

    weight: torch.Tensor
    average: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    last_step: torch.Tensor


class SparseAdam:
    """Adam with row-wise lazy updates; the time of a step does not depend on the size of the table.

    Steps that a row missed are applied in closed form when the row occurs again, and to all rows by `catch_up`. Adam's
    steps without a gradient, m beta1^j / sqrt(v beta2^j), are a geometric series. The Gaussian prior shrinks the
    distance to its mean by the factor exp(-lr strength sum_j 1 / sqrt(v beta2^j)), its steps at Adam's rates. The
    running average uses the resulting weight. Unlike in dense steps, the prior is not part of the moments.

    Args:
        weight: Table [rows, size].
        learning_rate: Learning rate.
        strength: Strength of the prior, see `Trainer`.
        ema: Momentum of the running average.
        padding: Rows without a gradient.
    """

    def __init__(
        self, weight: nn.Parameter, learning_rate: float, strength: float, ema: float, padding: Sequence[int]
    ) -> None:
        self.weight, self.learning_rate, self.strength, self.ema = weight, learning_rate, strength, ema
        self.row_rates: torch.Tensor | None = None  # factor of the learning rate of every row, [rows, 1]
        self.padding = torch.tensor(padding, dtype=torch.int64)
        self.first, self.second = torch.zeros_like(weight).detach(), torch.zeros_like(weight).detach()
        # the step that a row is made up to
        self.last_steps = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)

    def state(self) -> dict[str, torch.Tensor]:
        """State for a checkpoint."""
        return {"first": self.first, "second": self.second, "settled": self.last_steps}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores a checkpoint.

        Args:
            state: Result of `state`.
        """
        self.first, self.second, self.last_steps = (state[name].clone() for name in ("first", "second", "settled"))

    @torch.no_grad()
    def step(self, number: int, start: torch.Tensor, average: torch.Tensor, group: Processes) -> None:
        """Applies one step with the sum of the sparse gradients of all processes.

        Args:
            number: Number of the step, from 1 on.
            start: Mean of the prior, [rows, size] or a scalar.
            average: Running average, [rows, size], updated in place.
            group: Processes that train together.
        """
        rows, values = self._gradient(group)
        state = self._read(rows, average)
        self._apply_missed(state, rows, number - 1, start)
        first = state.first.lerp(values, 1 - BETA1)
        second = (state.second * BETA2).addcmul(values, values, value=1 - BETA2)
        rate = self._rate(second, 1 - BETA2**number, rows)
        held = start[rows] if start.ndim else start
        weight = self._decayed(state.weight - rate * first / (1 - BETA1**number), held, rate)
        keep = min(self.ema, (1 + number) / (10 + number))
        mean = weight.lerp(state.average, keep)
        self._write(rows, RowState(weight, mean, first, second, torch.full_like(rows, number)), average)

    @torch.no_grad()
    def catch_up(self, number: int, start: torch.Tensor, average: torch.Tensor) -> None:
        """Applies all missed steps up to `number` to all rows.

        Args:
            number: Number of the last step.
            start: Mean of the prior, [rows, size] or a scalar.
            average: Running average, [rows, size], updated in place.
        """
        for begin in range(0, len(self.weight), BLOCK_ROWS):
            rows = torch.arange(begin, min(begin + BLOCK_ROWS, len(self.weight)))
            rows = rows[self.last_steps[rows] < number]
            state = self._read(rows, average)
            self._apply_missed(state, rows, number, start)
            self._write(rows, state, average)

    def _read(self, rows: torch.Tensor, average: torch.Tensor) -> RowState:
        """Returns copies of these rows."""
        state = (self.weight.detach(), average, self.first, self.second, self.last_steps)
        return RowState(*(tensor[rows] for tensor in state))

    def _write(self, rows: torch.Tensor, state: RowState, average: torch.Tensor) -> None:
        """Writes these rows."""
        self.weight[rows], average[rows] = state.weight, state.average
        self.first[rows], self.second[rows], self.last_steps[rows] = state.first, state.second, state.last_step

    def _gradient(self, group: Processes) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows with a gradient, int64 [n], and their gradients, [n, size]."""
        gradient = self._take_gradient()
        if gradient is None:
            nowhere = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, self.weight.shape[1])
            gradient = torch.sparse_coo_tensor(*nowhere, self.weight.shape, check_invariants=False)
        gradient = gradient.coalesce()
        if group.count > 1:
            distributed.all_reduce(gradient)
            gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        chosen = ~torch.isin(rows, self.padding)
        return rows[chosen], values[chosen]

    def _take_gradient(self) -> torch.Tensor | None:
        """Returns the gradient, a sparse tensor, and sets it to None."""
        gradient, self.weight.grad = self.weight.grad, None
        return gradient

    def _rate(self, second: torch.Tensor, correction: Any, rows: torch.Tensor) -> torch.Tensor:
        """Returns Adam's learning rate of every entry of these rows."""
        rate: torch.Tensor = self.learning_rate / ((second / correction).sqrt() + EPSILON)
        return rate if self.row_rates is None else rate * self.row_rates[rows]

    def _decayed(self, weight: torch.Tensor, to: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        """Returns the weights after the prior's steps towards `to`, at a rate or a sum of rates."""
        return to + (weight - to) * torch.from_numpy(np.exp((-self.strength * rate).numpy()))

    def _apply_missed(self, state: RowState, rows: torch.Tensor, number: int, start: torch.Tensor) -> None:
        """Applies the missed steps of these rows up to `number`, in place."""
        late = torch.nonzero(state.last_step < number)[:, 0]
        if not len(late):
            return
        before = state.last_step[late][:, None].numpy()
        steps = (number - before).astype(np.float32)
        rate = self._rate(state.second[late], _tensor(1 - _power(BETA2, np.maximum(before, 1))), rows[late])
        moved = _tensor(RATIO * (1 - _power(RATIO, steps)) / (1 - RATIO) / (1 - _power(BETA1, np.maximum(before, 1))))
        grown = _tensor(np.expm1(np.minimum(steps * math.log(GROWTH), MAX_LOG_GROWTH)) * GROWTH / (GROWTH - 1))
        held, first = start[rows[late]] if start.ndim else start, state.first[late]
        weight = self._decayed(state.weight[late] - rate * first * moved, held, rate * grown)
        share = _tensor(np.exp(_log_retained(np.array(number), self.ema) - _log_retained(before, self.ema)))
        state.average[late] = weight + (state.average[late] - weight) * share
        state.weight[late], state.first[late] = weight, first * _tensor(_power(BETA1, steps))
        state.second[late] *= _tensor(_power(BETA2, steps))
        state.last_step[late] = number


# Functions of numpy give every element the same bits wherever it lies in an array; those of torch do not at its end.


def _power(base: float, steps: NDArray[Any]) -> NDArray[np.float32]:
    return np.power(np.float32(base), steps.astype(np.float32))


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32))


def _log_retained(step: NDArray[np.int64], ema: float) -> NDArray[np.float64]:
    """Returns the logarithm of the share of the initial weights in the running average.

    That is log prod_{i <= step} min(ema, (1 + i) / (10 + i)); for an ema of 0 it is far below 0.
    """
    switch = max(math.ceil((10 * ema - 1) / (1 - ema)), 1) - 1  # up to there the second one is less
    early = np.minimum(step, switch).astype(np.float64)
    retained = math.lgamma(11) - sum(np.log(early + term) for term in range(2, 11))
    later: NDArray[np.float64] = np.maximum(step - switch, 0) * math.log(max(ema, 1e-9))
    return retained + later
