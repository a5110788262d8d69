"""Image networks in native code: every instruction set and any number of threads return the reference's bits."""

from __future__ import annotations

import dataclasses
import os
import resource
import tracemalloc
from typing import Any

import numpy as np
import pytest
from helpers.image_programs import program, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.images import native
from pipelines.kernels.images.operators import windows
from pipelines.kernels.images.steps import (
    Addition,
    AveragePool,
    Concatenation,
    Convolution,
    Dequantize,
    GlobalAverage,
    Lookup,
    MaxPool,
    Pixels,
    Product,
    Resampling,
    Selection,
    Stacking,
    Sum,
)

pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")


def random_convolution(
    rng: np.random.Generator, x: int, out: int, outputs: int, kernel: tuple[int, int], inputs: int, **more: Any
) -> Convolution:
    """A convolution whose bytes are spread over their range."""
    weight = rng.integers(-127, 128, (outputs, *kernel, inputs)).astype(np.int8)
    weight[16 * rng.integers(3) :] //= 2  # 7 bits, which kernels may compute otherwise: all outputs, some or few
    spread = 128 * 74 * np.sqrt(weight[0].size)
    scale = (rng.uniform(0.5, 1.5, outputs) * 60 / spread).astype(np.float32)
    bias = rng.integers(-int(spread), int(spread), outputs).astype(np.int32)
    return Convolution(x, out, weight, bias, scale, **more)


@pytest.mark.parametrize("last", [False, True])
def test_a_part_reads_several_inputs_and_returns_floats(last: bool) -> None:
    """Quantized and as floats, behind each other in a sample; floats and bytes are results."""
    steps = [Pixels(0, (), last, 0.02, 120), Pixels(1, (), last, 0.0, 0, 60), Dequantize(1, 1.0, 0, not last)]
    steps.append(Dequantize(0, 0.02, 120, last))
    inputs = (("a", (3, 4, 5)), ("b", (17, 2, 3)))
    net = program((162,), [(3, 4, 5), (17, 2, 3)], steps, 162, dtype="float32", inputs=inputs, floats=frozenset([1]))
    same_bits(net, np.random.default_rng(0).normal(0, 1, (3, 162)).astype(np.float32))
    for wrong in (Pixels(1, (), last, 0.0, 0, 61), Pixels(1, (1,), last, 0.0, 0, 60), Pixels(1, (), last, 1.0, 0, 60)):
        with pytest.raises(RequestError, match="do not fit"):
            dataclasses.replace(net, steps=(steps[0], wrong, *steps[2:]))


@pytest.mark.parametrize("floats", [False, True])
def test_pixels_are_stacked(floats: bool) -> None:
    tensors = [(3, 4, 3), (2, 2, 3), (16, 1, 3)]
    scale = 0.0 if floats else 0.02
    steps = [
        Pixels(0, (), True, scale),
        Pixels(1, (), False, scale, 0, 36),
        Stacking((0, 1), 2),
        Dequantize(2, 0.02, 0),
    ]
    numbers = frozenset(range(3)) if floats else frozenset[int]()
    inputs = (("a", (3, 4, 3)), ("b", (3, 2, 2)))
    net = program((48,), tensors, steps, 48, dtype="float32", inputs=inputs, floats=numbers)
    same_bits(net, np.random.default_rng(0).normal(0, 2, (2, 48)).astype(np.float32))
    with pytest.raises(RequestError, match="do not fit"):
        dataclasses.replace(net, tensors=(*tensors[:2], (8, 2, 3)))


