"""Base of the readers of other toolkits' models: files and tensors, with all faults collected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.translation.data.text_files import MAX_WARNINGS

Kind = TypeVar("Kind")


def refuse_languages(kind: str, source: str, target: str) -> None:
    """Refuses languages for a model that has no choice of languages.

    Args:
        kind: Kind of model, for the message.
        source: Source language, or "".
        target: Target language, or "".

    Raises:
        RequestError: A language is given.
    """
    for side, language in (("source", source), ("target", target)):
        if language:
            raise RequestError(f"found --{side}-language {language}; {kind} has no languages to choose from")


class ModelReader:
    """Reads the files and tensors of a model and collects their faults.

    Attributes:
        path: The model, for the message.
        folder: Folder of its files.
        faults: All faults so far.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path if path.is_dir() else path.parent
        self.faults: list[str] = []

    def refusal(self) -> RequestError:
        """Returns the error that lists the faults."""
        faults = list(dict.fromkeys(self.faults))
        more = [f"and {len(faults) - MAX_WARNINGS} more"] if len(faults) > MAX_WARNINGS else []
        return RequestError(f"{self.path} cannot be imported: {'; '.join([*faults[:MAX_WARNINGS], *more])}")

    def read_bytes(self, name: str) -> bytes:
        """Reads a file of the folder.

        Args:
            name: Name of the file.

        Returns:
            Its content; b"", with a fault, if it cannot be read or is empty.
        """
        try:
            content = (self.folder / name).read_bytes()
        except OSError as error:
            self.faults.append(f"cannot read {name} ({error.strerror or error})")
            return b""
        if not content:
            self.faults.append(f"{name} is empty")
        return content

    def read_json(self, name: str, kind: type[Kind]) -> Kind:
        """Reads a JSON file of the folder.

        Args:
            name: Name of the file.
            kind: dict or list.

        Returns:
            The value; an empty one, with a fault, if the file holds none of this kind.
        """
        if content := self.read_bytes(name):
            try:
                parsed = json.loads(content.decode())
            except (ValueError, RecursionError) as error:
                self.faults.append(f"{name} is not valid JSON ({error})")
            else:
                if isinstance(parsed, kind):
                    return parsed
                self.faults.append(f"{name} holds no {'object' if kind is dict else 'list'}")
        return kind()

    def fitted(self, name: str, array: NDArray[Any] | None, shape: Sequence[int]) -> NDArray[np.float32]:
        """Checks a tensor.

        Args:
            name: Name of the tensor, for the message.
            array: The tensor; None if the model has none of this name.
            shape: Expected shape; -1: any size.

        Returns:
            The tensor as float32; zeros, with a fault, if it does not fit.
        """
        if array is None:
            self.faults.append(f"{name} is missing")
        elif len(shape) != array.ndim or any(a not in (-1, b) for a, b in zip(shape, array.shape, strict=True)):
            expected = " x ".join("?" if size < 0 else str(size) for size in shape)
            self.faults.append(f"{name} is {' x '.join(map(str, array.shape))}, expected {expected}")
        elif not np.isfinite(array).all():
            self.faults.append(f"{name} holds NaN or infinity")
        else:
            return array.astype(np.float32, copy=not array.flags.writeable)
        return np.zeros([max(size, 1) for size in shape], np.float32)
