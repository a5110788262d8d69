"""Non-maximum suppression, decoding of boxes, masks and run lengths, against torch and by hand."""

import time
from typing import Any

import numpy as np
import pytest

from pipelines.core.errors import ZooError
from zoo.vision.networks import boxes, masks
from zoo.vision.networks.heads import EmbeddingHead
from zoo.vision.networks.transforms import Placement


def boxes_of(rng: np.random.Generator, count: int, side: float = 640) -> Any:
    corner = rng.uniform(0, side * 0.9, (count, 2))
    return np.concatenate([corner, corner + rng.uniform(0, side * 0.3, (count, 2))], axis=1).astype(np.float32)


def reference(found: Any, scores: Any, classes: Any, iou: float) -> list[int]:
    """torchvision's `batched_nms` box by box, in torch."""
    torch = pytest.importorskip("torch", reason="needs the train extra")
    place, score = torch.from_numpy(found), torch.from_numpy(scores)
    kept: list[int] = []
    for i in torch.sort(score, descending=True, stable=True).indices.tolist():
        for k in kept:
            if classes[i] != classes[k]:
                continue
            low, high = torch.maximum(place[i, :2], place[k, :2]), torch.minimum(place[i, 2:], place[k, 2:])
            shared = (high - low).clamp(min=0).prod()
            areas = [(place[j, 2:] - place[j, :2]).prod() for j in (k, i)]
            if shared / (areas[0] + areas[1] - shared) > iou:
                break
        else:
            kept.append(i)
    return kept


@pytest.mark.parametrize("iou", [0.0, 0.45, 0.7, 1.0])
def test_suppression_is_that_of_torchvision(rng: np.random.Generator, iou: float) -> None:
    corners, classes = boxes_of(rng, 120), rng.integers(0, 3, 120)
    scores = rng.integers(0, 20, 120).astype(np.float32) / 20  # with equal ones
    assert boxes.suppress(corners, scores, classes, iou).tolist() == reference(corners, scores, classes, iou)


def test_suppression_of_boxes_without_area_and_of_none() -> None:
    point = np.zeros((3, 4), np.float32)
    assert boxes.suppress(point, np.ones(3, np.float32), np.zeros(3, np.int64), 0.5).tolist() == [0, 1, 2]
    assert not len(boxes.suppress(point[:0], np.ones(0, np.float32), np.zeros(0, np.int64), 0.5))


def test_all_anchors_are_suppressed_in_little_time(rng: np.random.Generator) -> None:
    corners, scores = boxes_of(rng, 8400), rng.uniform(0.3, 1, 8400).astype(np.float32)
    start = time.thread_time()
    kept = boxes.suppress(corners, scores, rng.integers(0, 80, 8400), 0.7)
    assert len(kept) == boxes.MAX_DETECTIONS and time.thread_time() - start < 1


def test_dense_rows_with_and_without_objectness(rng: np.random.Generator) -> None:
    rows = np.concatenate([boxes_of(rng, 60), rng.uniform(0, 1, (60, 3)), rng.normal(size=(60, 2))], 1).astype(
        np.float32
    )
    best = rows[:, 4:7].max(axis=1)
    detections = boxes.dense(rows, 2, False, 0.6, 1.0)
    order = np.argsort(-best, kind="stable")[: (best > 0.6).sum()]
    assert np.array_equal(detections.scores, best[order]) and np.array_equal(detections.extra, rows[order, 7:])
    assert np.array_equal(detections.classes, rows[order, 4:7].argmax(axis=1))
    np.testing.assert_allclose(detections.boxes[:, :2] + detections.boxes[:, 2:], 2 * rows[order, :2], rtol=1e-5)
    np.testing.assert_allclose(
        detections.boxes[:, 2:] - detections.boxes[:, :2], rows[order, 2:4], rtol=1e-3, atol=1e-3
    )
    objects = boxes.dense(rows, 2, True, 0.3, 1.0)  # the first score is the objectness
    products = rows[:, 4] * rows[:, 5:7].max(axis=1)
    assert np.array_equal(objects.scores, np.sort(products[products > 0.3])[::-1])


def test_queries_of_several_classes_and_of_one() -> None:
    places = np.array([[0.5, 0.5, 0.2, 0.4], [0.25, 0.25, 0.1, 0.1]], np.float32)
    scores = np.array([[0.9, 0.8, 0.1], [0.2, 0.3, 0.7]], np.float32)
    several = boxes.queries(places, scores, (100, 200), 0.5, True)
    assert several.classes.tolist() == [0, 1]  # as many as queries
    assert several.boxes[1].tolist() == pytest.approx([80, 30, 120, 70])
    single = boxes.queries(places, scores, (100, 200), 0.5, False)
    assert single.classes.tolist() == [0, 2] and single.scores.tolist() == pytest.approx([0.9, 0.7])


