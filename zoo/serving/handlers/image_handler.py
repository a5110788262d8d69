"""Image classification handler."""

from __future__ import annotations

import binascii
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any, ClassVar

import numpy as np

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.data.images import decoding_cost
from zoo.serving.handlers.base import Handler, ParsedJob, require_count
from zoo.serving.protocol import limits, responses
from zoo.serving.workers.channel import Job
from zoo.vision.inference import TOP, ImagePipeline

MULTIPART = "multipart/form-data"
MAX_IMAGES = 256  # of one request
MAX_PART_HEADERS = 1 << 13  # bytes


class ImageHandler(Handler):
    """Classifies images. A body is one image file, or several as multipart/form-data."""

    content_types: ClassVar[tuple[str, ...]] = ("image/*", MULTIPART)
    pipeline: ImagePipeline

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """Decodes and preprocesses the images of a body.

        Args:
            job: The job.

        Returns:
            {"image": pixels}, and the file names.

        Raises:
            RequestError: The body is invalid, or an image cannot be decoded.
        """
        files = _files(job) if job.content_type.lower().startswith("multipart/") else [("", job.body)]
        cost = 0.0
        for name, content in files:
            cost += decoding_cost(content, name)
            limits.PIXELS.require(cost, job.received_bytes)
        images = []
        for name, content in files:
            try:
                images.append(self.pipeline.preprocess(content)["image"])
            except RequestError as error:
                raise RequestError(f"{name}: {error}" if name else str(error)) from error
        return {"image": images[0] if len(images) == 1 else np.concatenate(images)}, [name for name, _ in files]

    def table(self, parsed: ParsedJob, outputs: Batch) -> responses.Columns:
        """Returns the columns of `zoo run`: file, label, index, probability, and the labels 2 to 5.

        Args:
            parsed: The parsed job.
            outputs: Outputs of the model.

        Returns:
            The columns; without "file" if no file has a name.
        """
        results = self.pipeline.postprocess(dict(outputs))
        columns: dict[str, list[Any]] = {
            **({"file": parsed.context} if any(parsed.context) else {}),
            "label": [result["label"] for result in results],
            "index": [result["index"] for result in results],
            "probability": [result["probability"] for result in results],
        }
        for i in range(1, min(TOP, len(results[0]["top5"]))):
            columns[f"label{i + 1}"] = [result["top5"][i][0] for result in results]
            columns[f"probability{i + 1}"] = [result["top5"][i][1] for result in results]
        return columns


def _files(job: Job) -> list[tuple[str, bytes]]:
    """Names and contents of the files in a multipart body (RFC 2046, 5.1, and RFC 7578)."""
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
            files.append((headers.get_filename() or "", content))
    require_count(len(files), MAX_IMAGES, "images")
    return files


def _headers(text: bytes) -> Message:
    return BytesHeaderParser().parsebytes(text)