@given(st.data())
def test_a_convolution_of_any_shape(data: st.DataObject) -> None:
    """Odd sizes, 1 to 9 channels a group, any pads, strides, dilations and groups; a sum and a table behind."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rng = np.random.default_rng(draw(0, 2**32))
    groups = data.draw(st.sampled_from([1, 1, 1, 2, 3, 5, 17]))
    inputs, filters = draw(1, 9), draw(1, 9) if data.draw(st.booleans()) else draw(17, 90)
    if groups > 1 and data.draw(st.booleans()):
        inputs = filters = 1  # depthwise
    shape = draw(1, 9), draw(1, 9)
    kernel = (3, 3) if data.draw(st.booleans()) else (draw(1, 5), draw(1, 5))
    strides, dilations = (draw(1, 3), draw(1, 3)), (draw(1, 2), draw(1, 2))
    pads = (draw(0, 3), draw(0, 3), draw(0, 3), draw(0, 3))
    counts = windows(shape, kernel, strides, pads, dilations)
    if min(counts) < 1 or groups * filters > 200:
        return
    before, outputs = groups * inputs, groups * filters
    low, high = data.draw(st.sampled_from([(0, 255), (7, 255), (0, 200), (7, 90)]))
    fields = {"strides": strides, "pads": pads, "dilations": dilations, "groups": groups, "fill": draw(0, 255)}
    clip: dict[str, Any] = {"zero": data.draw(st.sampled_from([0, 3, 130, 255])), "low": low, "high": high}
    clip["table"] = rng.integers(0, 256, 256, dtype=np.uint8) if data.draw(st.booleans()) else None
    steps: list[Any] = [Pixels(0)]
    tensors = [(*shape, before), (*counts, outputs)]
    if data.draw(st.booleans()) and (inputs, filters) != (1, 1):
        tensors += [(*counts, outputs)]
        total = Sum(0.7, float(rng.uniform(0.2, 2)), float(rng.uniform(-90, 20)), draw(0, 9), draw(99, 255))
        sums = {"sum": total, "other": 1, "other_first": data.draw(st.booleans())}
        steps += [random_convolution(rng, 0, 1, outputs, kernel, inputs, **fields)]
        steps += [random_convolution(rng, 0, 2, outputs, kernel, inputs, **fields, **clip, **sums)]
    else:
        steps += [random_convolution(rng, 0, 1, outputs, kernel, inputs, **fields, **clip)]
    steps += [Dequantize(len(tensors) - 1, 0.25, 3, last=data.draw(st.booleans()))]
    net = program((before, *shape), tensors, steps, counts[0] * counts[1] * outputs)
    same_bits(net, rng.integers(0, 256, (3, before, *shape), dtype=np.uint8))


@pytest.mark.parametrize(
    ("width", "outputs"), [(17, 16), (31, 32), (13, 48), (19, 64), (11, 80), (300, 24), (7, 144), (5, 200)]
)
def test_every_width_of_a_panel_and_any_number_of_pixels(width: int, outputs: int) -> None:
    """All tile heights and panel widths, more pixels than are listed at a time, and floats at the end."""
    rng = np.random.default_rng(width)
    steps = [
        Pixels(0, (133,)),
        random_convolution(rng, 0, 1, outputs, (3, 3), 4, strides=(1, 1), pads=(1, 1, 1, 1), fill=114),
        random_convolution(rng, 1, 2, outputs, (3, 3), 1, groups=outputs, pads=(1, 1, 1, 1), strides=(1, 2)),
        random_convolution(rng, 2, 3, outputs, (1, 1), outputs, zero=90),
        GlobalAverage(3, 4, 90, 0.03, 5),
        random_convolution(rng, 4, -1, 10, (1, 1), outputs),
    ]
    half = (width - 1) // 2 + 1
    tensors = [(4, width, 4), (4, width, outputs), (4, half, outputs), (4, half, outputs), (1, 1, outputs)]
    same_bits(program((3, 4, width), tensors, steps, 10), rng.integers(0, 256, (2, 3, 4, width), dtype=np.uint8))


def test_layers_of_many_weights_take_several_samples_together() -> None:
    """More weights than pixels, then fewer, then more again, a sum and results of several pixels among them."""
    rng = np.random.default_rng(7)
    total = Sum(0.7, 0.9, -40.0, 0, 255)
    steps = [
        Pixels(0),
        random_convolution(rng, 0, 1, 144, (3, 3), 3, pads=(1, 1, 1, 1), fill=7),
        random_convolution(rng, 1, 2, 16, (1, 1), 144),
        random_convolution(rng, 2, 3, 144, (3, 3), 16, pads=(1, 1, 1, 1), fill=0, sum=total, other=1),
        random_convolution(rng, 3, 4, 16, (1, 1), 144, strides=(2, 2)),
        random_convolution(rng, 4, 5, 200, (3, 3), 16, pads=(1, 1, 1, 1), fill=3),
        random_convolution(rng, 5, -1, 90, (1, 1), 200),
    ]
    tensors = [(3, 5, 3), (3, 5, 144), (3, 5, 16), (3, 5, 144), (2, 3, 16), (2, 3, 200)]
    net = program((3, 3, 5), tensors, steps, 2 * 3 * 90)
    for n in (1, 2, 8, 9, 19):
        same_bits(net, rng.integers(0, 256, (n, 3, 3, 5), dtype=np.uint8))


@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (1, 7)])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("channels", [16, 32, 40, 96, 144])
def test_depthwise(kernel: tuple[int, int], stride: int, channels: int) -> None:
    rng = np.random.default_rng(channels)
    pads = (kernel[0] // 2, kernel[1] // 2, kernel[0] // 2, kernel[1] // 2)
    counts = windows((9, 11), kernel, (stride, stride), pads)
    fields = {"groups": channels, "pads": pads, "strides": (stride, stride), "fill": 9, "zero": 4, "high": 240}
    steps = [
        Pixels(0),
        random_convolution(rng, 0, 1, channels, kernel, 1, **fields),
        random_convolution(rng, 1, -1, 3, counts, channels),
    ]
    net = program((channels, 9, 11), [(9, 11, channels), (*counts, channels)], steps, 3)
    same_bits(net, rng.integers(0, 256, (1, channels, 9, 11), dtype=np.uint8))


@pytest.mark.parametrize("shape", [(17, 16, 64), (2, 300, 80), (300, 2, 16)])
def test_means_of_more_pixels_than_words_add_up(shape: tuple[int, int, int]) -> None:
    steps = [Pixels(0, last=True), GlobalAverage(0, 1, 100, 1 / shape[0] / shape[1], 120), Dequantize(1, 0.25, 3)]
    net = program(shape, [shape, (1, 1, shape[2])], steps, shape[2])
    samples = np.random.default_rng(1).integers(0, 256, (2, *shape), dtype=np.uint8)
    samples[1] = 255
    same_bits(net, samples)


@pytest.mark.parametrize("channels", [16, 30, 64, 144, 208])
@pytest.mark.parametrize(("scale", "bounds"), [(0.9, ()), (1e-12, ()), (0.9, (7, 200))])
def test_products_by_one_pixel(channels: int, scale: float, bounds: tuple[int, ...]) -> None:
    rng = np.random.default_rng(channels)
    shape, size = (5, 13, channels), 5 * 13 * channels
    steps = [
        Pixels(0, (), True),
        Pixels(1, (), True, 0.0, 0, size),
        Product(0, 1, 2, 11, 90, 0.03, 0.1, 0.003 * scale, 120, *bounds),
        Dequantize(2, 0.5, 3),
    ]
    inputs = (("x", shape), ("gate", (1, 1, channels)))
    net = program((size + channels,), [shape, (1, 1, channels), shape], steps, size, inputs=inputs)
    same_bits(net, rng.integers(0, 256, (2, size + channels), dtype=np.uint8))


@settings(max_examples=25)
@given(st.data())
def test_pools_sums_lookups_and_concatenations(data: st.DataObject) -> None:
    """Two branches over pools, summed, looked up and concatenated."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rng = np.random.default_rng(draw(0, 2**32))
    channels, shape = draw(1, 40), (draw(3, 9), draw(3, 9))
    kernel, strides = (draw(1, 3), draw(1, 3)), (draw(1, 2), draw(1, 2))
    pads = tuple(draw(0, size - 1) for size in (*kernel, *kernel))
    counts = windows(shape, kernel, strides, pads)
    scale, x_scale = (float(np.float32(rng.uniform(0.01, 0.05))) for _ in range(2))
    if draw(0, 1):
        chosen = tuple(range(draw(0, channels), 2 * channels))
    else:
        chosen = tuple(draw(0, 2 * channels - 1) for _ in range(draw(1, 40)))
    pooled = [*[(*counts, channels)] * 4, (*counts, 2 * channels), *[(*counts, len(chosen))] * 2]
    steps = [
        Pixels(0, last=True, scale=0.5, zero=draw(0, 255)),
        MaxPool(0, 1, kernel, strides, pads),
        AveragePool(
            0,
            2,
            kernel,
            strides,
            pads,
            x_scale,
            draw(0, 255),
            data.draw(st.sampled_from([scale, x_scale])),
            draw(0, 255),
            padded=draw(0, 1) == 1,
        ),
        Addition(1, 2, 3, Sum(0.3, 0.9, -10.5, draw(0, 9), draw(90, 255))),
        Lookup(3, 4, rng.integers(0, 256, 256, dtype=np.uint8)),
        Concatenation((4, 1), 5),
        Selection(5, 6, chosen),
        Lookup(6, 7, rng.integers(0, 256, (len(chosen), 256), dtype=np.uint8)),
        Dequantize(7, 0.1, draw(0, 255)),
    ]
    tensors = [(*shape, channels), *pooled]
    net = program((*shape, channels), tensors, steps, int(np.prod(pooled[-1])), dtype="float32")
    samples = rng.normal(0, 60, (2, *shape, channels)).astype(np.float32)
    samples.ravel()[:3] = np.nan, np.inf, -np.inf
    same_bits(net, samples)


