"""Image classification handler."""

from __future__ import annotations

from email.parser import BytesParser
from typing import Any, ClassVar

import numpy as np

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import Handler, ParsedJob
from zoo.serving.protocol import responses
from zoo.serving.workers.channel import Job
from zoo.vision.inference import TOP, ImagePipeline

MULTIPART = "multipart/form-data"
MAX_IMAGES = 256  # of one request


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
    """Names and contents of the files in a multipart body."""
    head = b"Content-Type: " + job.content_type.encode("latin-1", "replace") + b"\r\n\r\n"
    message = BytesParser().parsebytes(head + job.body)
    if not message.is_multipart():
        raise RequestError("the body is no multipart/form-data: no part was found")
    files = []
    for part in message.get_payload():
        content = part.get_payload(decode=True)  # type: ignore[union-attr]
        if isinstance(content, bytes) and content:
            files.append((part.get_filename() or "", content))  # type: ignore[union-attr]
    if not 1 <= len(files) <= MAX_IMAGES:
        raise RequestError(f"the body has {len(files)} images; expected 1 to {MAX_IMAGES}")
    return files
