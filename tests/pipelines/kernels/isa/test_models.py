"""The models of AVX-VNNI and AVX-VNNI-INT8 in instructions of AVX2: their kernels have the bits of the references on any CPU."""

import os
import types

import numpy as np
import pytest
from helpers.click_layers import check_dense, dense

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.images import native as images
from pipelines.kernels.images import reference
from pipelines.kernels.images.program import ImageProgram
from pipelines.kernels.images.steps import Convolution, Dequantize, Pixels
from pipelines.kernels.recommenders.tables import embedding_bags
from pipelines.kernels.recommenders.tables.embedding_bags import Bag
from pipelines.kernels.recommenders.tables.quantized_rows import quantize
from pipelines.kernels.transformer import token_vectors
from pipelines.kernels.transformer.token_vectors import TokenVectors
from zoo.recommenders.retrieval.index import top_k

MODELS = [isa.name for isa in extension.instruction_sets() if isa.supported and not isa.listed]
pytestmark = pytest.mark.skipif(not MODELS, reason="built without ZOO_MODELS, or a CPU without AVX2")


@pytest.mark.parametrize("isa", MODELS)
def test_models_return_the_bits_of_the_references(rng, isa):
    check_dense(dense(rng, 70, 50), isa, rng.integers(0, 256, (9, 70), np.uint8))
    queries, items = (rng.integers(-127, 128, (rows, 70)).astype(np.int8) for rows in (3, 30))
    results = extension.native().top_k(queries, items, 5, isa)
    assert all(np.array_equal(*pair) for pair in zip(results, top_k(queries, items, 5), strict=True))
    bag, ids = Bag(quantize(rng.normal(0, 0.1, (50, 24)).astype(np.float32), 4), 3), rng.integers(0, 50, (9, 3))
    expected = embedding_bags.pooled([bag], ids)
    assert embedding_bags.embedding_bags([bag], isa)(ids).tobytes() == expected.tobytes()
    texts, query = (rng.standard_normal((20, 32)).astype(np.float32) for _ in range(2))
    packed = TokenVectors.of([texts])
    expected = token_vectors.reference(packed, *token_vectors.quantize(query))
    assert packed.scores(query, isa=isa).tobytes() == expected.tobytes()


def convolution(rng, x, out, weight, **more):
    """A convolution whose bytes are spread over their range."""
    weight, outputs = rng.integers(-127, 128, weight).astype(np.int8), weight[0]
    scale = np.full(outputs, 60 / (128 * 74 * np.sqrt(weight[0].size)), np.float32)
    return Convolution(x, out, weight, rng.integers(-9999, 9999, outputs).astype(np.int32), scale, zero=90, **more)


@pytest.mark.parametrize("isa", MODELS)
def test_models_compute_dense_and_depthwise_convolutions(rng, isa):
    pads = {"pads": (1, 1, 1, 1)}
    steps = (
        Pixels(0),
        convolution(rng, 0, 1, (48, 3, 3, 3), **pads),
        convolution(rng, 1, 2, (48, 3, 3, 1), groups=48, **pads),
        convolution(rng, 2, 3, (10, 1, 1, 48)),
        Dequantize(3, 0.25, 3),
    )
    shapes = tuple((5, 7, channels) for channels in (3, 48, 48, 10))
    network = ImageProgram("image", ("out",), "uint8", (3, 5, 7), shapes, steps, (5 * 7 * 10,))
    samples = rng.integers(0, 256, (2, 3, 5, 7), dtype=np.uint8)
    expected = np.stack([reference.run(network, sample) for sample in samples])
    assert np.array_equal(images.pack(network, isa).open()(samples), expected)


def test_models_are_used_where_they_are_named_alone(monkeypatch):
    monkeypatch.delenv("ZOO_ISA", raising=False)
    assert not set(MODELS) & set(extension.isas())
    monkeypatch.setenv("ZOO_ISA", MODELS[0])
    assert extension.isas()[0] == MODELS[0] and extension.has_vnni()


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("ZOO_ISA", "avx10")
    with pytest.raises(
        RequestError, match="found ZOO_ISA=avx10, expected an instruction set of this CPU and build: .*portable"
    ):
        extension.isas()


def test_kernels_that_this_cpu_cannot_run_are_missing(monkeypatch):
    """Those that `make run` built on a machine with another CPU."""
    module = types.ModuleType("_native")
    module.instruction_sets = lambda: [("avx512", "AVX-512 VNNI", True, False, True)]
    monkeypatch.setattr(extension, "_built", lambda: module)
    assert extension.native() is None and extension.isas() == []
    assert "CPU of another machine; run in the repository: pip install" in extension.missing()


def test_the_cap_excludes_the_sets_above(monkeypatch):
    isas = extension.isas()
    for place, name in enumerate(isas):
        monkeypatch.setenv("ZOO_ISA", name)
        assert extension.isas() == isas[place:]
    assert os.environ["ZOO_ISA"] == "portable" and not extension.has_vnni()