LETTERBOX = Placement(200, 100, (0.32, 0.32), (0, 16), (64, 64))
STRETCHED = Placement(90, 50, (64 / 90, 64 / 50), (0, 0), (64, 64))


@pytest.mark.parametrize("place", [LETTERBOX, STRETCHED], ids=["letterbox", "stretched"])
def test_feature_maps_are_interpolated_as_by_torch(rng: np.random.Generator, place: Placement) -> None:
    torch = pytest.importorskip("torch", reason="needs the train extra")
    values = rng.normal(size=(5, 16, 16)).astype(np.float32)
    inner = values[:, 4:12] if place is LETTERBOX else values
    size = (place.height, place.width)
    expected = torch.nn.functional.interpolate(torch.from_numpy(inner[None]), size, mode="bilinear")[0].numpy()
    resized = masks.resampled(values, place, (0, place.height), (0, place.width))
    np.testing.assert_allclose(resized, expected, atol=1e-5)
    assert np.array_equal(masks.class_map(values, place), expected.argmax(axis=0))
    assert np.array_equal(masks.class_map(values.argmax(axis=0), place).shape, size)


def test_tiles_of_a_class_map_leave_no_class_out(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    smooth = np.cumsum(np.cumsum(rng.normal(size=(12, 32, 40)), axis=1), axis=2).astype(np.float32)
    place = Placement(150, 120, (160 / 150, 128 / 120), (0, 0), (128, 160))
    whole = masks.resampled(smooth, place, (0, 120), (0, 150)).argmax(axis=0)
    for tile in (1, 5, 64):
        monkeypatch.setattr(masks, "TILE", tile)
        assert np.array_equal(masks.class_map(smooth, place), whole)


def test_masks_of_prototypes_stay_within_their_boxes(rng: np.random.Generator) -> None:
    prototypes = np.stack([np.ones((16, 16)), rng.normal(size=(16, 16))]).astype(np.float32)
    box = np.array([[20.5, 10, 60, 40.2], [0, 0, 0, 0]], np.float32)
    full, none = masks.of_prototypes(prototypes, np.array([[1, 0], [1, 0]], np.float32), box, LETTERBOX)
    assert full.shape == (100, 200) and full[10:41, 21:60].all() and full.sum() == 31 * 39 and not none.any()
    (part,) = masks.of_prototypes(prototypes, np.array([[0, 1]], np.float32), box[:1], LETTERBOX)
    logits = masks.resampled(prototypes[1:], LETTERBOX, (0, 100), (0, 200))[0]
    assert np.array_equal(part, (logits > 0) & full)


@pytest.mark.parametrize("reading", ["classes", "objectness", "selected", "queries", "listed", "map", "embedding"])
def test_nan_is_no_empty_result(reading: str) -> None:
    """Of YOLOv5 and YOLOE in float16, which overflows: there were no detections instead of an error."""
    rows = np.full((3, 7), 0.5, np.float32)
    rows[1, 4] = np.nan
    places, scores, classes = rows[:, :4], rows[:, 4:], np.zeros(3, np.int64)
    compute = {
        "classes": lambda: boxes.dense(rows, 0, False, 0.25, 0.7),
        "objectness": lambda: boxes.dense(rows, 0, True, 0.25, 0.7),
        "selected": lambda: boxes.selected(rows, 0.25),
        "queries": lambda: boxes.queries(places, scores, (64, 64), 0.25, True),
        "listed": lambda: boxes.listed(places, rows[:, 4], classes, rows[:, 5:], 0.25),
        "map": lambda: masks.class_map(np.full((2, 16, 16), np.nan, np.float32), LETTERBOX),
        "embedding": lambda: EmbeddingHead("rows", "cls").embedding({"rows": rows[1:]}),
    }[reading]
    with pytest.raises(ZooError, match="the network computes NaN; check its weights"):
        compute()


def decoded(mask: dict[str, Any]) -> Any:
    """pycocotools' rleFrString and rleDecode, by their description."""
    counts: list[int] = []
    position, text = 0, mask["counts"]
    while position < len(text):
        value, shift = 0, 0
        while True:
            code = ord(text[position]) - 48
            position += 1
            value |= (code & 31) << shift
            shift += 5
            if not code & 32:
                break
        if code & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
    height, width = mask["size"]
    flat = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return flat.reshape(width, height).T


def test_run_lengths_are_those_of_coco(rng: np.random.Generator) -> None:
    for mask in (rng.random((7, 9)) > 0.5, np.zeros((3, 4), bool), np.ones((3, 4), bool), rng.random((300, 20)) > 0.99):
        assert np.array_equal(decoded(masks.run_lengths(mask)), mask)
    nothing = np.zeros((10, 10), bool)
    assert [masks.run_lengths(mask)["counts"] for mask in (nothing, ~nothing)] == ["T3", "0T3"]
