"""Quantized embedding tables: lookups a second of pooled rows, beside FBGEMM, zentorch and torch.

Every engine looks up the same ids in tables of the same codes: FBGEMM by its table-batched bags, zentorch by its group
of quantized bags (4 bits alone), torch by one quantized bag a table. Tables are random, as large as --gigabytes says,
all of one width; ids are uniform, or fall as rank^-1.05 with the ranks in random order. One pinned thread, in turn, CPU
time. An engine uses the memory that its library allocates; with --huge-pages the tables of all engines lie in
transparent huge pages, which here numpy asks for. Pooled values are compared with sums of floats first.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis import markdown
from pipelines.core.errors import RequestError, ZooError
from pipelines.kernels.recommenders.tables.embedding_bags import Bag, embedding_bags
from pipelines.kernels.recommenders.tables.quantized_rows import QuantizedRows, quantize, row_bytes
from scripts.peers import harness, processes
from scripts.peers.engines.fbgemm import open_bags

Array = NDArray[Any]
Look = Callable[[Array], Any]  # ids [n, features, pooling] -> a call without arguments

PACKAGES = ("fbgemm_gpu-cpu", "torch", "zentorch")
KINDS = ("zipf", "uniform")
ZIPF, BATCHES, COMPARED = 1.05, 4, 64
OURS = "zoo"


@dataclass(frozen=True)
class Case:
    """Tables of one comparison.

    Attributes:
        features: Number of tables.
        rows: Rows of each.
        width: Columns of each.
        bits: Bits of a code.
        huge_pages: Whether the tables of all engines lie in huge pages.
    """

    features: int
    rows: int
    width: int
    bits: int
    huge_pages: bool


@dataclass(frozen=True)
class Content:
    """The rows that all tables hold: codes uint8 [rows, width], scales and biases float16 [rows, 1]."""

    codes: Array
    scale: Array
    bias: Array

    def floats(self, rows: Any = slice(None)) -> NDArray[np.float32]:
        """Returns rows as float32 [..., width]."""
        values = self.codes[rows].astype(np.float32) * self.scale[rows].astype(np.float32)
        return cast("NDArray[np.float32]", values + self.bias[rows].astype(np.float32))


def draw_content(case: Case) -> Content:
    """Draws the rows of a table."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 2**case.bits, (case.rows, case.width), dtype=np.uint8)
    codes[:, 0], codes[:, 1] = 0, 2**case.bits - 1  # so that a row's range gives its scale and bias back
    scale = random.uniform(0.5, 1.0, (case.rows, 1)).astype(np.float16) / np.float16(2**case.bits)
    return Content(codes, scale, random.uniform(-0.5, -0.25, (case.rows, 1)).astype(np.float16))


def draw_ids(kind: str, case: Case, size: int, pooling: int) -> list[NDArray[np.int32]]:
    """Draws batches of ids.

    Returns:
        `BATCHES` arrays int32 [size, features, pooling].
    """
    random, shape = np.random.default_rng(1), (BATCHES, size, case.features, pooling)
    if kind == "uniform":
        return list(random.integers(0, case.rows, shape, dtype=np.int32))
    cumulated = np.cumsum(np.arange(1, case.rows + 1) ** -ZIPF)
    ranks = np.searchsorted(cumulated, random.random(shape) * cumulated[-1], side="right")
    return list(random.permutation(case.rows).astype(np.int32)[ranks])


