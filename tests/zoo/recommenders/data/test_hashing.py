"""Hashes of categories: the fingerprints, and buckets of Arrow's columns."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pyarrow as pa
import pytest
from helpers.criteo_logs import EMPTY, buckets

from zoo.recommenders.data.hashing import buckets_of, fingerprint64, hash_buckets


def random_strings(lengths, seed=0):
    source = np.random.default_rng(seed)
    return [source.integers(0, 256, length, np.uint8).tobytes() for length in lengths]


def arrow(strings):
    return np.cumsum([0, *map(len, strings)]), np.frombuffer(b"".join(strings), np.uint8)


# Fingerprint64 as TensorFlow 2.21 gives it, one or more for every length class.
VECTORS = {
    b"": 0x9AE16A3B2F90404F,
    b"a": 0xB3454265B6DF75E3,
    b"abc": 0x24A5B3A074E7F369,
    b"68fd1e64": 0x6DEA854A18F8CA86,
    b"hello world": 0x588FB7478BD6B01B,
    b"The quick brown fox jumps over": 0xE75880B807DFB05A,
    b"x" * 50: 0x3FF2E52EF910C925,
    bytes(range(200)): 0x74C7FCC26D66FB3,
}


def test_fixed_fingerprints_of_every_length_class():
    assert fingerprint64(*arrow(list(VECTORS))).tolist() == list(VECTORS.values())


def test_all_lengths_keep_their_fingerprints():
    # digest of the fingerprints of one string of each length 0..300, made when they were equal to TensorFlow's
    strings = [bytes((7 * i + length) % 256 for i in range(length)) for length in range(301)]
    digest = hashlib.sha256(fingerprint64(*arrow(strings)).astype("<u8").tobytes()).hexdigest()
    assert digest == "12dd152a81425c4159f4268e2cb5d5d8cfe62c71b77917478c7acc3e1e6fc312"


@pytest.mark.parametrize("count", [1000, 2, 2**62, 2**63 - 1])
def test_fingerprints_equal_tensorflow(count):
    tensorflow = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    strings = random_strings([*range(301), *range(301), *[8] * 100])
    expected = tensorflow.strings.to_hash_bucket_fast(strings, count).numpy().astype(np.uint64)
    assert np.array_equal(fingerprint64(*arrow(strings)) % np.uint64(count), expected)


def test_hash_is_that_of_each_string_alone():
    strings = random_strings([8, 0, 3, 200, 8, 70, 0, 16, 33, 5] * 3)
    alone = [int(fingerprint64(*arrow([string]))[0]) for string in strings]
    assert fingerprint64(*arrow(strings)).tolist() == alone
    assert fingerprint64(arrow(strings)[0].astype(np.int32), arrow(strings)[1]).tolist() == alone


def test_more_strings_than_one_chunk():
    digits = np.frombuffer(b"".join(b"%08x" % i for i in range(70_000)), np.uint8)
    hashes = fingerprint64(np.arange(70_001) * 8, digits)
    assert int(hashes[69_999]) == int(fingerprint64(*arrow([b"%08x" % 69_999]))[0])
    assert np.unique(hashes).size == 70_000


@pytest.mark.parametrize("offsets", [[0, 5], [-1, 2], [0, 3, 2], []])
def test_offsets_that_do_not_fit_are_refused(offsets):
    with pytest.raises(ValueError, match="offsets"):
        fingerprint64(np.array(offsets, np.int64), np.zeros(4, np.uint8))


def test_hash_buckets_of_every_arrow_type():
    strings = ["68fd1e64", "", None, "é", "68fd1e64"]
    expected = buckets(b"68fd1e64", b"", b"", "é".encode(), b"68fd1e64")
    assert expected[1] == EMPTY
    for kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        array = pa.array(strings, kind)
        assert hash_buckets(array, 1000).dtype == np.int32
        assert hash_buckets(array, 1000).tolist() == expected
        assert hash_buckets(array[1:4], 1000).tolist() == expected[1:4]
        assert hash_buckets(array[:0], 1000).shape == (0,)
        assert hash_buckets(pa.nulls(2, kind), 1000).tolist() == [EMPTY, EMPTY]
    with pytest.raises(TypeError, match="int64"):
        hash_buckets(pa.array([1]), 1000)


def test_bytes_behind_a_null_do_not_count():
    valid = pa.py_buffer(b"\x01")  # of two strings only the first
    array = pa.Array.from_buffers(
        pa.string(), 2, [valid, pa.py_buffer(np.array([0, 1, 4], np.int32)), pa.py_buffer(b"aaaa")]
    )
    assert hash_buckets(array, 1000).tolist() == buckets(b"a", b"")


def test_modulo_is_exact():
    hashes = np.array([0, 1, 999, 1000, 2**64 - 1, 2**63], np.uint64)
    for count in (1, 2, 1000, 2**31 - 1):
        assert buckets_of(hashes, count).tolist() == [int(value) % count for value in hashes]
    for count in (0, -1, 2**31):
        with pytest.raises(ValueError, match="hash buckets"):
            buckets_of(hashes, count)


@pytest.mark.slow
def test_hashing_speed():
    data = np.random.default_rng(0).integers(0, 256, 8_000_000, np.uint8)
    offsets = np.arange(1_000_001) * 8
    start = time.process_time()
    fingerprint64(offsets, data)
    assert time.process_time() - start < 0.2  # 20 to 100 million a second
