"""Sparse Adam for large embedding tables: a step reads and writes only the rows of its batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

from zoo.training.runs import Processes

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's
GROWTH = 1 / math.sqrt(BETA2)  # of the learning rate of an idle row, a step
RATIO = BETA1 * GROWTH  # of an idle row's steps, one to the next
MAX_LOG_GROWTH = 40.0  # logarithm of a growth beyond which nothing is left to shrink
BLOCK_ROWS = 1 << 16  # rows settled at once


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
        self.last_steps = torch.zeros(len(weight), dtype=torch.int64)  # the step that a row is made up to

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
        self._apply_missed(rows, number - 1, start, average)
        first = self.first[rows].lerp(values, 1 - BETA1)
        second = (self.second[rows] * BETA2).addcmul(values, values, value=1 - BETA2)
        rate = self._rate(second, 1 - BETA2**number, rows)
        held = start[rows] if start.ndim else start
        weight = self._decayed(self.weight[rows] - rate * first / (1 - BETA1**number), held, rate)
        keep = min(self.ema, (1 + number) / (10 + number))
        average[rows] = weight.lerp(average[rows], keep)
        self.weight[rows], self.first[rows], self.second[rows] = weight, first, second
        self.last_steps[rows] = number

    @torch.no_grad()
    def catch_up(self, number: int, start: torch.Tensor, average: torch.Tensor) -> None:
        """Applies all missed steps up to `number` to all rows.

        Args:
            number: Number of the last step.
            start: Mean of the prior, [rows, size] or a scalar.
            average: Running average, [rows, size], updated in place.
        """
        for begin in range(0, len(self.weight), BLOCK_ROWS):
            self._apply_missed(torch.arange(begin, min(begin + BLOCK_ROWS, len(self.weight))), number, start, average)

    def _gradient(self, group: Processes) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows with a gradient, int64 [n], and their gradients, [n, size]."""
        gradient, self.weight.grad = self.weight.grad, None
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

    def _rate(self, second: torch.Tensor, correction: Any, rows: torch.Tensor) -> torch.Tensor:
        """Returns Adam's learning rate of every entry of these rows."""
        rate: torch.Tensor = self.learning_rate / ((second / correction).sqrt() + EPSILON)
        return rate if self.row_rates is None else rate * self.row_rates[rows]

    def _decayed(self, weight: torch.Tensor, to: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        """Returns the weights after the prior's steps towards `to`, at a rate or a sum of rates."""
        return to + (weight - to) * torch.exp(-self.strength * rate)

    def _apply_missed(self, rows: torch.Tensor, number: int, start: torch.Tensor, average: torch.Tensor) -> None:
        """Applies the missed steps of these rows up to `number`."""
        rows = rows[self.last_steps[rows] < number]
        if not len(rows):
            return
        before = self.last_steps[rows][:, None]
        steps, at = (number - before).float(), before.clamp(min=1).float()
        first, second = self.first[rows], self.second[rows]
        rate = self._rate(second, 1 - BETA2**at, rows)
        moved = RATIO * (1 - RATIO**steps) / (1 - RATIO) / (1 - BETA1**at)
        grown = torch.expm1((steps * math.log(GROWTH)).clamp(max=MAX_LOG_GROWTH)) * GROWTH / (GROWTH - 1)
        held = start[rows] if start.ndim else start
        weight = self._decayed(self.weight[rows] - rate * first * moved, held, rate * grown)
        share = torch.exp(_log_retained(torch.tensor(number), self.ema) - _log_retained(before, self.ema)).float()
        average[rows] = weight + (average[rows] - weight) * share
        self.weight[rows], self.first[rows], self.second[rows] = weight, first * BETA1**steps, second * BETA2**steps
        self.last_steps[rows] = number


def _log_retained(step: torch.Tensor, ema: float) -> torch.Tensor:
    """Returns the logarithm of the share of the initial weights in the running average, float64.

    That is log prod_{i <= step} min(ema, (1 + i) / (10 + i)); for an ema of 0 it is far below 0.
    """
    switch = max(math.ceil((10 * ema - 1) / (1 - ema)), 1) - 1  # up to there the second one is less
    early = step.clamp(max=switch).double()
    retained = math.lgamma(11) + torch.lgamma(early + 2) - torch.lgamma(early + 11)
    return retained + (step - switch).clamp(min=0) * math.log(max(ema, 1e-9))
