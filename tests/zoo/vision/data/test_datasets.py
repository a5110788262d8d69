"""Where labelled images come from, and what training does to their pixels."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines.core.errors import RequestError, ZooError
from zoo.vision.data import augmentation
from zoo.vision.data.augmentation import AugmentedImages
from zoo.vision.data.datasets import decode, open_images, prepare
from zoo.vision.data.sources import unlabelled_images

RED, BLUE = (220, 30, 20), (10, 40, 200)


def picture(color=RED, size=(20, 16), seed=0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(-9, 10, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.array(color) + noise, 0, 255).astype(np.uint8))


def fill(folder: Path, count=6, size=(20, 16), suffix=".png") -> Path:
    for label, color in (("red", RED), ("blue", BLUE)):
        (folder / label).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture(color, size, i).save(folder / label / f"{i}{suffix}")
    return folder


def content(image: Image.Image, kind="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_a_folder_of_class_folders(tmp_path):
    fill(tmp_path)
    (tmp_path / "red" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    picture().save(tmp_path / ".hidden" / "x.png")
    images = open_images(tmp_path, held_out=0.4)
    assert images.classes == ("blue", "red")
    assert len(images.train) + len(images.held_out) == 12
    assert 0 < len(images.held_out) < 12
    assert images.train.pixels.shape[1:] == (16, 20, 3)
    for part in (images.train, images.held_out):
        for name, label, pixels in zip(part.names, part.labels, part.pixels, strict=True):
            assert name.startswith(images.classes[label])
            assert (pixels[..., 0].mean() > pixels[..., 2].mean()) == (images.classes[label] == "red")
    assert not set(images.train.names) & set(images.held_out.names)


def test_what_is_held_out_hangs_on_names_and_seed_alone(tmp_path):
    fill(tmp_path, 20)
    first = open_images(tmp_path, held_out=0.3)
    assert open_images(tmp_path, held_out=0.3).digest == first.digest
    picture().save(tmp_path / "red" / "another.png")
    more = open_images(tmp_path, held_out=0.3)
    assert set(first.held_out.names) <= set(more.held_out.names)
    assert set(first.train.names) <= set(more.train.names)
    assert more.digest != first.digest
    assert open_images(tmp_path, held_out=0.3, seed=1).held_out.names != more.held_out.names


@pytest.mark.parametrize("name", ["test", "val", "Test", "testing", "Validation"])
def test_a_folder_with_splits_keeps_them(tmp_path, name):
    fill(tmp_path / {"Test": "Train", "testing": "training"}.get(name, "train"), 5)
    fill(tmp_path / name, 2)
    images = open_images(tmp_path)
    assert (len(images.train), len(images.held_out)) == (10, 4)
    assert all(path.startswith(f"{name}/") for path in images.held_out.names)
    assert len(unlabelled_images(tmp_path)) == 10  # what int8 is calibrated on


def test_train_is_a_class_where_other_classes_are(tmp_path):
    fill(tmp_path, 10)
    (tmp_path / "red").rename(tmp_path / "train")
    assert open_images(tmp_path, held_out=0.3).classes == ("blue", "train")


@pytest.mark.parametrize("names", [("train", "valid", "extra"), ("Train", "test", "red"), ("train", "extra")])
def test_splits_beside_other_folders_are_no_classes(tmp_path, names):
    for name in names:
        fill(tmp_path / name, 3)
    with pytest.raises(
        RequestError, match=rf"found {', '.join(names[:-1])} and {names[-1]} in .*expected splits alone"
    ):
        open_images(tmp_path)


def test_a_class_called_as_a_split_is_named_in_labels_csv(tmp_path):
    fill(tmp_path, 10)
    (tmp_path / "red").rename(tmp_path / "test")  # or images of no class
    with pytest.raises(RequestError, match=r"found test and blue in .*or name the classes in labels.csv"):
        open_images(tmp_path)
    files = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in tmp_path.glob("*/*.png")]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *files]) + "\n")
    assert open_images(tmp_path, held_out=0.3).classes == ("blue", "test")


@pytest.mark.parametrize("name", ["/tmp/elsewhere/a.png", "../a.png", "a/../../b.png"])
def test_an_archive_with_paths_outside_of_it_is_refused(tmp_path, name):
    path = tmp_path / "photos.tar"
    with tarfile.open(path, "w") as file:
        for member in ("a/0.png", "b/0.png", name):
            info = tarfile.TarInfo(member)
            info.size = 4
            file.addfile(info, io.BytesIO(b"\x89PNG"))
    with pytest.raises(RequestError, match=rf"found {name} in .*photos\.tar, expected paths inside of a folder"):
        open_images(path)


def test_a_damaged_archive_is_refused(tmp_path):
    fill(tmp_path / "photos", 20)
    with tarfile.open(tmp_path / "photos.tar.gz", "w:gz") as file:
        file.add(tmp_path / "photos", "photos")
    whole = (tmp_path / "photos.tar.gz").read_bytes()
    for start in range(500, len(whole) - 400, 1500):  # in a header, in an image
        packed = bytearray(whole)
        packed[start : start + 400] = b"\xff" * 400
        (tmp_path / "photos.tar.gz").write_bytes(packed)
        with pytest.raises(RequestError, match=r"cannot read .*photos.tar.gz: .*expected a .tar or .tar.gz"):
            open_images(tmp_path / "photos.tar.gz")


@pytest.mark.parametrize("outer", ["", "photos/"])
@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_an_archive_is_read_like_its_folder(tmp_path, outer, ending):
    fill(tmp_path / "train", 4)
    fill(tmp_path / "test", 2)
    archive = tmp_path / f"archive{ending}"
    with tarfile.open(archive, "w:gz" if ending == ".tar.gz" else "w") as file:
        for split in ("train", "test"):
            file.add(tmp_path / split, f"{outer}{split}")
    archive.rename(tmp_path.parent / archive.name)
    from_archive, from_folder = open_images(tmp_path.parent / archive.name), open_images(tmp_path)
    np.testing.assert_array_equal(from_archive.train.pixels, from_folder.train.pixels)
    assert from_archive.digest == from_folder.digest


def test_labels_csv_says_the_classes_and_its_further_columns_are_ignored(tmp_path):
    for i in range(8):
        picture(RED if i % 2 else BLUE, seed=i).save(tmp_path / f"{i}.png")
    rows = [f"{i}.png,{'red' if i % 2 else 'blue'},somebody" for i in range(7)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label,author", *rows]) + "\n")
    images = open_images(tmp_path, held_out=0.3)
    assert images.classes == ("blue", "red")
    assert len(images.train) + len(images.held_out) == 7


def test_classes_that_are_numbers_are_sorted_as_such(tmp_path):
    for i in range(24):
        picture(seed=i).save(tmp_path / f"{i}.png")
    (tmp_path / "labels.csv").write_text(
        "\n".join(["file,label", *(f"{i}.png,{(2, 10, 1)[i % 3]}" for i in range(24))])
    )
    assert open_images(tmp_path, held_out=0.3).classes == ("1", "2", "10")


@pytest.mark.parametrize(
    ("table", "said"),
    [("name,class\n0.png,red\n", "columns file and label"), ("file,label\ngone.png,red\n0.png,blue\n", "gone.png")],
)
def test_a_labels_csv_that_does_not_fit_is_refused(tmp_path, table, said):
    picture().save(tmp_path / "0.png")
    (tmp_path / "labels.csv").write_text(table)
    with pytest.raises(RequestError, match=said):
        open_images(tmp_path)


def test_a_data_set_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["red", "blue"])})
    rows = {"img": [picture((RED, BLUE)[i % 2], seed=i) for i in range(6)], "label": [i % 2 for i in range(6)]}
    both = datasets.DatasetDict({name: datasets.Dataset.from_dict(rows, features=kinds) for name in ("train", "test")})
    both.save_to_disk(str(tmp_path / "saved"))
    images = open_images(tmp_path / "saved")
    assert images.classes == ("blue", "red")
    assert (len(images.train), len(images.held_out)) == (6, 6)
    assert images.train.labels.tolist() == [1, 0, 1, 0, 1, 0]
    assert images.train.pixels[0][..., 0].mean() > 200


def test_the_hub_is_not_asked_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(RequestError, match="ZOO_OFFLINE"):
        open_images("uoft-cs/cifar10")
    with pytest.raises(RequestError, match="found no"):
        open_images(tmp_path / "nowhere")


def test_bad_images_stop_the_run_or_are_counted(tmp_path):
    fill(tmp_path, 10, suffix=".jpg")
    whole = (tmp_path / "red" / "3.jpg").read_bytes()
    (tmp_path / "red" / "3.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "red" / "4.jpg").write_bytes(b"")
    (tmp_path / "blue" / "5.jpg").write_text("<html>not found</html>")
    with pytest.raises(RequestError, match=r"blue/5.jpg: not an image.*skip"):
        open_images(tmp_path)
    images = open_images(tmp_path, on_error="skip")
    assert [fault.partition(":")[0] for fault in images.left_out] == ["blue/5.jpg", "red/3.jpg", "red/4.jpg"]
    assert len(images.train) + len(images.held_out) == 17
    with pytest.raises(RequestError, match="expected raise or skip"):
        open_images(tmp_path, on_error="ignore")


@pytest.mark.parametrize("classes", [0, 1])
def test_data_without_two_classes_are_refused(tmp_path, classes):
    fill(tmp_path)
    for path in sorted(tmp_path.glob("*/*"))[: 12 - 6 * classes]:
        path.unlink()
    with pytest.raises(RequestError, match="found"):
        open_images(tmp_path)


def test_images_outside_class_folders_and_several_sources_are_refused(tmp_path):
    fill(tmp_path)
    picture().save(tmp_path / "stray.png")
    with pytest.raises(RequestError, match=r"stray.png.*outside"):
        open_images(tmp_path)
    with pytest.raises(RequestError, match="2 sources"):
        open_images([tmp_path, tmp_path])


def test_large_images_are_read_again_when_needed(tmp_path):
    fill(tmp_path, 4)
    picture(RED, (90, 70)).save(tmp_path / "red" / "0.png")
    images = open_images(tmp_path, held_out=0.3)
    assert images.train.pixels is None
    index = images.train.names.index("red/0.png") if "red/0.png" in images.train.names else None
    part = images.train if index is not None else images.held_out
    position = part.names.index("red/0.png")
    assert part.image(position).size == (90, 70)
    (tmp_path / "red" / "0.png").unlink()
    with pytest.raises(ZooError, match="red/0.png"):
        part.image(position)


def test_every_kind_of_picture_becomes_upright_rgb():
    grey16 = Image.fromarray(np.full((4, 6), 51400, np.uint16))
    assert np.asarray(decode(content(grey16)))[0, 0].tolist() == [200, 200, 200]
    assert np.asarray(decode(content(Image.new("L", (6, 4), 77))))[0, 0].tolist() == [77, 77, 77]
    clear = Image.new("RGBA", (6, 4), (9, 9, 9, 0))
    assert np.asarray(decode(content(clear)))[0, 0].tolist() == [9, 9, 9]  # as torchvision and serving have it
    palette = Image.new("RGB", (6, 4), RED).convert("P", palette=Image.Palette.ADAPTIVE)
    assert np.abs(np.asarray(decode(content(palette)))[0, 0].astype(int) - RED).max() < 4
    cmyk = content(Image.new("RGB", (6, 4), RED).convert("CMYK"), "JPEG")
    assert np.abs(np.asarray(decode(cmyk))[0, 0].astype(int) - RED).max() < 12
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    assert decode(content(Image.new("RGB", (6, 4)), "JPEG", exif=exif)).size == (4, 6)


def test_prepare_is_resize_and_centre_crop():
    image = picture(size=(40, 20))
    features = {"size": 16, "resize": 20, "interpolation": "bilinear"}
    np.testing.assert_array_equal(prepare(image, features), np.asarray(image)[2:18, 12:28])
    assert prepare(image, features | {"resize": 0}).shape == (16, 16, 3)
    assert prepare(image, features | {"size": 24, "resize": 24, "interpolation": "bicubic"}).shape == (24, 24, 3)


# -------------------------------------------------------------------------------------------------------- augmentation


@pytest.mark.parametrize("operation", [*augmentation.GEOMETRIC, *augmentation.TONAL, *augmentation.ENHANCING])
def test_operations_keep_the_shape_and_grow_with_strength(operation):
    table = {**augmentation.GEOMETRIC, **augmentation.TONAL, **augmentation.ENHANCING}
    y, x = np.mgrid[-1:1:32j, -1:1:32j]
    image = Image.fromarray(
        (120 + np.stack([90 * np.exp(-4 * x * x - 4 * y * y), 60 * x * y, 50 * np.sin(9 * x)], axis=-1)).astype(
            np.uint8
        )
    )  # smooth
    for sign in (-1.0, 1.0):
        weak, strong = (np.asarray(table[operation](image, strength, sign)).astype(int) for strength in (0.1, 1.0))
        assert weak.shape == strong.shape == (32, 32, 3)
        change = [np.abs(changed - np.asarray(image)).mean() for changed in (weak, strong)]
        assert change[1] > 0
        assert change[1] >= change[0] or operation in ("equalize", "autocontrast")


def test_no_operations_change_nothing():
    image = picture()
    assert augmentation.randaugment(image, 0, 9, np.random.default_rng(0)) == image
    pixels = np.asarray(picture(size=(4, 4)))
    np.testing.assert_array_equal(
        augmentation.pad_and_crop(pixels, np.random.default_rng(0)), pixels
    )  # an eighth of 4 is none


def test_augmix_stays_near_the_image_and_keeps_its_shape():
    image = picture(size=(32, 32))
    for seed in range(5):
        mixed = augmentation.augmix(image, np.random.default_rng(seed), severity=1)
        assert mixed.shape == (32, 32, 3)
        assert mixed.dtype == np.uint8


def test_crops_lie_inside_the_image():
    image = picture(size=(50, 40))
    for seed in range(20):
        crop = augmentation.resized_crop(image, 24, np.random.default_rng(seed))
        assert crop.size == (24, 24)
        assert np.abs(np.asarray(crop).mean((0, 1)) - RED).max() < 4  # nothing from outside
    assert augmentation.resized_crop(picture(size=(400, 4)), 24, np.random.default_rng(0)).size == (24, 24)


def test_views_hang_on_seed_epoch_and_index_alone(tmp_path):
    images = open_images(fill(tmp_path, 8, size=(32, 32)), held_out=0.3).train
    views = AugmentedImages(images, 48, 2, 5.0, seed=3, epoch=1)
    view, label = views[2, False]
    assert view.shape == (1, 48, 48, 3)
    assert label == images.labels[2]
    np.testing.assert_array_equal(AugmentedImages(images, 48, 2, 5.0, seed=3, epoch=1)[2, False][0], view)
    for other in (AugmentedImages(images, 48, 2, 5.0, 4, 1), AugmentedImages(images, 48, 2, 5.0, 3, 2)):
        assert (other[2, False][0] != view).any()
    mixed = views[2, True][0]
    assert mixed.shape == (3, 48, 48, 3)
    assert (mixed[0] != mixed[1]).any()
    assert (mixed[1] != mixed[2]).any()
