"""Rows of Criteo's form: written, read, compared; the generator of synthetic ones."""

from __future__ import annotations

import importlib.util
import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from zoo.recommenders.criteo.data import Rows, read_rows
from zoo.recommenders.data.hashing import hash_buckets

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "synthesize_criteo.py"
SHARED = Path(os.environ.get("ZOO_SHARED", ROOT.parent / "shared"))
EMPTY = 263  # bucket of the empty string in 1000


def synthesize():
    spec = importlib.util.spec_from_file_location("synthesize_criteo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def buckets(*strings, count=1000):
    return hash_buckets(pa.array(strings, pa.binary()), count).tolist()


def line(label=b"1", numbers=None, categories=None):
    numbers = [b"%d" % i for i in range(13)] if numbers is None else numbers
    categories = [b"%08x" % i for i in range(26)] if categories is None else categories
    return b"\t".join([*([] if label is None else [label]), *numbers, *categories])


def read(sources, **options):
    return Rows.concatenate(list(read_rows(sources, **options)))


def same(a, b):
    assert (a.labels is None) == (b.labels is None)
    assert a.labels is None or np.array_equal(a.labels, b.labels)
    assert np.array_equal(a.numbers, b.numbers, equal_nan=True)
    assert np.array_equal(a.ids, b.ids)
    assert np.array_equal(a.index, b.index)


def synthetic_lines(count, **options):
    file = io.BytesIO()
    synthesize().write(file, count, 1, **options)
    return file.getvalue().splitlines()
