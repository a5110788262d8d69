"""Peers that make an image classifier smaller: what they train on, how they go on after an interrupt, what they leave."""

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
tp = pytest.importorskip("torch_pruning", reason="needs the train extra")

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from pipelines.core.errors import RequestError  # noqa: E402
from pipelines.core.files import write_json  # noqa: E402
from pipelines.engines.catalog import load  # noqa: E402
from scripts.peers.compression import pruning  # noqa: E402
from scripts.peers.compression.compression import OwnBatch, Peer  # noqa: E402

FEATURES = {"size": 8, "channels": "RGB", "mean": [0.5] * 3, "std": [0.25] * 3}


def net(width: int) -> torch.nn.Module:
    torch.manual_seed(width)
    first, second = (torch.nn.Conv2d(*channels, 3, padding=1, bias=False) for channels in ((3, width), (width, width)))
    norms = torch.nn.BatchNorm2d(width), torch.nn.BatchNorm2d(width)
    relu, end = torch.nn.ReLU(), (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 4))
    return torch.nn.Sequential(first, norms[0], relu, second, norms[1], torch.nn.ReLU(), *end).eval()


@pytest.fixture
def task(monkeypatch):
    """Four classes of 8 x 8 images, each brighter in its quarter; a network of 64 channels to become one of 32."""
    monkeypatch.setattr(pruning, "network", lambda model: (FEATURES, net({"large": 64, "small": 32}[model])))
    monkeypatch.setattr(pruning.Task, "to_json", lambda self: {"before": self.before, "epochs": self.epochs})
    random, splits = np.random.default_rng(0), {}
    for name, count in (("train", 256), ("held_out", 100)):
        labels = random.integers(0, 4, count)
        pixels = random.integers(0, 120, (count, 3, 8, 8))
        for image, label in zip(pixels, labels, strict=True):
            image[:, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 120
        splits[name] = torch.from_numpy(pixels.astype(np.uint8)), torch.from_numpy(labels)
    made = pruning.Task("large", "small", "images.tar.gz", 2)
    made.__dict__["data"] = splits
    return made


def test_batches_are_crops_of_the_images_and_the_same_for_an_epoch(task):
    first, again, later = (list(pruning.batches(task, epoch)) for epoch in (0, 0, 1))
    assert len(first) == 2 and [batch[0].shape for batch in first] == [(128, 3, 8, 8)] * 2
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], later[0][0])
    pixels, labels = task.data["train"]
    x, y = (torch.cat(parts) for parts in zip(*first, strict=True))
    assert sorted(y.tolist()) == sorted(labels.tolist())
    wide = torch.nn.functional.pad(pixels, [4] * 4)
    crops = wide.unfold(2, 8, 1).unfold(3, 8, 1).permute(0, 2, 3, 1, 4, 5).reshape(256, 81, -1)
    possible = {bytes(crop.numpy()) for image in crops for crop in image}
    plain = ((x * 0.25 + 0.5) * 255).round().to(torch.uint8)
    mirrored = plain.flip(3)
    straight = [bytes(crop.contiguous().numpy()) in possible for crop in plain]
    turned = [bytes(crop.contiguous().numpy()) in possible for crop in mirrored]
    assert all(a or b for a, b in zip(straight, turned, strict=True))
    assert 90 < sum(straight) < 200


def test_a_trial_sees_some_of_the_images_others_in_each_epoch(task):
    limited = pruning.Task("large", "small", "images.tar.gz", 2, most=200)
    limited.__dict__["data"] = task.data
    first, later = (list(pruning.batches(limited, epoch)) for epoch in (0, 1))
    assert limited.seen == 128 and len(first) == len(later) == 1 and task.seen == 256
    assert not torch.equal(first[0][1], later[0][1])


def test_a_training_that_was_interrupted_goes_on_to_the_same_weights(task, tmp_path):
    def trained(name, *spans):
        for span in spans:
            student = net(64)
            sgd = torch.optim.SGD(student.parameters(), 0.01, 0.9)
            pruning.train(student, task, span, tmp_path / name, sgd, rate=lambda done: 1.0)
        return student.state_dict()

    whole, parts = trained("whole.pt", (0, 2)), trained("parts.pt", (0, 1), (0, 2))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    assert not torch.equal(whole["0.weight"], net(64).state_dict()["0.weight"])


def test_torch_pruning_leaves_as_many_multiplications_and_what_onnxruntime_runs(task, tmp_path):
    made = pruning.make("torch-pruning", task, tmp_path / "torch-pruning")
    before, after = made.about["multiplications"]
    goal = tp.utils.count_ops_and_params(net(32), task.example)[0]
    assert after <= goal < before and after > goal / 2
    assert made.sizes[1] < made.sizes[0] and made.engine == "onnxruntime"
    again = pruning.make("torch-pruning", task, tmp_path / "torch-pruning")
    assert again == made  # nothing is made twice
    sessions = tuple(load(path, made.engine, 1) for path in (made.before, made.after))
    x = task.normalize(task.data["held_out"][0][:3]).contiguous().numpy()
    peer = Peer(made, sessions, {"image": x})
    assert OwnBatch(sessions[1], peer.batch).run({})["logits"].shape == (3, 4)
    pixels, labels = task.data["held_out"]
    quality = peer.judged(lambda part: task.normalize(pixels[part]).contiguous().numpy(), labels.numpy())
    with torch.no_grad():
        float_top1 = float((net(64)(task.normalize(pixels)).argmax(1) == labels).float().mean())
    assert quality[0] == pytest.approx(float_top1, abs=0.05) and 0 < quality[1] < 1


def test_a_folder_of_another_task_is_refused(task, tmp_path):
    (tmp_path / "nncf").mkdir()
    write_json(tmp_path / "nncf" / pruning.ABOUT, {"task": {"before": "other"}})
    with pytest.raises(RequestError, match="of another task, expected one of this; name another folder with --work"):
        pruning.make("nncf", task, tmp_path / "nncf")


def test_a_model_that_is_no_image_classifier_is_refused():
    with pytest.raises(RequestError, match="found shop-clicks of deepfm, expected an image classifier"):
        pruning.network("shop-clicks")


def test_openvinos_model_is_two_files(tmp_path):
    for name, size in (("before.xml", 3), ("before.bin", 10), ("after.xml", 2), ("after.bin", 5)):
        (tmp_path / name).write_bytes(bytes(size))
    assert pruning.Made("openvino", tmp_path / "before.xml", tmp_path / "after.xml", {}).sizes == [13, 7]
