"""Image classification handler."""

from __future__ import annotations

from email.parser import BytesParser
from typing import Any, ClassVar

import numpy as np

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import Parsed, Service
from zoo.serving.protocol import responses
from zoo.serving.workers.channel import Job
from zoo.vision.inference import TOP, ImagePipeline

MULTIPART = "multipart/form-data"
MOST = 256  # images of one request


class Photos(Service):
    """Labels of the images in a body: one image's bytes, or several as multipart/form-data."""

    kinds: ClassVar[tuple[str, ...]] = ("image/*", MULTIPART)
    pipeline: ImagePipeline

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """The pixels of the images, and their names."""
        parts = _parts(job) if job.kind.lower().startswith("multipart/") else [("", job.body)]
        found = []
        for name, content in parts:
            try:
                found.append(self.pipeline.preprocess(content)["image"])
            except RequestError as error:
                raise RequestError(f"{name}: {error}" if name else str(error)) from error
        return {"image": found[0] if len(found) == 1 else np.concatenate(found)}, [name for name, _ in parts]

    def table(self, parsed: Parsed, out: Batch) -> responses.Columns:
        """The columns that `zoo run` writes: file, label, index, probability, and those of the classes next in line."""
        found = self.pipeline.postprocess(dict(out))
        columns: dict[str, list[Any]] = {
            **({"file": parsed.about} if any(parsed.about) else {}),
            "label": [each["label"] for each in found],
            "index": [each["index"] for each in found],
            "probability": [each["probability"] for each in found],
        }
        for i in range(1, min(TOP, len(found[0]["top5"]))):
            columns[f"label{i + 1}"] = [each["top5"][i][0] for each in found]
            columns[f"probability{i + 1}"] = [each["top5"][i][1] for each in found]
        return columns


def _parts(job: Job) -> list[tuple[str, bytes]]:
    """Names and contents of the files in a multipart body."""
    head = b"Content-Type: " + job.kind.encode("latin-1", "replace") + b"\r\n\r\n"
    message = BytesParser().parsebytes(head + job.body)
    if not message.is_multipart():
        raise RequestError("the body is no multipart/form-data: no part was found")
    parts = []
    for part in message.get_payload():
        content = part.get_payload(decode=True)  # type: ignore[union-attr]
        if isinstance(content, bytes) and content:
            parts.append((part.get_filename() or "", content))  # type: ignore[union-attr]
    if not 1 <= len(parts) <= MOST:
        raise RequestError(f"the body has {len(parts)} images; wanted 1 to {MOST}")
    return parts
