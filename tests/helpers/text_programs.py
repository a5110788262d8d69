"""Random texts for the native text encoder, and what its results must equal."""

import numpy as np

from pipelines.engines.native.texts import NativeTexts
from pipelines.kernels import extension
from pipelines.kernels.transformer.text import reference


def tokens(rng, program, lengths):
    """(tokens, types, lengths) of random texts."""
    total = int(sum(lengths))
    ids = rng.integers(0, 64, total).astype(np.int32)
    return ids, rng.integers(0, program.types, total).astype(np.int32), np.array(lengths, np.int64)


def check_reference(rng, path, program, lengths):
    """The file's results are the bits of the reference, text by text, on every instruction set."""
    ids, types, lengths = tokens(rng, program, lengths)
    ends = np.cumsum(lengths)
    expected = [reference.compute(program, ids[a:b], types[a:b]) for a, b in zip(ends - lengths, ends, strict=True)]
    for isa in extension.isas():
        vectors = NativeTexts(path, isa=isa).compute(ids, types, lengths)
        assert np.array_equal(vectors, np.concatenate([np.atleast_2d(vector) for vector in expected])), isa
        assert np.ptp(vectors) > 0


def check_independence(rng, path, program, threads):
    """A text's result depends neither on the texts beside it nor on their order or the number of threads."""
    native = NativeTexts(path)
    ids, types, lengths = tokens(rng, program, rng.integers(1, 70, 40))
    together = native.compute(ids, types, lengths)
    several = NativeTexts(path, threads)
    assert np.array_equal(several.compute(ids, types, lengths), together)
    ends = np.cumsum(lengths)
    places = [np.arange(a, b) for a, b in zip(ends - lengths, ends, strict=True)]
    for i, place in enumerate(places[:8]):
        for encoder in (native, several):  # several threads share the rows of one text
            assert np.array_equal(encoder.compute(ids[place], types[place], lengths[i : i + 1])[0], together[i])
    back = np.concatenate(places[::-1])
    assert np.array_equal(native.compute(ids[back], types[back], lengths[::-1])[::-1], together)