def packed(codes: Array, bits: int) -> NDArray[np.uint8]:
    """Packs codes as FBGEMM does, the first in the lowest bits of a byte."""
    planes = [codes[:, plane :: 8 // bits] << np.uint8(plane * bits) for plane in range(8 // bits)]
    return np.asarray(np.bitwise_or.reduce(planes))


def _tensors(case: Case, rows: Array) -> list[Any]:
    """Returns a copy of the rows for every feature as a tensor, in memory of torch or of numpy."""
    import torch

    if case.huge_pages:
        return [torch.from_numpy(rows.copy()) for _ in range(case.features)]
    return [torch.from_numpy(rows).clone() for _ in range(case.features)]


def fbgemm(case: Case, content: Content) -> Look:
    """Opens FBGEMM's table-batched bags, which read all ids of a table before those of the next."""
    import torch

    bags = open_bags([(case.rows, case.width)] * case.features, case.bits)
    if case.huge_pages:
        bags.weights_host = torch.from_numpy(np.empty(bags.weights_host.numel(), np.uint8))
    rows = np.concatenate([_parameters(content, np.float16), packed(content.codes, case.bits)], axis=1)
    for weights, _ in bags.split_embedding_weights(split_scale_shifts=False):
        weights.copy_(torch.from_numpy(rows))

    def look(ids: Array) -> Any:
        size, _, pooling = ids.shape
        indices = torch.from_numpy(np.ascontiguousarray(ids.transpose(1, 0, 2)).reshape(-1))
        offsets = torch.arange(0, size * case.features * pooling + 1, pooling, dtype=torch.int32)
        return lambda: bags(indices, offsets)

    return look


def _parameters(content: Content, dtype: type) -> NDArray[np.uint8]:
    return np.concatenate([content.scale.astype(dtype), content.bias.astype(dtype)], axis=1).view(np.uint8)


def torch_bags(case: Case, content: Content) -> Look:
    """Opens torch's quantized bags, a call a table."""
    import torch

    operators: Any = torch.ops.quantized
    bag = {8: operators.embedding_bag_byte_rowwise_offsets, 4: operators.embedding_bag_4bit_rowwise_offsets}[case.bits]
    parameters = _parameters(content, np.float32 if case.bits == 8 else np.float16)
    tables = _tensors(case, np.concatenate([packed(content.codes, case.bits), parameters], axis=1))

    def look(ids: Array) -> Any:
        size, _, pooling = ids.shape
        indices = [torch.from_numpy(np.ascontiguousarray(ids[:, index]).reshape(-1)) for index in range(case.features)]
        offsets = torch.arange(0, size * pooling + 1, pooling, dtype=torch.int32)
        pairs = list(zip(tables, indices, strict=True))
        return lambda: [bag(table, rows, offsets, include_last_offset=True) for table, rows in pairs]

    return look


def zentorch(case: Case, content: Content) -> Look:
    """Opens zentorch's group of quantized bags; its bags of 8 bits are not documented."""
    import torch

    importlib.import_module("zentorch")  # registers the operators

    group: Any = torch.ops.zentorch.zentorch_horizontal_quant_embedding_bag_group
    rows = np.concatenate([packed(content.codes, case.bits), _parameters(content, np.float16)], axis=1)
    count, tables = case.features, _tensors(case, rows)

    def look(ids: Array) -> Any:
        size, _, pooling = ids.shape
        indices = [
            torch.from_numpy(np.ascontiguousarray(ids[:, index]).reshape(-1).astype(np.int64)) for index in range(count)
        ]
        offsets = [torch.arange(0, size * pooling, pooling)] * count
        zeros, options = [0] * count, ([None] * count, [0] * count, [-1] * count)
        return lambda: group(tables, indices, offsets, case.bits, torch.float32, zeros, zeros, zeros, *options)

    return look


def ours(case: Case, content: Content) -> Look:
    """Opens this project's bags."""
    table = quantize(content.floats(), case.bits)

    def look(ids: Array) -> Any:
        flat = np.ascontiguousarray(ids.reshape(len(ids), -1))
        copies = [
            QuantizedRows(table.data.copy(), case.rows, case.width, case.bits, table.scale_unit, table.bias_unit)
            for _ in range(case.features if not tables else 0)
        ]
        tables.extend(copies)
        bags = embedding_bags([Bag(table, ids.shape[2]) for table in tables])
        return lambda: bags(flat)

    tables: list[QuantizedRows] = []
    return look


ENGINES: dict[str, Callable[[Case, Content], Look]] = {
    OURS: ours,
    "fbgemm": fbgemm,
    "zentorch": zentorch,
    "torch": torch_bags,
}
BITS = {OURS: (8, 4, 2), "fbgemm": (8, 4, 2), "zentorch": (4,), "torch": (8, 4)}


def compare(case: Case, size: int, poolings: list[int], kinds: list[str], engines: list[str], rounds: int) -> Any:
    """Measures the engines on tables of one case.

    Args:
        case: The tables.
        size: Samples of a batch.
        poolings: Ids of a sample and table that are pooled.
        kinds: Kinds of ids.
        engines: Names of engines.
        rounds: Turns of each engine.

    Returns:
        {"features", "bits", "rows", "width", "table_gb": bytes of the tables by engine / 10^9, "huge_pages",
        "left_out": reason by engine, "lookups": [{"ids", "pooling", "million_per_second": median by engine,
        "ratio": over the best of the others}]}.
    """
    import torch

    torch.set_num_threads(1)
    content, left_out, opened = draw_content(case), dict[str, str](), dict[str, Look]()
    for name in engines:
        if case.bits not in BITS[name]:
            left_out[name] = f"has no bags of {case.bits} bits"
            continue
        with harness.leave_out(name, left_out):
            opened[name] = ENGINES[name](case, content)
    results = []
    for kind, pooling in itertools.product(kinds, poolings):
        batches, calls = draw_ids(kind, case, size, pooling), {}
        expected = content.floats(batches[0][:COMPARED]).sum(axis=2).reshape(COMPARED, -1)
        for name, look in list(opened.items()):
            with harness.leave_out(name, left_out):
                prepared = [look(ids) for ids in batches]
                _require_close(name, prepared[0](), expected, case, pooling)
                calls[name] = _in_order(itertools.cycle(prepared))
        count, times = size * case.features * pooling, harness.in_turn(calls, rounds)
        speeds = {name: harness.median([count / ms / 1e3 for ms in times[name]], 2) for name in times}
        row: dict[str, Any] = {"ids": kind, "pooling": pooling, "million_per_second": speeds}
        if OURS in times and len(times) > 1:
            best = max((name for name in times if name != OURS), key=lambda name: float(speeds[name]["median"]))
            row |= {"best": best, "ratio": harness.ratio(times[best], times[OURS])}
        results.append(row)
    sizes = {name: case.features * case.rows * _row_bytes(name, case) / 1e9 for name in opened}
    return {
        "features": case.features,
        "bits": case.bits,
        "rows": case.rows,
        "width": case.width,
        "huge_pages": case.huge_pages,
        "table_gb": {name: round(size, 2) for name, size in sizes.items()},
        "left_out": left_out,
        "lookups": results,
    }


def _in_order(prepared: Iterator[Callable[[], Any]]) -> Callable[[], Any]:
    return lambda: next(prepared)()


def _row_bytes(name: str, case: Case) -> int:
    return case.width + 8 if name == "torch" and case.bits == 8 else row_bytes(case.width, case.bits)


def _require_close(name: str, result: Any, expected: Array, case: Case, pooling: int) -> None:
    """Raises ZooError unless the first samples of a result are the sums of floats, to the rounding of the scales."""
    joined = (
        np.concatenate([np.asarray(part) for part in result], axis=1)
        if isinstance(result, list)
        else np.asarray(result)
    )
    error = float(np.abs(joined[: len(expected)] - expected).max())
    if not error <= 1e-3 * pooling:
        raise ZooError(f"{name} returns sums that differ by {error:.3g}")


def rendered(report: Mapping[str, Any], source: str) -> str:
    """Returns a report as a part of a page.

    Args:
        report: Content of the report.
        source: Machine and link of the report.
    """
    rows, names = [], [name for name in ENGINES if any(name in case["table_gb"] for case in report["tables"])]
    for case in report["tables"]:
        for row in case["lookups"]:
            speeds = row["million_per_second"]
            cells = [f"{speeds[name]['median']:.1f}" if name in speeds else "" for name in names]
            ratio = f"{row['ratio']:.2f}x {row['best']}" if "ratio" in row else ""
            rows.append([f"{case['features']}", f"{case['bits']}", row["ids"], f"{row['pooling']}", *cells, ratio])
    largest = max(size for case in report["tables"] for size in case["table_gb"].values())
    width = report["tables"][0]["width"]
    return (
        "Pooled rows of quantized embedding tables, million lookups a second, by "
        f"`scripts/peers/recommenders/tables.py` ({source}): tables of {width} columns, {largest:.1f} GB an engine, "
        f"batch size {report['environment']['batch_size']}, ids uniform or of Zipf's law with exponent {ZIPF}; "
        "the tables of zoo are in transparent huge pages, those of a peer in memory that its library allocates.\n\n"
        + markdown.table(["tables", "bits", "ids", "ids of a sample", *names, "over the best peer"], rows)
    )


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.numbers("--features", "26,200", "tables")
    parser.numbers("--pooling", "1,20", "ids of a sample and table")
    parser.numbers("--bits", "8,4,2", "bits of a code")
    parser.count("--width", 64, "columns of a table")
    parser.count("--gigabytes", 1, "10^9 bytes of the tables of an engine")
    parser.count("--batch-size", 512, "samples of a batch")
    parser.names("--ids", "kind of ids", KINDS)
    parser.names("--engines", "engine", ENGINES)
    parser.count("--rounds", 9, "turns of each engine")
    parser.add_argument("--huge-pages", action="store_true", help="tables of all engines in huge pages")


def measure(args: Any) -> dict[str, Any]:
    """Returns {"tables": [`compare`], "environment"}."""
    if wrong := [bits for bits in args.bits if bits not in BITS[OURS]]:
        raise RequestError(f"found --bits {wrong[0]}, expected 8, 4 or 2")
    if args.batch_size < COMPARED:
        raise RequestError(f"found --batch-size {args.batch_size}, expected {COMPARED} or more")
    cases = []
    for features, bits in itertools.product(args.features, args.bits):
        rows = max(args.gigabytes * 10**9 // (features * row_bytes(args.width, bits)), 1000)
        cases.append(Case(features, rows, args.width, bits, args.huge_pages))

    def one(case: Case) -> Any:
        arguments = (case, args.batch_size, args.pooling, args.ids, args.engines, args.rounds)
        return processes.on_one_core(compare, *arguments, cores={processes.last_core()})

    facts = harness.environment(*PACKAGES, rounds=args.rounds, batch_size=args.batch_size, zipf=ZIPF, clock="CPU time")
    return harness.gather("tables", cases, one, args.output, facts)
