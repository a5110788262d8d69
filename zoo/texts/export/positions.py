"""Constant tables of positions: rotations, and biases of attention by the distance of two tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pipelines.graph.builder import MASKED
from zoo.texts.models.architectures.base import Floats
from zoo.texts.models.config import ModelConfig, Rotary
from zoo.training.relative_positions import relative_buckets


def distance_bias(config: ModelConfig, weights: Mapping[str, Floats], local: bool) -> Floats | None:
    """Returns the bias of attention scores by the distance of the key from the query.

    It is the sum of a bias of relative positions or of ALiBi, of `MASKED` at later keys of causal attention, and of
    `MASKED` outside the window of local layers.

    Args:
        config: Description of the network.
        weights: Weights by shared name.
        local: Whether for the layers with sliding-window attention.

    Returns:
        float32 [2 max_tokens - 1, heads or 1], the distance -(max_tokens - 1) first; None for no bias.
    """
    ahead = np.arange(-(config.max_tokens - 1), config.max_tokens)
    hidden = np.zeros(len(ahead), np.bool_)
    if config.attention.causal:
        hidden |= ahead > 0
    if local:
        hidden |= np.abs(ahead) > config.attention.window
    mask: Floats | None = np.where(hidden, np.float32(MASKED), np.float32(0))[:, None] if hidden.any() else None
    if not config.buckets and not config.alibi:
        return mask
    relative = alibi_bias(config) if config.alibi else relative_bias(config, weights["relative.weight"])
    return relative if mask is None else relative + mask


def relative_bias(config: ModelConfig, table: Floats) -> Floats:
    """Expands a relative position bias from buckets to distances, see `relative_buckets`.

    Args:
        config: Configuration of the network.
        table: Bias by bucket, float32 [buckets, heads].

    Returns:
        Bias by distance of the key from the query, -(max_tokens - 1) first, float32 [2 max_tokens - 1, heads].
    """
    ahead = np.arange(-(config.max_tokens - 1), config.max_tokens)
    rows: Floats = table[relative_buckets(ahead, config.buckets, config.bucket_distance)]
    return rows


def alibi_bias(config: ModelConfig) -> Floats:
    """Returns a bias of attention that falls linearly with the distance (Press et al. 2022, "ALiBi", section 3).

    For n heads, a power of two, the slopes are 2^(-8 i / n) for i from 1 to n. For other counts they are the slopes of
    the next lower power of two, followed by every second slope of twice that power.

    Args:
        config: Description of the network.

    Returns:
        float32 [2 max_tokens - 1, heads], the distance -(max_tokens - 1) first.
    """
    power = 1 << (config.heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (config.heads - power), 2)]
    distance = np.abs(np.arange(-(config.max_tokens - 1), config.max_tokens)).astype(np.float32)
    bias: Floats = -distance[:, None] * np.array(slopes, np.float32)
    return bias


def rotary_angles(config: ModelConfig, local: bool) -> Floats:
    """Returns the angles of rotary positions (Su et al. 2021, "RoFormer", equation 15), in halves.

    With the scaling "ntk", the base is multiplied by the factor f and all frequencies are divided by f^(2 / size), as
    in GTE 1.5; with "linear" they are divided by f. With "yarn" (Peng et al. 2023, section 3.2) and "llama3",
    frequencies with few rotations within the trained length are divided by f, frequencies with many rotations are
    unchanged, and frequencies in between are interpolated: by the column of the head ("yarn"), or by the number of
    rotations ("llama3").

    Args:
        config: Description of the network.
        local: Whether for the layers with sliding-window attention.

    Returns:
        float32 [max_tokens, size]; column i and column i + size / 2 have the same angle.
    """
    rotary = config.rotary
    assert rotary is not None
    is_local = local and bool(rotary.local_theta)
    theta, size = rotary.local_theta if is_local else rotary.theta, rotary.size
    scaling = "" if is_local else rotary.scaling
    exponents = (np.arange(0, size, 2, dtype=np.float32) / np.float32(size)).astype(np.float64)
    base = theta * rotary.factor if scaling == "ntk" else theta
    frequencies = np.float32(1) / np.power(base, exponents).astype(np.float32)  # of float32, as those of the training
    if scaling in ("linear", "ntk"):
        frequencies /= np.float32(rotary.factor ** (2 / size) if scaling == "ntk" else rotary.factor)
    elif scaling:
        stays = _ramp(rotary, frequencies).astype(np.float32)
        frequencies = frequencies / np.float32(rotary.factor) * (1 - stays) + frequencies * stays
    angles = np.arange(config.max_tokens, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([angles, angles], axis=1)


def _ramp(rotary: Rotary, frequencies: Floats) -> Floats:
    """Returns how much of each frequency stays in "yarn" and "llama3", 0 to 1, [size / 2]."""
    if rotary.scaling == "llama3":
        rotations = rotary.trained * frequencies / np.float32(2 * math.pi)
        stays: Floats = np.clip((rotations - rotary.slow) / (rotary.fast - rotary.slow), 0, 1)
        return stays
    first, last = (
        rotary.size * math.log(rotary.trained / (count * 2 * math.pi)) / (2 * math.log(rotary.theta))
        for count in (rotary.fast, rotary.slow)
    )
    if rotary.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.size - 1)
    last = last if last != first else last + 0.001  # as in the reference
    columns = np.arange(rotary.size // 2, dtype=np.float32)
    stays = 1 - np.clip((columns - np.float32(first)) / np.float32(last - first), 0, 1)
    return stays
