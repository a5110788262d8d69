"""Draws the results of image networks on their images."""

from __future__ import annotations

import colorsys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pipelines.core.errors import RequestError
from pipelines.core.files import replacing
from pipelines.data.images import Pixels

OPACITY = 0.45  # of masks
TURN = 0.618034  # of the circle of hues, between a class and the next


def draw(pixels: Pixels, results: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> Image.Image:
    """Draws masks, boxes and labels with their scores.

    Args:
        pixels: uint8 [height, width, 3], RGB.
        results: {"label"} of each, with "score", "box" and "mask", which may be missing.
        names: Class names; classes near each other have different colors.

    Returns:
        The picture.
    """
    canvas = pixels.copy()
    colors = {label: _color(label, names) for label in {str(result["label"]) for result in results}}
    for result in results:
        if result.get("mask") is not None:
            chosen = np.asarray(result["mask"], bool)
            tint = np.array(colors[str(result["label"])]) * OPACITY
            canvas[chosen] = (canvas[chosen] * (1 - OPACITY) + tint).astype(np.uint8)
    picture = Image.fromarray(canvas)
    pen = ImageDraw.Draw(picture)
    thickness = max(round(sum(picture.size) / 700), 2)
    font = ImageFont.load_default(max(sum(picture.size) / 90, 11))
    for result in reversed(results):  # the best on top
        label, box, score = str(result["label"]), result.get("box"), result.get("score")
        text = label if score is None else f"{label} {score:.2f}"
        if box is not None:
            corner = box["xmin"], box["ymin"]
            end = max(box["xmax"], corner[0]), max(box["ymax"], corner[1])
            pen.rectangle((*corner, *end), outline=colors[label], width=thickness)
            _write(pen, text, corner, colors[label], font)
    captions = [result for result in results if result.get("box") is None]
    for i, result in enumerate(captions):  # classes of the whole image or of its pixels
        label, score = str(result["label"]), result.get("score")
        text = label if score is None else f"{label} {score:.2f}"
        _write(pen, text, (0, (i + 1) * (font.getbbox("Ag")[3] + 2 * thickness)), colors[label], font)
    return picture


def save(picture: Image.Image, folder: Path, name: str, used_names: set[str]) -> None:
    """Saves a picture under the name of its image; a name that is taken gets a number.

    Args:
        picture: The picture.
        folder: Folder to write to.
        name: Path or name of the image.
        used_names: Names that are taken, which is added to.

    Raises:
        RequestError: The file cannot be written.
    """
    path = PurePath(name.replace("\\", "/"))
    suffix = path.suffix.lower() if path.suffix.lower() in (".png", ".webp") else ".jpg"
    stem, count = path.stem or "image", 1
    while (file := f"{stem}{f'-{count}' if count > 1 else ''}{suffix}") in used_names:
        count += 1
    used_names.add(file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / file) as temporary:
            picture.save(temporary, {".jpg": "JPEG", ".png": "PNG", ".webp": "WEBP"}[suffix], quality=92)
    except OSError as error:
        raise RequestError(f"cannot write {folder / file}: {error.strerror or error}") from error


def _color(label: str, names: Sequence[str]) -> tuple[int, int, int]:
    """The color of a class, the same on all pictures."""
    position = names.index(label) if label in names else zlib.crc32(label.encode())
    red, green, blue = colorsys.hsv_to_rgb(position * TURN % 1, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def _write(
    pen: ImageDraw.ImageDraw, text: str, corner: tuple[float, float], color: tuple[int, int, int], font: Any
) -> None:
    """Writes a text above a corner, on a ground of the color; below the edge of the image if there is no room."""
    _, _, right, bottom = font.getbbox(text)
    x = max(corner[0], 0)
    y = max(corner[1] - bottom - 2, 0)
    pen.rectangle((x, y, x + right + 4, y + bottom + 2), fill=color)
    dark = sum(color) < 330
    pen.text((x + 2, y), text, fill="white" if dark else "black", font=font)
