"""Parses numbers in text for all fields at once."""

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from zoo.recommenders.data.hashing import overlapping

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

PAD = b"\xff" * 8  # in front of every buffer, so that the 8 bytes before any field's end can be read
_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?")
_LARGEST = float(np.finfo(np.float32).max)
_u64 = np.uint64


def parse_floats(texts: pa.Array) -> npt.NDArray[np.float64]:
    """Parses texts as numbers.

    Args:
        texts: Text array [n], null where missing.

    Returns:
        float64 [n]; NaN for null, for text that is not a number, and for infinity.
    """
    try:
        found = texts.cast(pa.float64())
    except pa.ArrowInvalid:
        trimmed = pc.utf8_trim_whitespace(texts)
        is_number = pc.match_substring_regex(trimmed, r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
        found = pc.if_else(is_number, trimmed, pa.scalar(None, pa.string())).cast(pa.float64())
    values = found.to_numpy(zero_copy_only=False).astype(np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def parse_numbers(data: npt.NDArray[np.uint8], starts: Ints, ends: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Parses the fields `data[starts:ends]`.

    Integers of up to eight digits are parsed all at once; longer numbers and decimal fractions one by one.

    Args:
        data: Text, uint8 [bytes], beginning with `PAD`.
        starts: First byte of every field, int64 of any shape.
        ends: One past the last byte of every field, int64 in the same shape.

    Returns:
        Values, float32 in the shape of `starts`, NaN for empty fields; and bool in the same shape, true where the text
        is not a number in the range of float32.
    """
    values, bad = _digits(data, starts, ends)
    others = np.nonzero(bad)
    if others[0].size:
        start, end = starts[others], ends[others]
        minus = data[start] == ord("-")
        signed, wrong = _digits(data, start + minus, end)
        signed[minus] *= -1
        wrong |= np.isnan(signed)  # nothing but a minus sign
        odd = np.flatnonzero(wrong)
        text = data.tobytes() if odd.size else b""
        signed[odd] = [_number(text[i:j]) for i, j in zip(start[odd].tolist(), end[odd].tolist(), strict=True)]
        values[others], bad[others] = signed, np.isnan(signed)
    return values, bad


def _digits(data: npt.NDArray[np.uint8], starts: Ints, ends: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Fields of up to eight digits as float32, NaN where empty, and bool, where a field holds anything else.

    A field is read as one 64-bit word and its digits added up in three multiplications (the well-known SWAR method: D.
    Lemire, "Quickly parsing eight digits", 2018).
    """
    bits = (ends - starts).astype(np.uint64) * _u64(8)
    zeros = _u64(0x3030303030303030)
    empty = _u64(64) - bits  # wraps around for longer fields, and numpy shifts everything out then
    words = (overlapping(data, 8)[ends - 8] >> empty << empty) | (zeros >> bits)  # '0' in front of the field
    words ^= zeros
    other = ((words + _u64(0x7676767676767676)) | words) & _u64(0x8080808080808080) != 0  # a byte over 9
    words = words * _u64(10) + (words >> _u64(8))
    mask = _u64(0x000000FF000000FF)
    words = (
        (words & mask) * _u64(0x000F424000000064) + ((words >> _u64(16)) & mask) * _u64(0x0000271000000001)
    ) >> _u64(32)
    values = words.astype(np.float32)
    values[bits == 0] = np.nan
    return values, other


def _number(text: bytes) -> float:
    """A number of any notation; NaN for anything else, and beyond float32."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if abs(value) <= _LARGEST else math.nan
