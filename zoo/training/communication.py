"""Gradient exchange of data-parallel training, and the search for its fastest options by timing.

The options are those of torch's DistributedDataParallel (Li et al. 2020, "PyTorch Distributed").
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed import ProcessGroupGloo
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from pipelines.core import machine, settings
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, write_json
from zoo.training.runs import Processes

logger = logging.getLogger(__name__)

CANDIDATES: dict[str, tuple[Any, ...]] = {  # in the order of their usual gain
    "hook": ("bf16", "fp16"),
    "bucket_cap_mb": (1.0, 4.0, 100.0),
    "threads": (1, 4),
    "gradient_as_bucket_view": (True, False),
    "static_graph": (True,),
}
# steps of warm-up (DistributedDataParallel reorders its buckets in the second one), of a comparison, of the last one
WARM, ROUNDS, FINAL = (3, 5, 9)
SECONDS = 120.0  # time limit of the search
MIN_GAIN = 0.02  # minimum gain for a change of options, as a share of the time of a step


@dataclass(frozen=True)
class Communication:
    """Options of the gradient exchange, named as in torch's DistributedDataParallel.

    Attributes:
        hook: Number format of the exchanged gradients: "" keeps theirs, "fp16" and "bf16" convert them, "powersgd"
            approximates them with rank 2 (Vogels et al. 2019). PowerSGD exchanges all gradients in one bucket, because
            gloo confuses the sums of several buckets. The search does not try it, because checkpoints do not keep its
            error feedback.
        bucket_cap_mb: MB of gradients that are summed at once.
        threads: Threads of gloo.
        gradient_as_bucket_view: Whether gradients are views of the buckets.
        static_graph: Whether the graph is the same in all steps.
    """

    hook: str = ""
    bucket_cap_mb: float = 25.0
    threads: int = 2
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    def wrap(self, model: nn.Module, group: Processes) -> DistributedDataParallel:
        """Wraps a model so that its backward pass exchanges gradients with these options. All processes must call it.

        Args:
            model: Model on the device of the group.
            group: Processes that train together.

        Returns:
            The wrapped model.
        """
        gloo = group.device.type == "cpu" and self.threads != Communication.threads
        wrapped = DistributedDataParallel(
            model,
            [group.device] if group.device.type == "cuda" else None,
            process_group=_with_threads(self.threads, distributed.group.WORLD) if gloo else None,
            bucket_cap_mb=1 << 12 if self.hook == "powersgd" else self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        if self.hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(wrapped.process_group, 2, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self.hook:
            hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[self.hook]
            # torch refuses its bf16 hook by name without nccl, although gloo supports bf16
            wrapped.register_comm_hook(wrapped.process_group, lambda group, bucket: hook(group, bucket))
        return wrapped


def exchanging(model: nn.Module, exchange: bool) -> contextlib.AbstractContextManager[None]:
    """Chooses whether backward passes exchange gradients, for gradient accumulation.

    Args:
        model: Model, wrapped or not.
        exchange: True exchanges gradients; False accumulates them locally.

    Returns:
        Context manager for the backward passes.
    """
    if exchange or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


@functools.cache
def _with_threads(threads: int, world: Any) -> Any:
    """Returns a group of all processes with a number of gloo threads; one per default group (`world`)."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads = threads
    return distributed.new_group(backend="gloo", pg_options=options)


def tuned(
    model: nn.Module,
    group: Processes,
    step: Callable[[nn.Module], None],
    start: Communication,
    *,
    about: str,
    whole: bool = True,
) -> dict[str, Any]:
    """Finds the fastest gradient exchange for a model on these machines; all processes agree on the result.

    The result is cached by model, machines and options. Candidates are timed in turn with the current best.

    Args:
        model: Model to train.
        group: Processes that train together.
        step: Runs one forward and backward pass of the model that it is called with.
        start: Options to keep unless other options are faster by more than noise.
        about: Other properties that determine the time of a step (batch size, precision), for the cache key.
        whole: Whether every step exchanges gradients, so that the graph is static.

    Returns:
        {"communication": options, "speedup": time of a step before / after, "share": fractions of the time of a step
        before and after that the exchange takes, "tried": all comparisons}.
    """
    own = {"cpu": machine.fingerprint(), "host": platform.node(), "threads": torch.get_num_threads()}
    everyone: list[Any] = [None] * group.count
    distributed.all_gather_object(everyone, own)
    sizes = [tuple(weight.shape) for weight in model.parameters() if weight.requires_grad]
    key = hashlib.sha256(repr((sizes, everyone, about, asdict(start), CANDIDATES)).encode()).hexdigest()[:16]
    path = settings.home() / "communication" / f"{key}.json"
    try:
        cached = read_json(path) if group.rank == 0 and path.is_file() else None
    except (OSError, RequestError):
        cached = None
    if (cached := group.same(cached)) is not None:
        return dict(cached)
    chosen = _searched(model, group, step, start, whole)
    if group.rank == 0:
        logger.info("gradients: %s, %.2fx as fast", chosen["communication"], chosen["speedup"])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, chosen)
        except OSError as error:
            logger.warning("cannot cache the options of the gradient exchange: %s", error)
    return chosen


