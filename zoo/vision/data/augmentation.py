"""Data augmentation on uint8 pixels with Pillow: crops, flips, RandAugment and AugMix."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from zoo.vision.data.datasets import Images, Pixels

GREY = (128, 128, 128)  # fill color outside the image
MAX_MAGNITUDE = 10.0
MIN_AREA = 0.25  # share of an image in a random crop

# Operations take an image, a strength in [0, 1] and a sign of +-1. Strength 1 is the maximum of Cubuk et al. 2020.
Operation = Callable[[Image.Image, float, float], Image.Image]


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=GREY)


def _enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, strength, sign: kind(image).enhance(1 + 0.9 * strength * sign)


GEOMETRIC: dict[str, Operation] = {
    "rotate": lambda image, strength, sign: image.rotate(
        30 * strength * sign, Image.Resampling.BILINEAR, fillcolor=GREY
    ),
    "shear_x": lambda image, strength, sign: _affine(image, 1, 0.3 * strength * sign, 0, 0, 1, 0),
    "shear_y": lambda image, strength, sign: _affine(image, 1, 0, 0, 0.3 * strength * sign, 1, 0),
    "translate_x": lambda image, strength, sign: _affine(image, 1, 0, 0.33 * image.width * strength * sign, 0, 1, 0),
    "translate_y": lambda image, strength, sign: _affine(image, 1, 0, 0, 0, 1, 0.33 * image.height * strength * sign),
}
TONAL: dict[str, Operation] = {
    "autocontrast": lambda image, strength, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, strength, sign: ImageOps.equalize(image),
    "posterize": lambda image, strength, sign: ImageOps.posterize(image, 8 - round(4 * strength)),
    "solarize": lambda image, strength, sign: ImageOps.solarize(image, 256 - round(256 * strength)),
}
ENHANCING: dict[str, Operation] = {
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
}
RANDAUGMENT: tuple[Operation, ...] = (
    lambda image, strength, sign: image,
    *{**GEOMETRIC, **TONAL, **ENHANCING}.values(),
)
AUGMIX: tuple[Operation, ...] = (
    *TONAL.values(),
    *GEOMETRIC.values(),
)  # without operations that resemble the corruptions of its evaluation


def randaugment(image: Image.Image, count: int, magnitude: float, random: np.random.Generator) -> Image.Image:
    """Applies RandAugment (Cubuk et al. 2020, section 3).

    Args:
        image: RGB image.
        count: Number of operations, drawn with replacement (N in the paper).
        magnitude: Strength of every operation, from 0 to 10 (M in the paper).
        random: Random generator.

    Returns:
        The augmented image.
    """
    for _ in range(count):
        image = _apply(RANDAUGMENT, image, magnitude / MAX_MAGNITUDE, random)
    return image


def augmix(
    image: Image.Image, random: np.random.Generator, severity: float = 3, width: int = 3, alpha: float = 1.0
) -> Pixels:
    """Applies AugMix (Hendrycks et al. 2020, algorithm 1).

    Args:
        image: RGB image.
        random: Random generator.
        severity: Maximum strength of an operation, from 0 to 10.
        width: Number of chains of one to three operations.
        alpha: Parameter of the Dirichlet and Beta distributions of the mixing weights.

    Returns:
        Pixels, uint8 [h, w, 3].
    """
    weights, share = random.dirichlet([alpha] * width), random.beta(alpha, alpha)
    original = np.asarray(image, np.float32)
    mixed = np.zeros_like(original)
    for weight in weights:
        chain = image
        for _ in range(random.integers(1, 4)):
            chain = _apply(AUGMIX, chain, random.uniform(0.1, severity) / MAX_MAGNITUDE, random)
        mixed += np.float32(weight) * np.asarray(chain, np.float32)
    return np.asarray(np.rint((1 - share) * original + share * mixed).clip(0, 255), np.uint8)


def _apply(
    operations: tuple[Operation, ...], image: Image.Image, strength: float, random: np.random.Generator
) -> Image.Image:
    return operations[random.integers(len(operations))](image, strength, 1.0 if random.random() < 0.5 else -1.0)


def pad_and_crop(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Crops a random window of the image's size from the image, padded by one eighth with its reflection.

    Args:
        pixels: uint8 [h, w, 3].
        random: Random generator.

    Returns:
        Pixels, uint8 [h, w, 3].
    """
    height, width = pixels.shape[:2]
    top, left = height // 8, width // 8
    padded = np.pad(pixels, ((top, top), (left, left), (0, 0)), mode="reflect")
    y, x = random.integers(2 * top + 1), random.integers(2 * left + 1)
    return padded[y : y + height, x : x + width]


def resized_crop(image: Image.Image, size: int, random: np.random.Generator) -> Image.Image:
    """Crops a random window with aspect ratio 3:4 to 4:3 and resizes it (Szegedy et al. 2015).

    Args:
        image: RGB image.
        size: Height and width of the result, in pixels.
        random: Random generator.

    Returns:
        Image of [size, size]; a center crop if no window fits in 10 draws.
    """
    for _ in range(10):
        area = image.width * image.height * random.uniform(MIN_AREA, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= image.width and 0 < height <= image.height:
            x, y = int(random.integers(image.width - width + 1)), int(random.integers(image.height - height + 1))
            return image.resize((size, size), Image.Resampling.BILINEAR, (x, y, x + width, y + height))
    return ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)


@dataclass(frozen=True)
class AugmentedImages:
    """Augmented training images of one epoch, a data set for `torch.utils.data.DataLoader`.

    The random numbers of an image depend on seed, epoch and index only, not on the worker. Small images are augmented
    before they are resized.

    Attributes:
        images: Training images.
        size: Height and width of the result, in pixels.
        count: RandAugment: operations per image.
        magnitude: RandAugment: magnitude, 0 to 10.
        seed: Random seed.
        epoch: Epoch, from 0.
    """

    images: Images
    size: int
    count: int
    magnitude: float
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, bool]) -> tuple[Pixels, int]:
        """Returns an augmented image.

        Args:
            key: (index, whether to apply AugMix instead of RandAugment).

        Returns:
            Pixels, uint8 [views, size, size, 3], and the label. AugMix has three views, the first one without it.
        """
        index, mixed = key
        random = np.random.default_rng([self.seed, self.epoch, index])
        if self.images.pixels is not None:
            image = Image.fromarray(pad_and_crop(self.images.pixels[index], random))
        else:
            image = resized_crop(
                self.images.image(index, 2 * self.size), self.size, random
            )  # the smallest window has half the height and width
        if random.random() < 0.5:
            image = ImageOps.mirror(image)
        views: list[Image.Image] = [image]
        if mixed:
            views += [Image.fromarray(augmix(image, random)) for _ in range(2)]
        else:
            views = [randaugment(image, self.count, self.magnitude, random)]
        shape = (self.size, self.size)
        resized = [view if view.size == shape else view.resize(shape, Image.Resampling.BILINEAR) for view in views]
        return np.stack([np.asarray(view) for view in resized]), int(self.images.labels[index])
