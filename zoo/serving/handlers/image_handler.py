"""Image classification handler."""

from __future__ import annotations

import binascii
from email.message import Message
from email.parser import BytesHeaderParser
from email.utils import collapse_rfc2231_value
from typing import Any, ClassVar

from pipelines.core.batches import Batch, joined
from pipelines.core.errors import RequestError
from pipelines.data.images import decoding_cost
from zoo.serving.handlers.base import Handler, ParsedJob, require_count
from zoo.serving.protocol import limits, responses
from zoo.serving.workers.channel import Job
from zoo.vision.inference import ImagePipeline
from zoo.vision.networks.pipeline import NetworkPipeline

MULTIPART = "multipart/form-data"
MAX_IMAGES = 256  # of one request
MAX_PART_HEADERS = 1 << 13  # bytes


class ImageHandler(Handler):
    """Classifies images. A body is one image file, or several as multipart/form-data."""

    content_types: ClassVar[tuple[str, ...]] = ("image/*", MULTIPART)
    pipeline: ImagePipeline
    counts: ClassVar[bool] = False  # whether rows have the number of their image, from 1

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """Decodes and preprocesses the images of a body.

        Args:
            job: The job.

        Returns:
            {"image": pixels}, and the file names.

        Raises:
            RequestError: The body is invalid, or an image cannot be decoded.
        """
        files = _files(job) if job.content_type.lower().startswith("multipart/") else [("", "", job.body)]
        cost = 0.0
        for name, field, content in files:
            cost += decoding_cost(content, name or (field and f"the form field {field!r}"))
            limits.PIXELS.require(cost, job.received_bytes)
        batches, contexts = [], []
        for name, _, content in files:
            try:
                batch, context = self.prepared(content)
            except RequestError as error:
                raise RequestError(f"{name}: {error}" if name else str(error)) from error
            batches.append(batch)
            contexts += context
        return self.joined(batches), ([name for name, _, _ in files], contexts)

    def prepared(self, content: bytes) -> tuple[Batch, list[Any]]:
        """Decodes and preprocesses an image.

        Args:
            content: Content of the file.

        Returns:
            Model inputs, and a context for `ImagePipeline.results`.
        """
        return self.pipeline.preprocess(content), [None]

    def joined(self, batches: list[Batch]) -> Batch:
        """Joins the inputs of several images.

        Args:
            batches: Inputs of each image.

        Raises:
            RequestError: The model takes one image at a time.
        """
        return batches[0] if len(batches) == 1 else joined(batches)

    def table(self, parsed: ParsedJob, outputs: Batch) -> responses.Columns:
        """Returns the columns of `zoo run`: file, label, index, probability, and the labels 2 to 5.

        Args:
            parsed: The parsed job.
            outputs: Outputs of the model.

        Returns:
            The columns; without "file" if no file has a name.
        """
        names, contexts = parsed.context
        results = self.pipeline.results(dict(outputs), contexts)
        lines = [
            (number, name, row)
            for number, (name, result) in enumerate(zip(names, results, strict=True), 1)
            for row in self.pipeline.rows(result)
        ]
        numbers = {"row": [number for number, _, _ in lines]} if self.counts else {}
        files = {"file": [name for _, name, _ in lines]} if any(names) else {}
        cells = {column: [row.get(column) for _, _, row in lines] for column in self.pipeline.columns}
        return {**numbers, **files, **cells}


class NetworkHandler(ImageHandler):
    """Runs an image network of an ONNX file. A row of the response is a detection or class, with its image's number."""

    pipeline: NetworkPipeline
    counts = True

    def prepared(self, content: bytes) -> tuple[Batch, list[Any]]:
        """See `ImageHandler`."""
        return self.pipeline.prepared(content)

    def joined(self, batches: list[Batch]) -> Batch:
        """See `ImageHandler`."""
        shapes = {tuple(array.shape[1:] for array in batch.values()) for batch in batches}
        if len(batches) > 1 and (len(shapes) > 1 or not self.pipeline.has_samples):
            raise RequestError(
                f"found {len(batches)} images; {self.name} takes images of one size, so send them one by one"
            )
        return super().joined(batches)

    def warm_up(self) -> None:
        """See `Handler`; outputs without an axis of samples are not joined."""
        super().warm_up()
        if not self.pipeline.has_samples:
            self.max_batch_samples = 1


def _files(job: Job) -> list[tuple[str, str, bytes]]:
    """Names, form fields and contents of the files in a multipart body (RFC 2046, 5.1, and RFC 7578)."""
    head = _headers(b"Content-Type: " + job.content_type.encode("latin-1", "replace"))
    delimiter = b"\n--" + (head.get_boundary() or "").encode("latin-1", "replace")
    if len(delimiter) == 3 or (count := job.body.count(delimiter[1:])) == 0:
        raise RequestError("the body is no multipart/form-data: no part was found")
    require_count(count, MAX_IMAGES + 1, "parts")
    files = []
    for part in (b"\n" + job.body).split(delimiter)[1:]:
        if part.startswith(b"--"):
            break  # the end
        text, _, content = part.partition(b"\r\n\r\n" if b"\r\n\r\n" in part else b"\n\n")
        if len(text) > MAX_PART_HEADERS:
            raise RequestError(f"a part has {len(text):,} bytes of headers, expected at most {MAX_PART_HEADERS:,}")
        headers = _headers(text.lstrip())
        if headers.get_content_maintype() == "multipart":
            raise RequestError("a part is multipart itself, expected an image file")
        content = content.removesuffix(b"\r")
        if (encoding := str(headers.get("content-transfer-encoding", "binary")).strip().lower()) == "base64":
            try:
                content = binascii.a2b_base64(content)
            except binascii.Error as error:
                raise RequestError(f"a part is no base64: {error}") from error
        elif encoding not in ("7bit", "8bit", "binary"):
            raise RequestError(f"a part has the Content-Transfer-Encoding {encoding[:40]!r}, expected binary or base64")
        if content:
            field = headers.get_param("name", "", "content-disposition")
            files.append((headers.get_filename() or "", collapse_rfc2231_value(field), content))
    require_count(len(files), MAX_IMAGES, "images")
    return files


def _headers(text: bytes) -> Message:
    return BytesHeaderParser().parsebytes(text)