def _searched(
    model: nn.Module, group: Processes, step: Callable[[nn.Module], None], start: Communication, whole: bool
) -> dict[str, Any]:
    best, tried, begin = start, [], time.monotonic()
    for name, values in CANDIDATES.items():
        for value in values:
            if getattr(best, name) == value or (name == "static_graph" and not whole):
                continue
            if not group.same(time.monotonic() - begin < SECONDS):
                break
            other = replace(best, **{name: value})
            gain, noise = compared(model, group, step, best, other, ROUNDS)
            tried.append({"option": name, "value": value, "speedup": round(gain, 3), "noise": round(noise, 3)})
            if gain > 1 + max(noise, MIN_GAIN):
                best = other
    gain = 1.0
    if best != start:
        gain, noise = compared(model, group, step, start, best, FINAL)
        tried.append({"option": "all", "value": asdict(best), "speedup": round(gain, 3), "noise": round(noise, 3)})
        if gain <= 1 + max(noise, MIN_GAIN):
            best, gain = start, 1.0
    shares = [round(share(model, group, step, options), 3) for options in (start, best)]
    return {"communication": asdict(best), "speedup": round(gain, 3), "share": shares, "tried": tried}


def compared(
    model: nn.Module,
    group: Processes,
    step: Callable[[nn.Module], None],
    first: Communication,
    second: Communication,
    rounds: int,
) -> tuple[float, float]:
    """Times two options in turn on copies of a model.

    Args:
        model: Model to train.
        group: Processes that train together.
        step: Runs one forward and backward pass.
        first: First options.
        second: Second options.
        rounds: Timed steps of every option.

    Returns:
        (median time of a step with `first` / with `second`, standard error of this ratio by both spreads). The
        slowest process is timed.
    """
    wrapped = [options.wrap(copy.deepcopy(model), group) for options in (first, second)]
    for replica in wrapped:
        for _ in range(WARM):
            step(replica)
    times = np.array([[step_seconds(group, step, network) for network in wrapped] for _ in range(rounds)])
    medians = np.median(times, axis=0)
    spread = 1.4826 * np.median(np.abs(times - medians), axis=0) / medians  # robust estimate of the standard deviation
    return float(medians[0] / medians[1]), float(np.sqrt((spread**2).sum() * np.pi / 2 / rounds))


def share(
    model: nn.Module, group: Processes, step: Callable[[nn.Module], None], options: Communication, rounds: int = ROUNDS
) -> float:
    """Measures the fraction of a step's time that the exchange takes: steps with and without exchange, in turn.

    Args:
        model: Model to train.
        group: Processes that train together.
        step: Runs one forward and backward pass.
        options: Options of the exchange.
        rounds: Timed pairs of steps.

    Returns:
        Fraction, 0 to 1.
    """
    wrapped = replace(options, static_graph=False).wrap(copy.deepcopy(model), group)
    times = []
    for turn in range(WARM + rounds):
        whole = step_seconds(group, step, wrapped)
        with wrapped.no_sync():
            alone = step_seconds(group, step, wrapped)
        wrapped.zero_grad(set_to_none=True)
        if turn >= WARM:
            times.append((whole, alone))
    whole, alone = np.median(np.array(times), axis=0)
    return float(max(0.0, 1 - alone / whole))


def step_seconds(group: Processes, step: Callable[[nn.Module], None], model: nn.Module) -> float:
    """Times one step.

    Args:
        group: Processes that train together.
        step: Runs one forward and backward pass.
        model: Wrapped model.

    Returns:
        Seconds of the slowest process.
    """
    distributed.barrier()
    start = time.perf_counter()
    step(model)
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=group.device)
    distributed.all_reduce(taken, distributed.ReduceOp.MAX)
    return float(taken)
