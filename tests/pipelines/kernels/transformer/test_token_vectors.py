"""MaxSim in 8 bits: the same bits of all instruction sets, near float32, and files of vectors."""

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.transformer import token_vectors
from pipelines.kernels.transformer.token_vectors import TokenVectors

LENGTHS = [1, 2, 3, 7, 8, 9, 40, 150]


def vectors(rng, count, components):
    drawn = rng.standard_normal((count, components)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@pytest.fixture
def documents(rng):
    return [vectors(rng, count, 96) for count in LENGTHS]


@pytest.mark.parametrize("isa", extension.isas())
@pytest.mark.parametrize(("components", "tokens"), [(16, 1), (96, 32), (100, 20), (128, 64), (48, 33)])
def test_every_instruction_set_returns_the_bits_of_the_reference(rng, components, tokens, isa):
    documents = [vectors(rng, count, components) * np.float32(1 + count) for count in LENGTHS]
    packed, query = TokenVectors.of(documents), vectors(rng, tokens, components)
    query[1:2] = 0
    scores = packed.scores(query, isa=isa)
    assert scores.tobytes() == token_vectors.reference(packed, *token_vectors.quantize(query)).tobytes()
    exact = np.array([(query @ document.T).max(axis=1).sum() for document in documents])
    assert np.abs(scores - exact).max() < 0.01 * np.abs(exact).max()


def test_chosen_documents_and_threads(rng, documents):
    packed, query = TokenVectors.of(documents), vectors(rng, 12, 96)
    every = packed.scores(query)
    assert np.array_equal(packed.scores(query, threads=3), every)
    chosen = np.array([5, 0, 5])
    assert np.array_equal(packed.scores(query, chosen), every[chosen])
    assert packed.scores(query, np.zeros(0, np.int64)).shape == (0,)
    codes, scale = token_vectors.quantize(query)
    assert np.array_equal(token_vectors.reference(packed, codes, scale, chosen), every[chosen])


def test_groups_are_joined_and_files_read(tmp_path, rng, documents):
    packed = TokenVectors.joined([TokenVectors.of(documents[:3]), TokenVectors.of(documents[3:])])
    packed.save(tmp_path / "index.npz")
    read, query = TokenVectors.load(tmp_path / "index.npz"), vectors(rng, 5, 96)
    assert len(read) == len(LENGTHS) and read.components == 96
    assert np.array_equal(read.scores(query), TokenVectors.of(documents).scores(query))
    assert isinstance(read.codes.base, np.memmap) and isinstance(packed.codes, np.ndarray)
    arrays = {"codes": packed.codes, "scale": packed.scale, "first": packed.first}
    np.savez_compressed(tmp_path / "small.npz", version=1, components=96, **arrays)
    assert np.array_equal(TokenVectors.load(tmp_path / "small.npz").scores(query), read.scores(query))
    for rows, wanted in zip(read.vectors, documents, strict=True):
        assert np.abs(rows - wanted).max() < 0.002
    with pytest.raises(RequestError, match="cannot read vectors of tokens"):
        TokenVectors.load(tmp_path / "none.npz")
    content = (tmp_path / "index.npz").read_bytes()
    for damaged in (b"no file", content[: len(content) // 2], content.replace(b"'descr': '|u1'", b"'descr': '|i1'")):
        (tmp_path / "other.npz").write_bytes(damaged)
        with pytest.raises(RequestError, match="cannot read vectors of tokens"):
            TokenVectors.load(tmp_path / "other.npz")
    np.savez(
        tmp_path / "other.npz", version=1, components=96, codes=packed.codes, scale=packed.scale[1:], first=packed.first
    )
    with pytest.raises(RequestError, match="damaged or of another version"):
        TokenVectors.load(tmp_path / "other.npz")


def test_refusals(rng, documents):
    packed = TokenVectors.of(documents)
    for wrong in ([], [documents[0], documents[1][:, :8]], [documents[0], documents[1][:0]]):
        with pytest.raises(RequestError, match="expected one or more, with vectors of one size"):
            TokenVectors.of(wrong)
    with pytest.raises(RequestError, match=r"expected \[tokens, 96\]"):
        packed.scores(vectors(rng, 3, 80))
    with pytest.raises(RequestError, match="expected 0 to 7"):
        packed.scores(documents[0], np.array([8]))
    with pytest.raises(RequestError, match="NaN or infinity"):
        packed.scores(documents[0] * np.float32(np.nan))