@pytest.mark.parametrize("scale", [0.1, 0.018658448, 1.9999999, 7.0, 3e-30, 2.0**-70, 2.0**70])
def test_codes_of_pixels_near_the_middle_between_two(scale: float) -> None:
    """Quotients that round to a tie or just beside it, and values that no byte or no quotient holds."""
    ties = (np.arange(-300, 300, dtype=np.float32) + np.float32(0.5)) * np.float32(scale)
    beside = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    most = np.finfo(np.float32).max
    odd = np.array([np.nan, np.inf, -np.inf, most, -most, 1e-45, -1e-45, -0.0], np.float32)
    sample = np.concatenate([ties, *beside, np.resize(odd, 24)]).reshape(1, 4, 456, 1)
    shape = sample.shape[1:]
    steps = [Pixels(0, last=True, scale=float(np.float32(scale)), zero=113), Dequantize(0, 1.0, 0)]
    same_bits(program(shape, [shape], steps, sample.size, dtype="float32"), sample)


@pytest.mark.parametrize("tabled", [True, False])
def test_tables_of_the_channels_of_pixels(tabled: bool) -> None:
    """Three channels, which take four bytes a pixel, and results of more pixels than are written at a time."""
    rng = np.random.default_rng(2)
    table = rng.normal(0, 1, 256).astype(np.float32) if tabled else None
    lookup = Lookup(0, 1, rng.integers(0, 256, (3, 256), dtype=np.uint8))
    net = program((3, 9, 40), [(9, 40, 3)] * 2, [Pixels(0), lookup, Dequantize(1, 0.1, 7, table=table)], 9 * 40 * 3)
    same_bits(net, rng.integers(0, 256, (2, 3, 9, 40), dtype=np.uint8))


