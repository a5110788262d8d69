"""Images to pixels: what people send, odd and broken files, lists, labels and batches."""

import io
import json
import os
import struct
import sys
import zlib

import numpy as np
import pytest
import simplejpeg
from helpers.color_networks import encoded
from PIL import Image, ImageOps, features

from pipelines.core.errors import RequestError
from pipelines.data import images
from pipelines.data.images import batches, decode, labelled, listed, normalized, prepare
from pipelines.data.preprocess import Preprocess
from pipelines.engines.session import Port
from pipelines.kernels import extension

SPEC = Preprocess(8, 10)
UNCHANGED = Preprocess(16)  # of a picture of 16 x 16


def picture(height=40, width=56, seed=0):
    """Smooth, so that a JPEG of it is close to it."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def rgb(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


# ---------------------------------------------------------------------------------------------------------- Preprocess


def test_preprocess_is_json_and_back():
    spec = Preprocess(224, 256, "bicubic", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "BGR", True)
    assert Preprocess.from_json(spec.to_json()) == spec and json.loads(json.dumps(spec.to_json())) == spec.to_json()
    person = {
        "size": 224,
        "resize": 256,
        "interpolation": "bilinear",
        "mean": [0, 0, 0],
        "std": [1, 1, 1],
        "channels": "RGB",
    }
    assert Preprocess.from_json(person) == Preprocess(224, 256, mean=(0, 0, 0), std=(1, 1, 1))
    assert isinstance(Preprocess.from_json(person).mean[0], float)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": 0}, "size 0, resize 0"),
        ({"size": 224, "resize": 200}, "size 224, resize 200"),
        ({"size": 9000}, "size 9000"),
        ({"size": 224.0}, "size is 224.0; give a whole number"),
        ({"size": True}, "size is True"),
        ({"interpolation": "nearest"}, "unknown interpolation 'nearest'; choose one of bilinear, bicubic"),
        ({"channels": "rgb"}, "unknown channels 'rgb'"),
        ({"scaled_decode": "yes"}, "unknown scaled_decode 'yes'"),
        ({"mean": [1, 2]}, "expected three numbers"),
        ({"mean": "abc"}, "expected three numbers"),
        ({"mean": 3}, "expected three numbers"),
        ({"mean": [0, 0, float("nan")]}, "expected three numbers"),
        ({"std": [1, 1, 0]}, "expected three numbers above 0"),
        ({"crop": 3}, "unknown crop; its fields are size, resize"),
    ],
)
def test_preprocess_refuses_what_makes_no_sense(changes, said):
    with pytest.raises(RequestError, match=said):
        Preprocess.from_json({"size": 224} | changes)


def test_preprocess_needs_an_object_with_a_size():
    with pytest.raises(RequestError, match="no size; its fields are size, resize"):
        Preprocess.from_json({})
    with pytest.raises(RequestError, match="found 3; give an object"):
        Preprocess.from_json(3)


# -------------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 9), (16, 16), (33, 47)])
def test_jpegs_have_the_pixels_of_pillow(shape, subsampling):
    data = simplejpeg.encode_jpeg(np.ascontiguousarray(np.asarray(picture(*shape))), 85, colorsubsampling=subsampling)
    assert np.array_equal(decode(data), rgb(data))


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"restart_marker_blocks": 2}, {"keep_rgb": True}, {"quality": 20}]
)
def test_kinds_of_jpeg_have_the_pixels_of_pillow(options):
    data = encoded(picture(33, 47), "JPEG", **options)
    assert np.array_equal(decode(data), rgb(data))


MODES = {
    "JPEG": ["L", "CMYK"],
    "PNG": ["L", "1", "P", "LA", "RGBA", "I;16"],
    "WEBP": ["L", "P", "RGBA"],
    "GIF": ["L", "1", "P", "RGBA"],
    "BMP": ["L", "1", "P", "RGBA"],
    "TIFF": ["L", "1", "P", "LA", "RGBA", "CMYK", "I;16"],
}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_modes_are_seen_as_a_person_does(kind, mode):
    grey = mode in ("L", "1", "LA", "I;16")
    seen = picture(16, 16).convert("L") if grey else picture(16, 16)
    values = np.asarray(seen.convert("RGB")).astype(int)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(seen).astype(np.uint16) * 257)
    else:
        image = seen.quantize(256) if mode == "P" else seen.convert(mode)
    data = encoded(image, kind)
    decoded = decode(data)
    assert decoded.shape == (16, 16, 3) and decoded.dtype == np.uint8
    if mode != "1" and kind != "GIF":
        assert np.abs(decoded - values).mean() < 12
    if mode == "I;16":
        assert np.array_equal(decoded, values)


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_of_32_bits_are_refused(kind):  # their range is unknown
    with pytest.raises(RequestError, match=r"pixels; expected integers of 8 or 16 bits"):
        decode(encoded(Image.fromarray(np.full((4, 4), 200, kind)), "TIFF"))


def test_alpha_is_dropped():
    image = np.dstack([np.asarray(picture(16, 16)), np.zeros((16, 16), np.uint8)])
    assert np.array_equal(decode(encoded(Image.fromarray(image), "PNG")), image[:, :, :3])
    palette = picture(16, 16).quantize(8)
    data = encoded(palette, "PNG", transparency=bytes(range(8)))
    assert np.array_equal(decode(data), np.asarray(palette.convert("RGB")))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_exif_says(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(20, 30), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert np.array_equal(decode(data), wanted)
    assert np.array_equal(prepare(Image.open(io.BytesIO(data)), SPEC), prepare(data, SPEC))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_is_no_broken_image():
    data = encoded(picture(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decode(data).shape == (40, 56, 3)


def test_bytes_too_many_before_the_end_of_a_jpeg_are_no_damage():
    data = encoded(picture(), "JPEG")
    assert np.array_equal(decode(data[:-2] + b"\0abc\xff\xd9more"), decode(data))


@pytest.mark.parametrize("extra", [b"", b"\xff\xd9", b"\0abc\xff\xd9", b"\xff\xd8"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}])
def test_a_jpeg_cut_short_is_told_also_where_decoders_fill_it_with_grey(extra, options):
    data = encoded(picture(), "JPEG", quality=95, **options)
    for share in (0.5, 0.7, 0.9):
        with pytest.raises(RequestError, match="the image of .* bytes is broken: "):
            decode(data[: int(len(data) * share)] + extra)


@pytest.mark.parametrize(
    "kind", ["PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000", *(["AVIF"] if features.check("avif") else [])]
)
def test_other_images_cut_short_are_told(kind):
    data = encoded(picture(64, 64), kind)
    assert decode(data).shape == (64, 64, 3)
    for share in (0.05, 0.3, 0.6):
        with pytest.raises(RequestError, match="broken|no image"):
            decode(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\xff\xd8",
        b"\xff\xd8\xff\xd9",
        b"hello",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"<svg/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
    ],
)
def test_what_is_no_image_is_named(data, tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(data)
    with pytest.raises(RequestError) as failure:
        decode(path)
    assert str(path) in str(failure.value) and "\n" not in str(failure.value)


def test_places_that_hold_no_file_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(b"x")
    for path, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "missing.jpg", "does not exist"),
        (tmp_path / "pipe", "is no file"),
        ("a\0b", "cannot read|does not exist"),
    ):
        with pytest.raises(RequestError, match=said):
            decode(path)


def test_enormous_images_are_refused_before_they_are_decoded(monkeypatch, tmp_path):
    monkeypatch.setattr(images, "MAX_PIXELS", 40 * 56 - 1)
    for kind in ("JPEG", "PNG"):
        with pytest.raises(RequestError, match="has 56 x 40 pixels; images may have 2239"):
            decode(encoded(picture(), kind))
    with pytest.raises(RequestError, match="the array has 56 x 40 pixels"):
        prepare(np.asarray(picture()), SPEC)
    monkeypatch.undo()
    with pytest.raises(RequestError, match="has 65536 x 1 pixels; images may have .* 65535 a side"):
        decode(encoded(Image.new("RGB", (65536, 1)), "PNG"))
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    (tmp_path / "a.jpg").write_bytes(bytes(11))
    with pytest.raises(RequestError, match="has 11 bytes; images may have 10"):
        decode(tmp_path / "a.jpg")


def test_a_decompression_bomb_is_refused_quickly():
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
    body = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    with pytest.raises(RequestError, match="60000|3600000000|exceeds"):
        decode(header + body + struct.pack(">I", zlib.crc32(b"IHDR" + body)) + b"\0\0\0\0IDAT\x35\xaf\x06\x1e")


@pytest.mark.filterwarnings("error")
def test_large_jpegs_are_decoded_smaller_where_that_is_asked_for():
    data = encoded(picture(800, 1200), "JPEG")
    assert decode(data, smallest=200).shape == (200, 300, 3)
    assert decode(data, smallest=201).shape == (300, 450, 3)
    assert decode(data, smallest=401).shape == (
        800,
        1200,
        3,
    )  # nothing between a half and all: that would cost more than all
    assert decode(data, smallest=5000).shape == (800, 1200, 3)
    spec = Preprocess(48, 50)
    full, scaled = prepare(data, spec), prepare(data, Preprocess(48, 50, scaled_decode=True))
    assert np.abs(full.astype(int) - scaled).max() < 8 and not np.array_equal(full, scaled)
    small = encoded(picture(198, 198), "JPEG")
    assert np.array_equal(prepare(small, spec), prepare(small, Preprocess(48, 50, scaled_decode=True)))


# ------------------------------------------------------------------------------------------------------------- prepare


def obvious(image, spec):
    """The same by Pillow alone, as torchvision does it; one axis at a time, since Pillow 13 begins with the columns of
    tall images.
    """
    width, height = image.size
    side, size = spec.resize, spec.size
    resized = (side, int(side * height / width)) if width <= height else (int(side * width / height), side)
    filtered = Image.Resampling.BICUBIC if spec.interpolation == "bicubic" else Image.Resampling.BILINEAR
    resized = resized if side else (size, size)
    image = image.resize((resized[0], height), filtered).resize(resized, filtered)
    left, top = (round((length - size) / 2) for length in image.size)
    return np.asarray(image.crop((left, top, left + size, top + size))).transpose(2, 0, 1)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [(299, 299), (100, 171), (171, 100), (30, 31), (5, 3), (224, 224)])
@pytest.mark.parametrize(("size", "resize"), [(24, 32), (24, 24), (33, 0)])
def test_prepare_has_the_bits_of_pillow(rng, native, interpolation, shape, size, resize, monkeypatch):
    if not native:
        monkeypatch.setattr(extension, "native", lambda: None)
    spec = Preprocess(size, resize, interpolation)
    pixels = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
    assert np.array_equal(prepare(pixels, spec), obvious(Image.fromarray(pixels), spec))
    assert np.array_equal(prepare(encoded(Image.fromarray(pixels), "PNG"), spec), prepare(pixels, spec))
    grey = pixels[:, :, 0]
    assert np.array_equal(prepare(grey, spec), obvious(Image.fromarray(grey).convert("RGB"), spec))


@pytest.mark.parametrize("shape", [(1, 60000), (60000, 1)])
def test_very_long_images_need_little_memory_with_and_without_kernels(rng, shape, monkeypatch):
    pixels = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
    prepared = [prepare(pixels, Preprocess(8, 64)), prepare(pixels, Preprocess(8))]
    monkeypatch.setattr(extension, "native", lambda: None)
    monkeypatch.setattr(images, "MAX_PIXELS", 10**6)
    assert np.array_equal(prepared, [prepare(pixels, Preprocess(8, 64)), prepare(pixels, Preprocess(8))])


def test_prepare_writes_into_a_batch():
    batch = np.zeros((3, 3, 8, 8), np.uint8)
    slot = prepare(np.full((20, 30, 3), 7, np.uint8), SPEC, batch[1])
    assert np.shares_memory(slot, batch) and (batch[1] == 7).all() and not batch[[0, 2]].any()


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4, 3)), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8), np.zeros(4, np.uint8)]
)
def test_prepare_refuses_other_arrays(array):
    with pytest.raises(RequestError, match="expected pixels uint8"):
        prepare(array, SPEC)


def test_normalized_is_what_torchvision_does(rng):
    pixels = rng.integers(0, 256, (2, 3, 4, 5), dtype=np.uint8)
    spec = Preprocess(4, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    wanted = (pixels / 255 - np.array(spec.mean)[:, None, None]) / np.array(spec.std)[:, None, None]
    array = normalized(pixels, spec)
    assert array.dtype == np.float32 and np.allclose(array, wanted, atol=1e-6)
    reverse = Preprocess(4, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), channels="BGR")
    assert np.array_equal(normalized(pixels, reverse), array[:, ::-1])


# --------------------------------------------------------------------------------------------------------------- lists


@pytest.fixture
def folder(tmp_path):
    """Two classes, hidden files, and something else."""
    hidden = (".ipynb_checkpoints/d.jpg", "dog/.thumbnails/d.jpg", "cat/._c.jpeg")
    for i, name in enumerate(("dog/b.PNG", "dog/deep/a.jpg", "cat/c.jpeg", *hidden, "cat/notes.txt")):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(seed=i), "PNG" if "PNG" in name else "JPEG"))
    return tmp_path / "photos"


def names(paths, folder):
    return [str(path.relative_to(folder)) for path in paths]


def test_listed_takes_files_folders_and_stdin(folder, monkeypatch, tmp_path):
    assert names(listed(folder), folder) == ["cat/c.jpeg", "dog/b.PNG", "dog/deep/a.jpg"]
    assert names(listed([folder / "dog", str(folder / "cat/notes.txt")]), folder) == [
        "dog/b.PNG",
        "dog/deep/a.jpg",
        "cat/notes.txt",
    ]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a b.jpg\r\n\n\xff.jpg\n-")))
    assert [os.fsencode(path) for path in listed("-")] == [b"a b.jpg", b"\xff.jpg", b"-"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="found no images in the folder"):
        list(listed(tmp_path / "empty"))


def test_labels_from_subfolders(folder):
    dataset = labelled(folder)
    assert names(dataset.paths, folder) == ["cat/c.jpeg", "dog/b.PNG", "dog/deep/a.jpg"]
    assert dataset.labels.tolist() == [0, 1, 1] and dataset.labels.dtype == np.int64 and dataset.names == ["cat", "dog"]


def test_labels_from_a_table(folder):
    (folder / "labels.csv").write_text(
        "\ufefffile,label,author\ndog/b.PNG,388,someone\ncat/c.jpeg, 7 ,\n", encoding="utf-8"
    )
    dataset = labelled(folder)
    assert (
        names(dataset.paths, folder) == ["dog/b.PNG", "cat/c.jpeg"]
        and dataset.labels.tolist() == [388, 7]
        and dataset.names is None
    )
    (folder / "labels.csv").write_text("file,label\ndog/b.PNG,dog\ncat/c.jpeg,cat\n")
    assert labelled(folder).labels.tolist() == [1, 0] and labelled(folder).names == ["cat", "dog"]


@pytest.mark.parametrize(
    "table", ["", "file,label\n", "name,label\na,1\n", "file,label\na.jpg,1\nb.jpg\n", "file,label\n,1\n"]
)
def test_a_table_with_gaps_is_refused(folder, table):
    (folder / "labels.csv").write_text(table)
    with pytest.raises(RequestError, match=r"labels.csv: row \d has no file or no label"):
        labelled(folder)


def test_a_folder_without_labels_is_refused(folder, tmp_path):
    for path in (folder / "dog" / "deep", folder / "missing"):
        with pytest.raises(RequestError, match="has neither labels.csv"):
            labelled(path)
    (folder / "labels.csv").write_bytes(b"file,label\n\xff,1\n")
    with pytest.raises(RequestError, match="cannot read .*labels.csv"):
        labelled(folder)


# ------------------------------------------------------------------------------------------------------------- batches


def port(dtype, *shape):
    return {"image": Port(np.dtype(dtype), shape)}


def test_batches_as_the_graph_takes_them(folder):
    spec = Preprocess(8, 10, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), channels="BGR")
    pixels = np.stack([prepare(path, spec) for path in listed(folder)])
    loaded = list(batches(folder, spec, port(np.uint8, None, 3, 8, 8), 2))
    assert [len(batch["image"]) for batch in loaded] == [2, 1]
    assert np.array_equal(np.concatenate([batch["image"] for batch in loaded]), pixels[:, ::-1])
    assert all(batch["image"].flags.c_contiguous for batch in loaded)
    (last,) = batches(listed(folder), spec, port(np.float32, None, None, None, 3))
    assert last["image"].dtype == np.float32 and np.array_equal(
        last["image"].transpose(0, 3, 1, 2), normalized(pixels, spec)
    )
    (half,) = batches(folder, spec, port(np.float16, 3, None, 8, 8))
    assert half["image"].dtype == np.float16 and half["image"].shape == (3, 3, 8, 8)


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        port(np.uint8, None, 3, 8, 8) | {"mask": Port(np.dtype(np.float32), (None,))},
        port(np.int64, None, 3, 8, 8),
        port(np.float32, None, 3, 9, 9),
        port(np.float32, None, 1, 8, 8),
        port(np.float32, None, None, None, None),
        port(np.float32, None, 192),
    ],
)
def test_graphs_that_take_no_such_image_are_refused(folder, inputs):
    with pytest.raises(
        RequestError, match=r"the graph takes .*; expected one image, uint8 or float, \[n, 3, 8, 8\] or"
    ):
        next(batches(folder, SPEC, inputs))


def test_images_that_cannot_be_read_raise_or_are_listed(folder):
    (folder / "bad.jpg").write_bytes(b"no")
    (folder / "cat" / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    graph = port(np.uint8, None, 3, 8, 8)
    with pytest.raises(RequestError, match=r"bad\.jpg"):
        list(batches(folder, SPEC, graph))
    skipped: list[str] = []
    (batch,) = batches(folder, SPEC, graph, skipped=skipped)
    assert len(batch["image"]) == 3 and len(skipped) == 2 and "bad.jpg" in skipped[0] and "bad.png" in skipped[1]
    with pytest.raises(RequestError, match=r"none of 2 images could be read; first: .*bad\.jpg"):
        list(batches([folder / "bad.jpg", folder / "cat" / "bad.png"], SPEC, graph, skipped=[]))


# ---------------------------------------------------------------------------------------------------------------- real


def damaged(data, i, rng):
    """One kind of damage of a file of bytes."""
    kind, size = i % 5, len(data)
    if kind == 0:  # bits flipped, anywhere or in the header
        changed = bytearray(data)
        for offset in rng.integers(0, size if i % 2 else min(size, 700), 1 + i % 20):
            changed[offset] ^= 1 << int(rng.integers(8))
        return bytes(changed)
    if kind == 1:
        return data[: int(rng.integers(0, size))]
    if kind == 2:  # cut, and ended as if nothing were missing
        return data[: int(rng.integers(0, size))] + b"\xff\xd9"
    if kind == 3:  # a piece is missing, or is noise
        start = int(rng.integers(0, size))
        length = int(rng.integers(1, 2000))
        return data[:start] + (rng.bytes(length) if i % 2 else b"") + data[start + length :]
    image = Image.open(io.BytesIO(data))
    other = encoded(image, ["PNG", "GIF", "BMP", "TIFF", "WEBP"][i // 5 % 5]) if i % 3 else rng.bytes(5000)
    return damaged(other, int(rng.integers(4)), rng)


@pytest.mark.data
def test_a_thousand_damaged_photos_give_an_image_or_one_line(shared, tmp_path):
    photos, rng = sorted((shared / "data/imagenet/nips17").glob("*.jpg")), np.random.default_rng(0)
    refused = 0
    for i in range(1000):
        path = tmp_path / f"{i}.jpg"
        path.write_bytes(damaged(photos[i % len(photos)].read_bytes(), i, rng))
        try:
            prepared = prepare(path, Preprocess(224, 256))
            assert prepared.shape == (3, 224, 224)
        except RequestError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused += 1
    assert 500 < refused < 1000


@pytest.mark.data
def test_photos_have_the_pixels_of_pillow(shared):
    for path in sorted((shared / "data/imagenet/nips17").glob("*.jpg"))[::10]:
        with Image.open(path) as image:
            assert np.array_equal(decode(path), np.asarray(image.convert("RGB")))
            for spec in (Preprocess(224, 256), Preprocess(224, 0, "bicubic"), Preprocess(128, 160, "bicubic")):
                assert np.array_equal(prepare(path, spec), obvious(image.convert("RGB"), spec))
