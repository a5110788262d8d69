"""Rows of Criteo's form: written, read, compared; the generator of synthetic ones."""

from __future__ import annotations

import importlib.util
import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from zoo.recommenders import criteo
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.hashing import hash_buckets
from zoo.recommenders.data.schema import Schema

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "synthesize_criteo.py"
SHARED = Path(os.environ.get("ZOO_SHARED", ROOT.parent / "shared"))
EMPTY = 263  # bucket of the empty string in 1000


def synthesize():
    spec = importlib.util.spec_from_file_location("synthesize_criteo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_synthetic(path):
    """40,000 rows: ten megabytes, several blocks."""
    with path.open("wb") as file:
        synthesize().write(file, 40_000, 5)
    return path


def buckets(*strings, count=1000):
    return hash_buckets(pa.array(strings, pa.binary()), count).tolist()


def line(label=b"1", numbers=None, categories=None):
    numbers = [b"%d" % i for i in range(13)] if numbers is None else numbers
    categories = [b"%08x" % i for i in range(26)] if categories is None else categories
    return b"\t".join([*([] if label is None else [label]), *numbers, *categories])


def raw_features(numeric=13, categorical=26, buckets=1000):
    """Numbers as they are, NaN for missing; buckets: of all categories, or those of each, missing values behind them."""
    own = not isinstance(buckets, int)
    sizes = list(buckets) if own else [buckets] * categorical
    numbers = [criteo.logarithm(f"I{index + 1}", 0.0, 1.0) for index in range(numeric)]
    categories = [criteo.category(f"C{index + 1}", size, missing_row=own) for index, size in enumerate(sizes)]
    return Features(Features(Schema((criteo.LABEL, *numbers, *categories), header=False)).raw.schema)


def read_rows(sources, *, numeric=13, categorical=26, buckets=1000, **options):
    return raw_features(numeric, categorical, buckets).read(sources, **options)


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
