"""FarmHash Fingerprint64, vectorized in numpy: TensorFlow's `StringToHashBucketFast` without TensorFlow.

Source: `farmhashna::Hash64` in https://github.com/google/farmhash/blob/master/src/farmhash.cc (MIT licence), which is
what `Fingerprint64` there and in TensorFlow is. Every string of n is hashed with the same few array operations, one set
per length class; `pipelines.kernels` has the same in native code, which `hash_buckets` prefers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipelines.kernels import extension

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_K0, _K1, _K2 = np.uint64(0xC3A5C85C97CB3127), np.uint64(0xB492B66FBE98F273), np.uint64(0x9AE16A3B2F90404F)
_CHUNK = 1 << 16  # strings at a time: temporaries stay in the cache and memory stays small


def fingerprint64(offsets: npt.NDArray[np.int32] | Ints, data: Bytes) -> Hashes:
    """Hashes n byte strings in Arrow's layout: string i is `data[offsets[i]:offsets[i + 1]]`.

    Args:
        offsets: int32 or int64 [n + 1], ascending.
        data: uint8 [bytes], C-contiguous.

    Returns:
        Fingerprints, uint64 [n].

    Raises:
        ValueError: The offsets do not fit the data.
    """
    starts = np.asarray(offsets, np.int64)
    lengths = np.diff(starts)
    if starts.ndim != 1 or not starts.size or starts[0] < 0 or starts[-1] > data.size or (lengths < 0).any():
        raise ValueError(f"found offsets that are not ascending from 0 to {data.size}, the size of the data")
    return fingerprints(data, starts[:-1], lengths)


def fingerprints(data: Bytes, starts: Ints, lengths: Ints) -> Hashes:
    """Hashes n byte strings of a buffer: string i is `data[starts[i]:starts[i] + lengths[i]]`.

    Args:
        data: uint8 [bytes], C-contiguous.
        starts: First byte of every string, int64 [n].
        lengths: Bytes of every string, int64 [n]; all strings are inside `data`.

    Returns:
        Fingerprints, uint64 [n].
    """
    hashes = np.full(starts.shape, _K2)  # the hash of the empty string
    fetch = _Fetch(data)
    for begin in range(0, starts.size, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        here, start, length = hashes[part], starts[part], lengths[part]
        rows = np.flatnonzero(length == 8)
        here[rows] = _exactly_8(fetch, start[rows])
        if rows.size + np.count_nonzero(length == 0) < length.size:
            for low, high, function in _CLASSES:
                rows = np.flatnonzero((length >= low) & (length <= high) & (length != 8))
                if rows.size:
                    here[rows] = function(fetch, start[rows], length[rows])
    return hashes


def buckets_of(hashes: Hashes, buckets: int | Sequence[int]) -> npt.NDArray[np.int32]:
    """Reduces hashes modulo the number of buckets.

    Args:
        hashes: Fingerprints, uint64 of any shape.
        buckets: Number of buckets, 1 to 2^31 - 1; or a sequence with the number for every entry of the last axis. With
            a sequence the empty string (a missing value) has an extra bucket, the last one. It is recognized by its
            hash, which any other string has with probability 2^-64.

    Returns:
        Buckets, int32 in the shape of `hashes`.

    Raises:
        ValueError: A number of buckets is out of range.
    """
    divisor = np.array(buckets, np.int64)
    if not ((divisor > 0) & (divisor < 2**31)).all():
        raise ValueError(f"found {buckets} hash buckets, expected 1 to {2**31 - 1}")
    unsigned = divisor.astype(np.uint64)
    remainders = (hashes - hashes // unsigned * unsigned).astype(np.int32)  # numpy's % is not vectorized, its // is
    return remainders if isinstance(buckets, int) else np.where(hashes == _K2, divisor.astype(np.int32), remainders)


def hash_buckets(strings: Any, buckets: int | Sequence[int]) -> npt.NDArray[np.int32]:
    """Hashes strings into buckets, as `tf.strings.to_hash_bucket_fast(strings, buckets)`.

    Args:
        strings: pyarrow array [n] of type binary, string, large_binary or large_string; null counts as the empty
            string.
        buckets: Number of buckets, or a sequence of one number, see `buckets_of`.

    Returns:
        Buckets, int32 [n].

    Raises:
        TypeError: The array has another type.
        ValueError: The number of buckets is out of range.
    """
    large = pa.types.is_large_binary(strings.type) or pa.types.is_large_string(strings.type)
    if not (large or pa.types.is_binary(strings.type) or pa.types.is_string(strings.type)):
        raise TypeError(f"found a pyarrow array of {strings.type}, expected binary or string")
    count = len(strings)
    if not count:  # such an array may have no buffers at all
        return np.zeros(0, np.int32)
    _, offsets, data = strings.buffers()
    positions = np.frombuffer(offsets, np.int64 if large else np.int32)[
        strings.offset : strings.offset + count + 1
    ].astype(np.int64)
    lengths = np.diff(positions)
    if strings.null_count:
        lengths[strings.is_null().to_numpy(zero_copy_only=False)] = 0  # the bytes behind a null are undefined
    values = np.frombuffer(b"" if data is None else data, np.uint8)
    if isinstance(buckets, int) and (native := extension.native()) is not None:
        buckets_found: npt.NDArray[np.int32] = native.hash_buckets(values, positions[:-1], lengths, buckets)
        return buckets_found
    return buckets_of(fingerprints(values, positions[:-1], lengths)[:, None], buckets)[:, 0]


class _Fetch:
    """Little-endian reads of a byte buffer at arbitrary positions."""

    def __init__(self, data: Bytes) -> None:
        self.bytes = data
        self.words64 = overlapping(data, 8)
        self.words32 = overlapping(data, 4)

    def u8(self, positions: Ints) -> Hashes:
        return self.bytes[positions].astype(np.uint64)

    def u32(self, positions: Ints) -> Hashes:
        return self.words32[positions].astype(np.uint64)

    def u64(self, positions: Ints) -> Hashes:
        return self.words64[positions]


def overlapping(data: Bytes, size: int) -> npt.NDArray[Any]:
    """Views a buffer as overlapping little-endian unsigned integers, one starting at every byte.

    Args:
        data: uint8 [n].
        size: Bytes of an integer: 1, 2, 4 or 8.

    Returns:
        View [n - size + 1] without a copy.
    """
    return np.ndarray((max(data.size - size + 1, 0),), f"<u{size}", data, strides=(1,))


def _u64(values: Ints | int) -> Any:
    return np.asarray(values).astype(np.uint64)[()]


def _rotate(value: Hashes, bits: int) -> Hashes:
    return (value >> np.uint64(bits)) | (value << np.uint64(64 - bits))


def _shift_mix(value: Hashes) -> Hashes:
    return value ^ (value >> np.uint64(47))


def _hash_16(u: Hashes, v: Hashes, mul: Hashes) -> Hashes:
    a = _shift_mix((u ^ v) * mul)
    return _shift_mix((v ^ a) * mul) * mul


def _mul(lengths: Ints | int) -> Hashes:
    product: Hashes = _K2 + _u64(lengths) * np.uint64(2)
    return product


def _from_1_to_3(fetch: _Fetch, starts: Ints, lengths: Ints) -> Hashes:
    y = fetch.u8(starts) + (fetch.u8(starts + (lengths >> 1)) << np.uint64(8))
    z = _u64(lengths) + (fetch.u8(starts + lengths - 1) << np.uint64(2))
    return _shift_mix((y * _K2) ^ (z * _K0)) * _K2


def _from_4_to_7(fetch: _Fetch, starts: Ints, lengths: Ints) -> Hashes:
    first, last = fetch.u32(starts), fetch.u32(starts + lengths - 4)
    return _hash_16(_u64(lengths) + (first << np.uint64(3)), last, _mul(lengths))


def _from_8_to_16(fetch: _Fetch, starts: Ints, lengths: Ints | int) -> Hashes:
    a = fetch.u64(starts)
    b = a if isinstance(lengths, int) else fetch.u64(starts + lengths - 8)
    a, mul = a + _K2, _mul(lengths)
    return _hash_16(_rotate(b, 37) * mul + a, (_rotate(a, 25) + b) * mul, mul)


def _exactly_8(fetch: _Fetch, starts: Ints) -> Hashes:
    """The common case, a 32-bit id as 8 hex digits: one read instead of two and scalar factors."""
    return _from_8_to_16(fetch, starts, 8)


def _from_17_to_32(fetch: _Fetch, starts: Ints, lengths: Ints) -> Hashes:
    mul, ends = _mul(lengths), starts + lengths
    a, b = fetch.u64(starts) * _K1, fetch.u64(starts + 8)
    c, d = fetch.u64(ends - 8) * mul, fetch.u64(ends - 16) * _K2
    return _hash_16(_rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c, mul)


def _from_33_to_64(fetch: _Fetch, starts: Ints, lengths: Ints) -> Hashes:
    mul, ends = _mul(lengths), starts + lengths
    a, b = fetch.u64(starts) * _K2, fetch.u64(starts + 8)
    c, d = fetch.u64(ends - 8) * mul, fetch.u64(ends - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _hash_16(y, a + _rotate(b + _K2, 18) + c, mul)
    e, f = fetch.u64(starts + 16) * mul, fetch.u64(starts + 24)
    g, h = (y + fetch.u64(ends - 32)) * mul, (z + fetch.u64(ends - 24)) * mul
    return _hash_16(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, mul)


def _weak_hash_32(fetch: _Fetch, starts: Ints, a: Hashes, b: Hashes) -> tuple[Hashes, Hashes]:
    w, x, y, z = (fetch.u64(starts + step) for step in (0, 8, 16, 24))
    a = a + w
    b = _rotate(b + a + z, 21)
    c, a = a, a + x + y
    return a + z, b + _rotate(a, 44) + c


def _round(fetch: _Fetch, s: Ints, state: Hashes, mul: Any, nine: int) -> Hashes:
    """Mixes 64 bytes at `s` into the state: x, y, z, v (two words), w (two words).

    `nine` is 9 in the last round and 1 before.
    """
    x, y, z, v0, v1, w0, w1 = state
    x = _rotate(x + y + v0 + fetch.u64(s + 8), 37) * mul
    y = _rotate(y + v1 + fetch.u64(s + 48), 42) * mul
    x = x ^ (w1 * np.uint64(nine))
    y = y + v0 * np.uint64(nine) + fetch.u64(s + 40)
    z = _rotate(z + w0, 33) * mul
    v = _weak_hash_32(fetch, s, v1 * mul, x + w0)
    w = _weak_hash_32(fetch, s + 32, z + w1, y + fetch.u64(s + 16))
    return np.stack([z, y, x, *v, *w])  # x and z change places


def _over_64(fetch: _Fetch, starts: Ints, lengths: Ints) -> Hashes:
    state = np.zeros((7, starts.size), np.uint64)
    state[0] = fetch.u64(starts) + _u64(81 * int(_K2) % 2**64)
    state[1] = _u64((81 * int(_K1) + 113) % 2**64)
    state[2] = _shift_mix(state[1] * _K2 + np.uint64(113)) * _K2
    rounds = (lengths - 1) // 64
    for step in range(int(rounds.max())):
        rows = np.flatnonzero(rounds > step)  # shorter strings are done
        state[:, rows] = _round(fetch, starts[rows] + 64 * step, state[:, rows], _K1, 1)
    mul = _K1 + ((state[2] & np.uint64(0xFF)) << np.uint64(1))
    state[5] += _u64((lengths - 1) & 63)
    state[3] += state[5]
    state[5] += state[3]
    x, y, z, v0, v1, w0, w1 = _round(fetch, starts + lengths - 64, state, mul, 9)
    return _hash_16(_hash_16(v0, w0, mul) + _shift_mix(y) * _K0 + z, _hash_16(v1, w1, mul) + x, mul)


_CLASSES: tuple[tuple[int, int | float, Callable[[_Fetch, Ints, Ints], Hashes]], ...] = (
    (1, 3, _from_1_to_3),
    (4, 7, _from_4_to_7),
    (8, 16, _from_8_to_16),
    (17, 32, _from_17_to_32),
    (33, 64, _from_33_to_64),
    (65, np.inf, _over_64),
)
