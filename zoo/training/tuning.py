"""Choice of precision and gradient exchange of a training, by timing steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pipelines.core import machine
from zoo.training.communication import Communication, tuned
from zoo.training.runs import Processes

Loss = Callable[[nn.Module, bool], torch.Tensor]  # of a network or its distributed form; whether in bfloat16


def choose(
    model: nn.Module, group: Processes, config: Any, loss: Loss, part: Loss, start: Communication, about: str
) -> dict[str, Any]:
    """Times steps to find the fastest way to train; all processes agree.

    Args:
        model: Network to train.
        group: Processes that train together.
        config: Training recipe with `precision`, `tune_communication` and `accumulate`.
        loss: Loss of a batch.
        part: Loss of one of the `accumulate` parts of a batch.
        start: Gradient exchange to compare others with.
        about: Size of a part, for the cache of results.

    Returns:
        {"precision"}, with `tune_communication` also the result of `communication.tuned`.
    """
    precision = config.precision
    if precision == "auto":
        precision = choose_precision(group, lambda bf16: time_step(model, loss, bf16))
    options: dict[str, Any] = {}
    if config.tune_communication and group.count > 1:

        def step(model: nn.Module) -> None:
            torch.autograd.backward(part(model, precision == "bf16"))
            model.zero_grad(set_to_none=True)

        about = f"{about} {precision} {config.accumulate}"
        options = tuned(model, group, step, start, about=about, whole=config.accumulate == 1)
    return {"precision": precision, **options}


def distribute(model: nn.Module, group: Processes, chosen: Mapping[str, Any], start: Communication) -> nn.Module:
    """Wraps a network to train with the other processes.

    Args:
        model: Network to train.
        group: Processes that train together.
        chosen: Result of `choose`.
        start: Gradient exchange if none was chosen.

    Returns:
        The distributed form; the network itself in a single process.
    """
    if group.count == 1:
        return model
    options = chosen.get("communication")
    return (Communication(**options) if options else start).wrap(model, group)


def choose_precision(group: Processes, seconds: Callable[[bool], float]) -> str:
    """Chooses the faster training precision on this machine; all processes agree on it.

    Args:
        group: Processes that train together.
        seconds: Measures the seconds of a step; called with True for bf16, False for fp32.

    Returns:
        "fp32" or "bf16".
    """
    times = {"fp32": 0.0}
    if group.device.type == "cuda":
        times = {"bf16" if torch.cuda.is_bf16_supported() else "fp32": 0.0}
    elif machine.has_bf16():  # elsewhere it is emulated
        times = {precision: seconds(precision == "bf16") for precision in ("bf16", "fp32")}
    return str(group.same(min(times, key=times.__getitem__)))


def time_step(model: nn.Module, loss: Loss, bf16: bool) -> float:
    """Times a forward and a backward pass; weights, statistics and gradients stay as they are.

    Args:
        model: Network to train.
        loss: Loss of a batch.
        bf16: Whether to compute in bfloat16.

    Returns:
        Seconds, the better of two.
    """
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    times = []
    for _ in range(3):
        start = time.perf_counter()
        batch_loss = loss(model, bf16)
        torch.autograd.backward(batch_loss)
        if batch_loss.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    model.zero_grad(set_to_none=True)
    model.load_state_dict(state)
    return min(times[1:])
