"""Padded positions of texts: cut from samples, or left out of comparisons."""

import numpy as np
import pytest
from helpers.rewriting import model

from pipelines.graph import token_mask
from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibration.range_search import output_sqnr
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

LENGTHS = (3, 1, 4, 3, 5, 4, 1)


def texts(inputs="int64[b,t] input_ids, int64[b,t] attention_mask"):
    body = "a = Cast<to=1>(attention_mask) s = Unsqueeze(a, last) h = Gather(e, input_ids) y = Mul(h, s)"
    return model(f"({inputs}) => (float[b,t,4] y) {{ {body} }}", e=np.ones((9, 4), np.float32), last=np.int64([-1]))


def padded(lengths=LENGTHS, width=6):
    mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)
    ids = np.arange(len(lengths))[:, None] * 10 + np.arange(width)
    return {"input_ids": ids, "attention_mask": mask}


def test_texts_of_one_length_come_together_without_padding():
    batches = list(token_mask.Unpadded(texts(), [padded(), padded()]))
    assert [batch["attention_mask"].shape for batch in batches] == [(4, 1), (4, 3), (4, 4), (2, 5)]
    assert all(batch["attention_mask"].all() for batch in batches)
    np.testing.assert_array_equal(batches[1]["input_ids"], [[0, 1, 2], [30, 31, 32]] * 2)


@pytest.mark.parametrize(
    ("inputs", "change"),
    [
        ("int64[b,6] input_ids, int64[b,6] attention_mask", {}),  # a fixed number of tokens
        ("int64[7,t] input_ids, int64[7,t] attention_mask", {}),  # of samples
        ("int64[b,t] input_ids, int64[b,u] attention_mask", {}),  # of unlike axes
        ("int64[b,t] input_ids, int64[b,t] attention_mask, float[b,h,t,8] past", {"past": np.zeros((7, 2, 6, 8))}),
        ("int64[b,t] input_ids, int64[b,t] attention_mask", {"attention_mask": padded()["attention_mask"][:, ::-1]}),
        ("int64[b,t] input_ids, int64[b,t] attention_mask", {"attention_mask": 2 * padded()["attention_mask"]}),
        ("int64[b,t] input_ids, int64[b,t] attention_mask", {"attention_mask": 0 * padded()["attention_mask"]}),
    ],
)
def test_other_samples_stay_as_they_are(inputs, change):
    batch = padded() | change
    (only,) = token_mask.Unpadded(texts(inputs), [batch])
    assert only is batch


def test_results_at_padded_positions_are_zero():
    batch = padded()
    results = [np.ones((7, 6, 4), np.float32), np.ones((7, 6), np.float32), np.ones((7, 4), np.float32)]
    tokens, flat, pooled = token_mask.without_padding(batch, results, "attention_mask")
    assert tokens.sum() == 4 * sum(LENGTHS) and flat.sum() == sum(LENGTHS) and pooled.sum() == 28
    assert token_mask.without_padding(batch, results, None)[0] is results[0]


@pytest.mark.parametrize("width", ["t", "6"])
def test_padding_has_no_part_in_the_choice_of_ranges(width):
    """Half of the positions are padding, whose values are 20 times as large as those of tokens."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(40, 16)).astype(np.float32)
    table[0] *= 20
    network = model(
        f"(int64[b,{width}] input_ids, int64[b,{width}] attention_mask) => (float[b,{width},16] y)"
        "{ h = Gather(e, input_ids) g = MatMul(h, w) r = Relu(g) y = MatMul(r, v) }",
        e=table,
        w=rng.normal(size=(16, 16)).astype(np.float32),
        v=rng.normal(size=(16, 16)).astype(np.float32),
    )
    mask = (np.arange(6) < rng.integers(1, 7, (256, 1))).astype(np.int64)
    batch = {"input_ids": rng.integers(1, 40, (256, 6)) * mask, "attention_mask": mask}
    samples = list(token_mask.Unpadded(network, [batch]))
    recipe = QuantRecipe(quantize_tables=False)
    int8, _ = quantize(network, recipe, auto_calibrate(network, recipe, samples, 256, effort="default"))
    before, _ = quantize(network, recipe, auto_calibrate(network, recipe, [batch], 256, effort="fast"))
    assert output_sqnr(network, int8, [batch]) > (30 if width == "t" else output_sqnr(network, before, [batch]) - 1)
