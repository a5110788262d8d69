"""The resize of images: Pillow's bits, in numpy and in every version of the native kernel."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.images import reference
from pipelines.kernels.images.native import resize
from pipelines.kernels.images.operators import Resize

ISAS = extension.isas()
needs_kernels = pytest.mark.skipif(not ISAS, reason=f"no native kernels: {extension.missing()}")


def pillow(image, resizing):
    """Pillow's result, [3, h, w]. One axis at a time: from release 13 it begins with the columns of images that shrink
    most there.
    """
    (width, height), filtered = (
        resizing.size,
        Image.Resampling.BICUBIC if resizing.bicubic else Image.Resampling.BILINEAR,
    )
    x0, y0, x1, y1 = resizing.box or (0, 0, image.shape[1], image.shape[0])
    half = Image.fromarray(image).resize((width, len(image)), filtered, box=(x0, 0, x1, len(image)))
    return np.asarray(half.resize((width, height), filtered, box=(0, y0, width, y1)).crop(resizing.crop)).transpose(
        2, 0, 1
    )


def native(image, resizing, isa=""):
    left, top, right, bottom = resizing.crop
    out = np.empty((3, bottom - top, right - left), np.uint8)
    resize(image, resizing, out, isa)
    return out


def drawn(seed, largest):
    """A random image and what becomes of it: up and down, crops, boxes; half of them are black and white, for the
    cubic's overshoot.
    """
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, largest, 2)
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if rng.integers(2):
        image = np.where(image > 127, 255, 0).astype(np.uint8)
    size = tuple(int(side) for side in rng.integers(1, largest, 2))
    begin = [int(rng.integers(0, side)) for side in size]
    end = [int(rng.integers(first + 1, side + 1)) for first, side in zip(begin, size, strict=True)]
    box = None
    if rng.integers(2):
        (x0, x1), (y0, y1) = np.sort(rng.random(2) * width), np.sort(rng.random(2) * height)
        box = (float(x0), float(y0), float(x1), float(y1))
    return image, Resize(size, (*begin, *end), bool(rng.integers(2)), box)


@given(st.integers(0, 2**32), st.sampled_from([8, 40, 200]))
def test_reference_has_the_bits_of_pillow(seed, largest):
    image, resizing = drawn(seed, largest)
    assert np.array_equal(reference.resize(image, resizing), pillow(image, resizing))


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@given(seed=st.integers(0, 2**32), largest=st.sampled_from([8, 40, 200, 400]))
def test_native_has_the_bits_of_pillow(isa, seed, largest):
    image, resizing = drawn(seed, largest)
    assert np.array_equal(native(image, resizing, isa), pillow(image, resizing))


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize(
    ("shape", "size", "crop"),
    [
        ((299, 299), (256, 256), (16, 16, 240, 240)),
        ((375, 500), (341, 256), (58, 16, 282, 240)),
        ((32, 32), (224, 224), (0, 0, 224, 224)),
        ((224, 224), (224, 224), (0, 0, 224, 224)),
        ((1, 1), (5, 7), (0, 0, 5, 7)),
        ((15, 700), (64, 64), (0, 0, 64, 64)),
        ((700, 15), (64, 64), (3, 0, 64, 61)),
        ((1, 4000), (256, 1), (0, 0, 256, 1)),
        ((3, 2), (20000, 30000), (9000, 20000, 9016, 20017)),
    ],
)
def test_shapes_that_models_and_odd_files_have(isa, bicubic, shape, size, crop):
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    resizing = Resize(size, crop, bicubic)
    wanted = reference.resize(image, resizing) if size[0] > 10000 else pillow(image, resizing)
    assert np.array_equal(native(image, resizing, isa), wanted)


@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("shape", [(299, 299), (375, 500), (500, 375), (600, 300)])
def test_one_call_of_pillow_agrees_for_photos(bicubic, shape):
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    resizing = Resize((256, 256 * shape[0] // shape[1]), (0, 0, 256, 1), bicubic)
    resized = Image.fromarray(image).resize(
        resizing.size, Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    )
    assert np.array_equal(np.asarray(resized.crop(resizing.crop)).transpose(2, 0, 1), reference.resize(image, resizing))


@needs_kernels
def test_a_slot_of_a_batch_is_written_and_nothing_else():
    image, batch = np.full((50, 60, 3), 9, np.uint8), np.zeros((3, 3, 20, 20), np.uint8)
    resize(image, Resize((24, 20), (2, 0, 22, 20)), batch[1])
    assert (batch[1] == 9).all() and not batch[[0, 2]].any()


@needs_kernels
def test_threads_have_memory_of_their_own():
    work = [drawn(seed, 300) for seed in range(16)]
    resized = [None] * len(work)

    def run(i):
        for _ in range(5):
            resized[i] = native(*work[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(got, native(*arguments)) for got, arguments in zip(resized, work, strict=True))


@needs_kernels
def test_arguments_are_checked_before_memory_is_read():
    image, out = np.zeros((8, 8, 3), np.uint8), np.zeros((3, 4, 4), np.uint8)
    fine = Resize((4, 4), (0, 0, 4, 4))
    resize(image[::2], fine, out)  # any strides: it is copied
    for wrong in (image[:, :, :2], image[:0], image[:, :0], np.zeros((1, 2**24 + 1, 3), np.uint8)):
        with pytest.raises(ValueError, match="expected an image"):
            resize(wrong, fine, out)
    with pytest.raises(TypeError, match="image has another type"):
        resize(image.astype(np.float32), fine, out)
    for box in ((0, 0, 9, 8), (-1, 0, 8, 8), (4, 0, 4, 8), (0, 5, 8, 3), (0, 0, float("nan"), 8)):
        with pytest.raises(ValueError, match="a box within it"):
            resize(image, Resize((4, 4), (0, 0, 4, 4), box=box), out)
    for shape in ((3, 4, 5), (3, 3, 4), (4, 4, 4)):
        with pytest.raises(ValueError, match="the output has another shape"):
            resize(image, fine, np.zeros(shape, np.uint8))
    read_only = np.zeros((3, 4, 4), np.uint8)
    read_only.flags.writeable = False
    for bad in (np.zeros((3, 4, 4), np.int8), np.zeros((3, 8, 4), np.uint8)[:, ::2], read_only):
        with pytest.raises(TypeError):
            resize(image, fine, bad)
    with pytest.raises(ValueError, match="no kernels for sse9"):
        resize(image, fine, out, "sse9")


@pytest.mark.parametrize("crop", [(0, 0, 5, 4), (0, 0, 4, 5), (-1, 0, 3, 4), (2, 0, 2, 4), (0, 3, 4, 1)])
def test_a_crop_outside_of_the_image_is_refused(crop):
    with pytest.raises(RequestError, match="cannot crop"):
        Resize((4, 4), crop)
