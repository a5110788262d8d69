"""Inference of image networks from ONNX files: from images to boxes, masks, classes or embeddings."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, ZooError
from pipelines.data.images import Pixels, as_pixels
from pipelines.engines.session import BF16
from zoo.vision.data.sources import as_text, raw_images
from zoo.vision.inference import ImagePipeline, Loaded, best_classes
from zoo.vision.networks import conventions, drawing
from zoo.vision.networks.heads import (
    ClassHead,
    DetectionHead,
    EmbeddingHead,
    Head,
    MapHead,
    Outputs,
)
from zoo.vision.networks.masks import run_lengths
from zoo.vision.networks.transforms import Placement

if TYPE_CHECKING:
    from zoo.vision.networks.family import NetworkFile

CORNERS = ("xmin", "ymin", "xmax", "ymax")
UNKNOWN_SIDE = 640  # pixels; side of example images for inputs of any size


class Context(NamedTuple):
    """Data of an image that postprocessing needs.

    Attributes:
        place: Its place in the input.
        pixels: uint8 [height, width, 3] to draw on; None without `--draw`.
    """

    place: Placement
    pixels: Pixels | None = None


class NetworkPipeline(ImagePipeline):
    """Runs a network that is one ONNX file; see `zoo.pipeline`.

    Results of an image are, in the names of transformers: for "detect" a list of {"score", "label", "box": {"xmin",
    "ymin", "xmax", "ymax"}} in pixels of the image, the highest score first; for "segment" with "mask", a Pillow image
    of 0 and 255 of the image's size, without "box" and with the score None where classes of pixels are computed; for
    "classify" {"label", "index", "probability", "top5"}; for "embed" {"embedding": float32 [width]}.
    """

    BATCH_SIZE: ClassVar[int] = 1
    DOING: ClassVar[str] = "processing"
    folder: NetworkFile
    drawn: Path | None = None  # folder of `--draw`

    def __init__(
        self, folder: NetworkFile, precision: str = "int8", engine: str = "auto", threads: int = 1,
        batch_size: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.signature = folder.signature
        own = precision != BF16  # the file as it is
        if own:
            precision = "int8" if self.signature.precision == "int8" else "fp32"
        super(ImagePipeline, self).__init__(
            folder, precision, engine, threads, self.signature.most or batch_size, **options
        )
        if own:
            self.precision = self.signature.precision
        self.smallest, self._names, self._taken = 0, [], set[str]()
        self.transform = folder.transform
        self.task, self.head = self._recognized()
        if isinstance(self.head, DetectionHead) and self.head.alone:
            self.batch_size = 1
        elif self.transform.size == (0, 0) and self.batch_size > 1:
            raise RequestError(
                f"found the batch size {self.batch_size}; expected 1, since {folder.file.name} takes images of any size"
            )

    def _recognized(self) -> tuple[str, Head]:
        signature, names = self.signature, self.folder.labels
        size = None if self.transform.size == (0, 0) else self.transform.size
        if conventions.missing(signature):
            signature = conventions.with_shapes(signature, self.predict(self.blank()))
        return conventions.recognize(signature, self.folder.task, None if names is None else len(names), size)

    # ---------------------------------------------------------------------------------------------------------- inputs

    @property
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """Inputs of the file."""
        return {name: (port.dtype, port.shape) for name, port in self.signature.inputs.items()}

    def blank(self) -> Batch:
        """Returns a batch of black images."""
        pixels = self._slots(self.batch_size)
        black = np.zeros((self.side, self.side, 3), np.uint8)
        return self._batch(pixels, [self.fill(black, pixels, index).place for index in range(self.batch_size)])

    @property
    def side(self) -> int:
        """Longer side of the input, in pixels."""
        return max(self.transform.size) or UNKNOWN_SIDE

    def _slots(self, count: int) -> NDArray[Any]:
        """Slots of prepared images; objects where images have any size."""
        height, width = self.transform.size
        if not height:
            return np.empty(count, object)
        shape = (height, width, 3) if self.signature.channels_last else (3, height, width)
        return np.empty((count, *shape), self.signature.inputs[self.signature.image].dtype)

    def fill(self, decoded: Pixels, pixels: NDArray[Any], index: int) -> Context:
        """See `ImagePipeline`."""
        resized, place = self.transform.apply(decoded)
        values = self.transform.values(resized, self.signature.inputs[self.signature.image].dtype)
        pixels[index] = values.transpose(1, 2, 0) if self.signature.channels_last else values
        return Context(place, decoded if self.drawn is not None else None)

    def _batch(self, pixels: NDArray[Any], places: Sequence[Placement]) -> dict[str, NDArray[Any]]:
        """Returns the inputs of the network for prepared images."""
        if pixels.dtype == object:
            if len({image.shape for image in pixels}) > 1:
                raise RequestError(f"{self.folder.file.name} takes images of one size a batch; give them one by one")
            pixels = np.stack([*pixels])
        batch = {self.signature.image: pixels if self.signature.batched else pixels[0]}
        for (
            name,
            port,
        ) in self.signature.inputs.items():  # the size of the images, of networks that scale boxes themselves
            if name != self.signature.image:
                batch[name] = np.array([(place.width, place.height) for place in places], port.dtype)
        return batch

    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """Prepares images; see `ImagePipeline.preprocess`.

        Args:
            raw: `Path` of a file or folder, content of an image file, pixels uint8 [h, w, 3] (RGB) or [h, w], a Pillow
                image, or a list of these.

        Returns:
            Array of every input of the network, first axis = images.

        Raises:
            RequestError: An image is unreadable, there are no images, or they differ in size and the network takes one
                size a batch.
        """
        return self.prepared(raw)[0]

    def prepared(self, raw: Any) -> tuple[dict[str, NDArray[Any]], list[Context]]:
        """Prepares images, with the context for their postprocessing.

        Args:
            raw: See `preprocess`.

        Returns:
            Inputs of the network, and a context for each image.
        """
        images = [as_pixels(image) for image in raw_images(raw)]
        if not images:
            raise RequestError("found no images")
        if len(images) > 1 and isinstance(self.head, DetectionHead) and self.head.alone:
            raise RequestError(f"found {len(images)} images; {self.folder.file.name} takes one at a time")
        slots = self._slots(len(images))
        contexts = [self.fill(image, slots, index) for index, image in enumerate(images)]
        return self._batch(slots, [context.place for context in contexts]), contexts

    # --------------------------------------------------------------------------------------------------------- outputs

    def __call__(self, raw: Any) -> list[Any]:
        """Runs the network on images.

        Args:
            raw: See `preprocess`; images may differ in size.

        Returns:
            The result of each image.
        """
        results = []
        for image in raw_images(raw):
            batch, contexts = self.prepared([image])
            results += self.results(self.predict(batch), contexts)
        if not results:
            raise RequestError("found no images")
        return results

    def predict(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Runs the network; see `GraphPipeline.predict`. Batches of a fixed size are filled up.

        Args:
            batch: Array of every input.

        Returns:
            Array of every output.
        """
        if not self.signature.batched:
            return self._session.run(batch)
        most, count = self.signature.most, len(next(iter(batch.values())))
        if most is None or not count % most:
            return super().predict(batch)
        added = most - count % most
        filled = {name: np.concatenate([array, array[-1:].repeat(added, axis=0)]) for name, array in batch.items()}
        return {name: array[:count] for name, array in super().predict(filled).items()}

    def compute(self, batch: Loaded) -> dict[str, NDArray[Any]]:
        """See `ImagePipeline`."""
        return self.predict(self._batch(batch.pixels, [context.place for context in batch.contexts]))

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[Any]:
        """Converts outputs to results, as if the images were the inputs of the network: boxes are in their pixels.

        Args:
            out: Outputs of `predict`.

        Returns:
            The result of each image, see the class.
        """
        height, width = self.transform.size if self.transform.size[0] else (self.side, self.side)
        place = Placement(width, height, (1, 1), (0, 0), (height, width))
        return self.results(out, [Context(place)] * (len(next(iter(out.values()))) if self.has_samples else 1))

    @property
    def has_samples(self) -> bool:
        """Whether the first axis of the outputs are the samples."""
        return not (isinstance(self.head, DetectionHead) and self.head.alone)

    def results(self, out: dict[str, NDArray[Any]], contexts: Sequence[Any]) -> list[Any]:
        """See `ImagePipeline`."""
        return [self._result(outputs, context) for outputs, context in zip(self._images_of(out), contexts, strict=True)]

    def _images_of(self, out: Outputs) -> Iterator[Outputs]:
        if not self.has_samples:
            yield out
            return
        for i in range(len(next(iter(out.values())))):
            yield {name: array[i] for name, array in out.items()}

    def _result(self, out: Outputs, context: Context) -> Any:
        head = self.head
        if isinstance(head, DetectionHead):
            return self._detections(head, out, context.place)
        if isinstance(head, MapHead):
            pixels = head.map(out, context.place)
            classes = [index for index in np.unique(pixels).tolist() if index >= 0]
            return [{"score": None, "label": self.name(index), "mask": _image(pixels == index)} for index in classes]
        if isinstance(head, ClassHead):
            scores = out[head.output].ravel().astype(np.float32, copy=False)
            return best_classes(scores, self.names(len(scores)), bool(head.activation))
        return {"embedding": head.embedding(out)}

    def _detections(self, head: DetectionHead, out: Outputs, place: Placement) -> list[dict[str, Any]]:
        hits = head.detections(out, place.size, self.folder.thresholds)
        if not np.isfinite(hits.boxes).all():
            raise ZooError("the network computes NaN or infinite boxes; check its weights and the input")
        if not head.original:
            hits = type(hits)(place.boxes(hits.boxes), hits.scores, hits.classes, hits.extra)
        results = [
            {
                "score": score,
                "label": self.name(index),
                "box": dict(zip(CORNERS, (round(side, 2) for side in box), strict=True)),
            }
            for score, index, box in zip(hits.scores.tolist(), hits.classes.tolist(), hits.boxes.tolist(), strict=True)
        ]
        if not head.masked:
            return results
        masks = head.instance_masks(out, hits, place)
        return [result | {"mask": _image(mask)} for result, mask in zip(results, masks, strict=True) if mask.any()]

    # ----------------------------------------------------------------------------------------------------------- names

    @functools.cached_property
    def class_names(self) -> list[str] | None:
        """Class names of the file or of `--labels`; None if there are none."""
        return self.folder.labels

    def name(self, index: int) -> str:
        """Returns the name of a class, "class INDEX" if it has none.

        Args:
            index: Number of the class.
        """
        names = self.folder.labels or []
        return names[index] if 0 <= index < len(names) else f"class {index}"

    def names(self, classes: int) -> list[str]:
        """Returns the names of all classes.

        Args:
            classes: Number of classes of the network.

        Raises:
            RequestError: There is another number of names.
        """
        names = self.folder.labels
        if names is not None and len(names) != classes:
            raise RequestError(
                f"found {len(names)} class names for {classes} classes; give as many names: --labels FILE"
            )
        return [self.name(index) for index in range(classes)]

    @functools.cached_property
    def classes(self) -> int:
        """Number of classes of a classifier, from one inference of black images."""
        assert isinstance(self.head, ClassHead)
        return int(self.predict(self.blank())[self.head.output][0].size)

    # ------------------------------------------------------------------------------------------------------------ runs

    @functools.cached_property
    def columns(self) -> dict[str, Any]:
        """See `ImagePipeline`."""
        if isinstance(self.head, ClassHead):
            return super().columns
        if isinstance(self.head, EmbeddingHead):
            return {"embedding": list}
        boxes = dict.fromkeys(("score", *CORNERS), np.float64) if isinstance(self.head, DetectionHead) else {}
        masked = isinstance(self.head, MapHead) or self.head.masked
        return {"label": str, **boxes, **({"mask": dict} if masked else {})}

    def rows(self, result: Any) -> list[dict[str, Any]]:
        """See `ImagePipeline`: a row a detection or class, with masks as COCO's run lengths."""
        if isinstance(self.head, ClassHead):
            return super().rows(result)
        if isinstance(self.head, EmbeddingHead):
            return [{"embedding": result["embedding"].astype(str).astype(np.float64).tolist()}]
        rows = []
        for entry in result:
            row = {"label": entry["label"]}
            if "box" in entry:
                row |= {"score": entry["score"], **entry["box"]}
            if "mask" in entry:
                row["mask"] = run_lengths(np.asarray(entry["mask"]) > 0)
            rows.append(row)
        return rows

    def run(
        self, inputs: Any, output: str | Path, on_error: str = "skip", *, draw: str | None = None
    ) -> dict[str, Any]:
        """Runs the network on any number of images in constant memory and input order.

        Writes the column file, and for "detect" label, score, xmin, ymin, xmax and ymax, a row a detection; for
        "segment" also mask, COCO's compressed run lengths; for "classify" the columns of `ImagePipeline.run`; for
        "embed" embedding. An image in which nothing is found has a row without a label; an unreadable one has error.

        Args:
            inputs: Image files and folders (see `pipelines.data.images.listed`), or `Item`s.
            output: Output file; "-" for stdout.
            on_error: "raise" to stop at the first unreadable image, "skip" to write it with its error.
            draw: Folder for the images with their results drawn on them; None for none.

        Returns:
            Summary, see `ImagePipeline.run`.

        Raises:
            RequestError: No image is readable, or the folder cannot be written.
        """
        configured = copy.copy(self)
        if draw is not None:
            if isinstance(self.head, EmbeddingHead):
                raise RequestError("--draw needs boxes, masks or classes; an embedding has none of them")
            configured.drawn, configured._taken = Path(draw), set()
        return super(NetworkPipeline, configured).run(inputs, output, on_error)

    def _cells(self, columns: Mapping[str, Any], batch: Loaded, results: list[Any]) -> dict[str, list[Any]]:
        if self.drawn is not None:
            readable = [name for name, fault in zip(batch.names, batch.faults, strict=True) if not fault]
            for name, context, result in zip(readable, batch.contexts, results, strict=True):
                drawn = result if isinstance(result, list) else [result | {"score": result["probability"]}]
                picture = drawing.draw(context.pixels, drawn, self.folder.labels or ())
                drawing.save(picture, self.drawn, as_text(name), self._taken)
        return super()._cells(columns, batch, results)


def _image(mask: NDArray[np.bool_]) -> Image.Image:
    """A mask as transformers returns it."""
    return Image.fromarray(mask.astype(np.uint8) * np.uint8(255))
