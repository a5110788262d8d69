"""Probabilities of models whose log kept a share of its negatives (He et al. 2014, section 6.3).

With a share w of the negatives, the log has the odds of all rows times 1 / w. The network learns the logit z of all
rows when its loss and its metrics on the log read z + log(1 / w), as q = p / (p + (1 - p) w) is the probability in the
log. The graph needs no further operator.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from pipelines.core.errors import RequestError
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.models.multitask.outputs import first_of


def log_odds(rate: float) -> float:
    """Returns the shift of the logits of a log, log(1 / rate); 0 where all negatives were kept.

    Args:
        rate: Share of the negatives that the log kept; 0: all.
    """
    return -math.log(rate) if rate else 0.0


def require_one_sampled_label(rate: float, schema: Schema, parents: tuple[int, ...]) -> None:
    """Checks that sampling changes the odds of the first label alone.

    Args:
        rate: Share of the negatives that the log kept; 0: all.
        schema: Schema of the log.
        parents: See `zoo.recommenders.models.multitask.outputs.parents_of`.

    Raises:
        RequestError: Another label has rows where the first one is 0.
    """
    others = list(enumerate(schema.of("label")))[1:]
    free = [column.name for index, column in others if not column.where and (not parents or parents[index] < 0)]
    if log_odds(rate) and free:
        raise RequestError(
            f"found the negative rate {rate:g} with the label {free[0]}, expected one label, esmm, or labels with "
            f'"where": "{schema.labels[0]}"; or give negatives the weight {1 / rate:g} in a weight column instead'
        )


def shifted(results: Any, shift: float) -> Any:
    """Adds to the logits of the first label.

    Args:
        results: Results of a network, see `first_of`.
        shift: Result of `log_odds`.

    Returns:
        Results of the same form.
    """
    if not shift:
        return results
    logits = first_of(results)
    first = torch.zeros(logits.shape[1])
    first[0] = shift
    return (logits + first, *results[1:]) if isinstance(results, tuple) else logits + first


@torch.no_grad()
def start_at_all_rows(model: nn.Module, example: tuple[torch.Tensor, ...], shift: float) -> None:
    """Lowers the bias of the first label's logit, so that training starts where it would without sampling.

    Args:
        model: Untrained network.
        example: Its inputs for some rows.
        shift: Result of `log_odds`.
    """
    model.eval()
    before = first_of(model(*example))[:, 0]
    for weight in (parameter for parameter in model.parameters() if shift and parameter.numel() == 1):
        own = weight.clone()
        weight.add_(1)
        added = first_of(model(*example))[:, 0] - before
        weight.copy_(own)
        if torch.allclose(added, torch.ones_like(added), atol=1e-4):
            weight.sub_(shift)
            return
