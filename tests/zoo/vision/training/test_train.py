"""The recipe of the image classifiers, on tiny networks and images."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.trainings import COLORS, TwoProcesses, assert_same_weights, broken_off, weights, write_images
from PIL import Image

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import read_json
from zoo.training.runs import Processes
from zoo.vision.train_config import FINETUNE, TrainConfig

training = pytest.importorskip("zoo.vision.training.train", reason="needs the train extra")
use_fast_depthwise = pytest.importorskip("zoo.vision.training.depthwise").use_fast_depthwise
torch = pytest.importorskip("torch")
nn = torch.nn
fit = training.fit
jensen_shannon = pytest.importorskip("zoo.vision.training.trainer").jensen_shannon
torch.set_num_threads(1)  # such small work only waits for a second thread

TINY = TrainConfig(
    arch="tiny",
    image_size=16,
    epochs=3,
    batch_size=16,
    learning_rate=0.8,
    warmup_epochs=1.0,
    ema=0.8,
    precision="fp32",
    workers=0,
)
MADE = {"model.pt", "train.json", "calibration.npz", "history.json", "curves.png", "confusion.png", "checkpoint"}


def build(arch: str, classes: int, width: float = 1.0) -> nn.Module:
    """Two convolutions, one of them depthwise and strided, dropout and a head."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, classes)),
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, pictures):
    """(folder, metrics) of a finished run."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    config = replace(TINY, epochs=8, augmix=0.2)
    return folder, fit(build, pictures, folder, config=config)


def test_a_run_leaves_its_files_and_nothing_else(trained, pictures):
    folder, metrics = trained
    assert {path.name for path in folder.iterdir()} == MADE
    record = read_json(folder / "train.json")
    assert record["arch"] == "tiny"
    assert record["classes"] == sorted(COLORS)
    assert record["features"] == {**training.PREPROCESSING, "size": 16, "resize": 16}
    assert record["metrics"] == metrics
    assert record["rows"] == {"train": 72, "held_out": 24, "left_out": 0}
    with np.load(folder / "calibration.npz") as samples:
        assert samples.files == ["image"]
        assert samples["image"].shape == (72, 3, 16, 16)
        assert samples["image"].dtype == np.uint8
    assert weights(folder).keys() == build(TINY.arch, 3).state_dict().keys()
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_easy_task_is_learnt(trained):
    folder, metrics = trained
    history = read_json(folder / "history.json")
    assert [epoch["size"] for epoch in history] == [8, 8, 16, 16, 16, 16, 16, 16]
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert metrics["top1"] > 0.8


def test_the_kept_weights_are_those_that_were_measured(trained, pictures):
    folder, metrics = trained
    record, model = read_json(folder / "train.json"), build(TINY.arch, 3)
    model.load_state_dict(weights(folder))
    images = training.open_images(pictures).held_out
    pixels = np.stack([training.prepare(images.image(i), record["features"]) for i in range(len(images))])
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(record["features"][name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        predicted = model.eval()((x / 255 - mean) / std).argmax(1).numpy()
    assert (predicted == images.labels).mean() == metrics["top1"]


def test_same_seed_same_weights_and_resuming_changes_nothing(tmp_path, pictures):
    config = replace(TINY, augmix=0.3)
    fit(build, pictures, tmp_path / "whole", config=config)
    # of 4 steps an epoch: it breaks off in the second
    broken_off(training.Trainer, 6, lambda: fit(build, pictures, tmp_path / "parts", config=config))
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {"checkpoint"}
    fit(build, pictures, tmp_path / "parts", config=config, resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    for name in ("calibration.npz", "confusion.png"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    with pytest.raises(RequestError, match=r"seed 0 \(now 1\)"):
        fit(build, pictures, tmp_path / "parts", config=replace(config, seed=1), resume=True)
    (tmp_path / "parts" / training.STATE).write_bytes(b"PK broken")
    with pytest.raises(RequestError, match="cannot read the checkpoint"):
        fit(build, pictures, tmp_path / "parts", config=config, resume=True)


def test_fine_tuning_keeps_the_network_and_renews_the_head(tmp_path, trained, pictures):
    other = write_images(tmp_path / "data", {"cyan": (60, 200, 200), "pink": (220, 120, 160)})
    config = replace(FINETUNE, arch="tiny", epochs=1, batch_size=16, learning_rate=1e-9, ema=0.0, precision="fp32")
    fit(build, other, tmp_path / "new", config=config, start_from=trained[0])
    before, after = weights(trained[0]), weights(tmp_path / "new")
    assert after["9.weight"].shape == (2, 8)
    torch.testing.assert_close(after["0.weight"], before["0.weight"], rtol=0, atol=1e-6)
    assert read_json(tmp_path / "new" / "train.json")["features"]["size"] == 16
    fit(build, pictures, tmp_path / "same", config=config, start_from=trained[0])
    torch.testing.assert_close(weights(tmp_path / "same")["9.weight"], before["9.weight"], rtol=0, atol=1e-6)


def test_fine_tuning_from_another_network_is_refused(tmp_path, trained, pictures):
    with pytest.raises(RequestError, match="not those of this network"):
        fit(
            lambda arch, classes, width: nn.Sequential(nn.Flatten(), nn.Linear(768, classes)),
            pictures,
            tmp_path / "x",
            config=TINY,
            start_from=trained[0],
        )


def test_bad_images_are_counted(tmp_path):
    data = write_images(tmp_path / "data")
    (data / "train" / "red" / "0.png").write_bytes(b"nothing")
    with pytest.raises(RequestError, match="red/0.png"):
        fit(build, data, tmp_path / "out", config=replace(TINY, epochs=1))
    fit(build, data, tmp_path / "out", config=replace(TINY, epochs=1), on_error="skip")
    assert read_json(tmp_path / "out" / "train.json")["rows"] == {"train": 71, "held_out": 24, "left_out": 1}


@pytest.mark.slow
def test_photos_are_decoded_by_workers_to_the_same_weights(tmp_path):
    random = np.random.default_rng(0)
    for label, color in COLORS.items():
        (tmp_path / "data" / label).mkdir(parents=True)
        for i in range(8):
            pixels = np.clip(np.array(color) + random.normal(0, 40, (90, 70 + i, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / label / f"{i}.jpg")
    config = replace(TINY, epochs=1, batch_size=8, validation=0.3)
    fit(build, tmp_path / "data", tmp_path / "alone", config=config)
    assert read_json(tmp_path / "alone" / "train.json")["features"]["resize"] == 18
    fit(build, tmp_path / "data", tmp_path / "helped", config=replace(config, workers=2))
    assert_same_weights(tmp_path / "alone", tmp_path / "helped")


def test_a_folder_in_use_and_a_missing_checkpoint_are_refused(tmp_path, pictures):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(RequestError, match="in use"):
        fit(build, pictures, tmp_path / "used", config=TINY)
    with pytest.raises(RequestError, match="to resume from"):
        fit(build, pictures, tmp_path / "used", config=TINY, resume=True)


def test_divergence_is_said(tmp_path, pictures):
    with pytest.raises(ZooError, match="diverged in epoch"):
        fit(build, pictures, tmp_path / "x", config=replace(TINY, learning_rate=1e30))


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"epochs": 0},
            {"learning_rate": math.nan},
            {"precision": "fp8"},
            {"progressive": ()},
            {"progressive": (1.5,)},
        ),
        *(
            {"ema": 1.0},
            {"augmix": 1.1},
            {"randaugment_m": 11.0},
            {"clip": 0.0},
            {"seed": -1},
            {"weight_decay": -1.0},
            {"workers": -1},
        ),
    ],
)
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(RequestError, match=next(iter(change))):
        replace(TINY, **change)


def test_sizes_grow_and_the_rate_rises_and_falls():
    config = TrainConfig(image_size=64, epochs=20, batch_size=128)
    assert [config.size(epoch) for epoch in range(20)] == [32] * 5 + [48] * 5 + [64] * 10
    for epoch_steps, warm in (
        (150, 300),
        (60, 200),
        (15, 100),
    ):  # its epochs; the least number of steps; a third of all
        rates = [config.rate(step, epoch_steps) for step in range(20 * epoch_steps)]
        assert rates[warm - 1] == max(rates) == pytest.approx(config.learning_rate / 2)
        assert 0 < rates[-1] < 0.01 * config.learning_rate
        assert np.all(np.diff(rates[:warm]) > 0)
        assert np.all(np.diff(rates[warm - 1 :]) < 0)


@pytest.mark.parametrize(("epochs", "epoch_steps"), [(1, 1), (1, 2), (1, 4), (1, 100), (2, 50), (3, 50), (1, 1000)])
def test_the_rate_falls_in_the_shortest_training_too(epochs, epoch_steps):
    config = replace(FINETUNE, epochs=epochs, warmup_epochs=2.0)
    total = epochs * epoch_steps
    rates = [config.rate(step, epoch_steps) for step in range(total)]
    highest = int(np.argmax(rates))
    assert max(rates) <= config.learning_rate / 4 and highest <= total / 3
    assert np.all(np.diff(rates[highest:]) < 0)
    assert rates[-1] <= max(rates) * 1.5 / (total - highest)


def test_a_step_is_limited():
    config = replace(TINY, clip=1e-3, momentum=0.0, weight_decay=0.0)
    trainer = training.Trainer(build(config.arch, 3), config, dict(training.PREPROCESSING), Processes())
    before = torch.cat([parameter.detach().clone().flatten() for parameter in trainer.model.parameters()])
    trainer.step(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), torch.arange(8) % 3, 1, 1)
    moved = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]) - before
    assert moved.norm().item() == pytest.approx(config.rate(0, 1) * config.clip, rel=0.01)


def test_norms_and_biases_do_not_decay():
    trainer = training.Trainer(build(TINY.arch, 3), TINY, dict(training.PREPROCESSING), Processes())
    decayed, plain = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (TINY.weight_decay, 0.0)
    assert {parameter.ndim for parameter in plain["params"]} == {1}
    assert len(decayed["params"]) == 3


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_convolutions_are_spared_slow_forms_and_nothing_else(size, stride):
    plain = nn.Conv2d(6, 6, 3, stride, 1, groups=6)
    spared = nn.Sequential(copy.deepcopy(plain))
    use_fast_depthwise(spared)
    assert type(spared[0]) is not nn.Conv2d
    x = torch.randn(2, 6, size, size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(spared(x), plain(x))
    assert spared.state_dict().keys() == {"0.weight", "0.bias"}
    with torch.autocast("cpu", torch.bfloat16):
        assert spared(x).dtype == (torch.bfloat16 if stride == 1 else torch.float32)


def test_jensen_shannon_divergence():
    logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    assert jensen_shannon(logits[:1].expand(3, -1, -1)).item() == pytest.approx(0, abs=1e-6)
    p = logits.softmax(-1).numpy().astype(np.float64)
    mixture = p.mean(0)
    expected = np.mean([(q * np.log(q / mixture)).sum(-1) for q in p])
    assert jensen_shannon(logits).item() == pytest.approx(expected, rel=1e-4)


def test_timing_precisions_leaves_no_trace():
    trainer = training.Trainer(
        build(TINY.arch, 3), replace(TINY, precision="auto"), dict(training.PREPROCESSING), Processes()
    )
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    assert trainer.choose(16, 4)["precision"] in ("fp32", "bf16")
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_bf16_training_is_near_fp32(tmp_path, pictures):
    metrics = fit(build, pictures, tmp_path / "x", config=replace(TINY, epochs=8, precision="bf16"))
    assert metrics["top1"] > 0.8


def in_processes(data: str, folder: str, *, resume: bool) -> None:
    fit(build, data, folder, config=TINY, resume=resume)


@pytest.fixture
def two(tmp_path, pictures):
    return TwoProcesses("tests.zoo.vision.training.test_train", pictures, tmp_path)


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path, two):
    two.train(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == MADE
    record = read_json(tmp_path / "out" / "train.json")
    assert record["processes"] == 2


@pytest.mark.slow
def test_two_processes_that_were_stopped_go_on_to_the_same_result(tmp_path, two):
    two.train(tmp_path / "whole")
    two.stop_and_resume(tmp_path / "parts")
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