def test_what_does_not_fit_is_refused() -> None:
    rng = np.random.default_rng(0)
    layer = random_convolution(rng, 0, -1, 3, (2, 2), 3)
    with pytest.raises(RequestError, match="do not fit"):
        program((3, 2, 2), [(2, 3, 3)], [Pixels(0), layer], 3)
    with pytest.raises(RequestError, match="no step before it writes"):
        program((3, 2, 2), [(2, 2, 3)], [Pixels(0), Addition(0, 1, 0, Sum(1, 1, 0)), layer], 3)
    with pytest.raises(RequestError, match="overflow"):
        large = Convolution(0, -1, layer.weight, np.full(3, 2**31 - 1, np.int32), layer.scale)
        program((3, 2, 2), [(2, 2, 3)], [Pixels(0), large], 3)
    network = native.pack(program((3, 2, 2), [(2, 2, 3)], [Pixels(0), layer], 3)).open()
    assert network(np.zeros((0, 3, 2, 2), np.uint8)).shape == (0, 3)
    with pytest.raises((TypeError, ValueError)):
        network(np.zeros((1, 3, 2, 2), np.float32))
    with pytest.raises(ValueError, match="another size"):
        network(np.zeros((1, 3, 2, 3), np.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        network.tensor(1, 1, 3, 4), network.lookup(0, 1, np.zeros(256, np.uint8))


def test_the_limit_of_products_is_more_than_any_network_reaches() -> None:
    """Every instruction set has one, and vectors make more than plain C++."""
    limits = {isa: native.product_limit(isa) for isa in extension.isas()}
    assert min(limits.values()) > 0.01
    assert min(limits, key=limits.__getitem__) == "portable"


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer touches pages of its own")
def test_a_call_touches_no_page_for_the_first_time() -> None:
    """Also with many threads, and after calls of another network."""
    rng = np.random.default_rng(0)

    def network(size: int) -> Any:
        layer = random_convolution(rng, 1, 2, 64, (3, 3), 64, pads=(1, 1, 1, 1))
        steps = [Pixels(0), random_convolution(rng, 0, 1, 64, (1, 1), 3), layer]
        shapes = [(size, size, 3), (size, size, 64), (size, size, 64), (1, 1, 64)]
        steps += [GlobalAverage(2, 3, 0, 0.001, 0), Dequantize(3, 0.1, 0)]
        return native.pack(program((3, size, size), shapes, steps, 64)).open()

    opened = [(network(size), rng.integers(0, 256, (17, 3, size, size), dtype=np.uint8)) for size in (96, 48)]

    def calls() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for threads in (8, 1):
            for net, samples in opened:
                net(samples, threads)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for _ in range(3):
        calls()
    page = resource.getpagesize()
    assert opened[0][0].arena > 256 * page
    assert min(calls() for _ in range(5)) < opened[1][0].arena / page  # those of threads that begin, not of one arena


@settings(max_examples=30)
@given(st.data())
def test_maps_made_larger_and_several_results(data: st.DataObject) -> None:
    """Any rows and columns in any order, odd numbers of channels, results of tensors that steps before the last wrote."""
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rng = np.random.default_rng(draw(0, 2**32))
    height, width, channels = draw(1, 7), draw(1, 7), draw(1, 70)
    rows, columns = (sorted(rng.integers(0, size, draw(1, 15)).tolist()) for size in (height, width))
    steps = [
        Pixels(0),
        random_convolution(rng, 0, 1, channels, (1, 1), 3),
        Resampling(1, 2, tuple(rows), tuple(columns)),
        random_convolution(rng, 2, 3, 9, (3, 3), channels, pads=(1, 1, 1, 1), fill=3),
        Dequantize(3, 0.25, 3, last=data.draw(st.booleans())),
        Dequantize(1, 0.5, 128),
        Dequantize(2, 2.0, 0),
    ]
    larger = len(rows), len(columns)
    tensors = [(height, width, 3), (height, width, channels), (*larger, channels), (*larger, 9)]
    results = [len(rows) * len(columns) * 9, height * width * channels, len(rows) * len(columns) * channels]
    parts = tuple((f"part{index}", (size,), "float32") for index, size in enumerate(results))
    net = program((3, height, width), tensors, steps, sum(results), parts=parts)
    same_bits(net, rng.integers(0, 256, (3, 3, height, width), dtype=np.uint8))


def test_results_that_do_not_fit() -> None:
    steps = [Pixels(0), Resampling(0, 1, (0, 1), (1,)), Dequantize(1, 0.5, 0)]
    tensors = [(2, 2, 3), (2, 1, 3)]
    program((3, 2, 2), tensors, steps, 6)
    for wrong, results, more in (
        ([steps[0], Resampling(0, 1, (0, 2), (1,)), steps[2]], 6, {}),
        ([steps[0], Resampling(0, 1, (0,), (1,)), steps[2]], 6, {}),
        ([*steps, Resampling(0, 1, (0, 1), (1,))], 6, {}),
        (steps, 7, {}),
        ([*steps, Dequantize(0, 0.5, 0)], 6, {}),
        (steps, 6, {"parts": (("a", (5,), "float32"),)}),
        (steps, 6, {"remainder": b"model"}),
    ):
        with pytest.raises(RequestError, match="do not fit|no new one"):
            program((3, 2, 2), tensors, wrong, results, **more)


def test_the_bound_of_sums_takes_no_wide_copy_of_the_weights():
    weight = np.full((64, 3, 3, 64), -128, np.int8)
    layer = Convolution(0, 1, weight, np.zeros(64, np.int32), np.ones(64, np.float32))
    tracemalloc.start()
    try:
        sums = layer.largest_sums
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (sums == 255 * 128 * 9 * 64).all() and peak < 4 * weight.nbytes
