"""Floating point tensors of a safetensors file, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, one_line, requires
from zoo.texts.models.architectures.base import Floats
from zoo.texts.models.config import Adapter

DTYPES = ("F64", "F32", "F16", "BF16")


def read_pickled_layer(file: Path, name: str) -> dict[str, Floats]:
    """Reads a linear layer that torch has saved as a file of its own; nothing in it is executed.

    Args:
        file: The file.
        name: Name of the layer in the result.

    Returns:
        {name.weight, name.bias}, float32.

    Raises:
        RequestError: The file is damaged.
    """
    with requires(f"importing {file.name}", "int8-zoo[import]"):
        import torch
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        return {f"{name}.{key}": state[key].float().numpy() for key in ("weight", "bias")}
    except Exception as error:  # classes of pickle and torch
        raise RequestError(f"cannot read the weights in {file.name} ({one_line(error)}); copy it again") from error


class TensorFile(Mapping[str, Floats]):
    """Float32 tensors of a safetensors file by name, read when they are asked for.

    Tensors of other dtypes than float64, float32, float16 and bfloat16 are ignored. Old parameter names (gamma, beta)
    are translated. Tensors of float32 are maps of the file; of others the last one is kept, as several layers may be
    stored in one.

    Args:
        path: The file.
        renamed: Current parts of names by other parts, beside the old ones.
        adapter: Low-rank adapter that is added to the weights, as torch's parametrizations store it; None for none.

    Attributes:
        others: Dtype of the tensors that are ignored, by name.

    Raises:
        RequestError: The file is damaged or of another format.
    """

    def __init__(self, path: Path, renamed: Mapping[str, str] | None = None, adapter: Adapter | None = None) -> None:
        with requires(path.name, "int8-zoo[texts]"):
            import ml_dtypes  # noqa: F401 (of onnx; registers bfloat16, by which numpy knows the tensors)
            from safetensors import safe_open
        self.path, self.adapter = path, adapter
        self._last: tuple[str, Floats] = ("", np.empty(0, np.float32))
        try:
            self._file = cast("Any", safe_open(path, "numpy"))
            names = list(self._file.keys())
            dtypes = {name: str(self._file.get_slice(name).get_dtype()) for name in names}
            self._content = np.memmap(path, np.uint8, "c")  # changes of an array do not reach the file
            self._start = 8 + int.from_bytes(self._content[:8].tobytes(), "little")
            self._header = json.loads(self._content[8 : self._start].tobytes())
        except Exception as error:  # the library's own class, or OSError
            raise self._damaged(error) from error
        current = {".gamma": ".weight", ".beta": ".bias", **(renamed or {})}
        self._names = {_renamed(name, current): name for name, dtype in dtypes.items() if dtype in DTYPES}
        self.others = {_renamed(name, current): dtype for name, dtype in dtypes.items() if dtype not in DTYPES}

    def _damaged(self, error: Exception) -> RequestError:
        return RequestError(f"cannot read the weights in {self.path} ({one_line(error)}); copy or download it again")

    def __getitem__(self, name: str) -> Floats:
        original = self._names[name]
        if (about := self._header[original])["dtype"] == "F32" and not self._has_adapter(original):
            begin, end = (self._start + offset for offset in about["data_offsets"])
            return np.asarray(self._content[begin:end].view("<f4")).reshape(about["shape"])
        if self._last[0] != name:
            try:
                self._last = name, self._adapted(original, self._read(original))
            except Exception as error:  # of the library
                raise self._damaged(error) from error
        return self._last[1]

    def integers(self, name: str) -> NDArray[np.int64] | None:
        """Reads a tensor of integers; None if there is none.

        Args:
            name: Name of the tensor.

        Raises:
            RequestError: It has another dtype, or the file is damaged.
        """
        if name not in self._header:
            return None
        try:
            tensor = self._file.get_tensor(name)
        except Exception as error:  # of the library
            raise self._damaged(error) from error
        if tensor.dtype.kind not in "iu":
            raise RequestError(f"{self.path} has {name} of {tensor.dtype}, expected integers")
        integers: NDArray[np.int64] = tensor.astype(np.int64)
        return integers

    def row(self, name: str, index: int) -> Floats:
        """Reads a row of a matrix.

        Args:
            name: Name of the tensor.
            index: Number of the row.

        Raises:
            RequestError: There is no such row, or the file is damaged.
        """
        try:
            row: Floats = self._file.get_slice(self._names[name])[index : index + 1].astype(np.float32)[0]
        except Exception as error:  # of the library
            raise self._damaged(error) from error
        return row

    def _read(self, original: str) -> Floats:
        tensor: Floats = self._file.get_tensor(original).astype(np.float32, copy=False)
        return tensor

    def _has_adapter(self, original: str) -> bool:
        return self.adapter is not None and f"{original.removesuffix('original')}0.lora_A" in self._header

    def _adapted(self, original: str, weight: Floats) -> Floats:
        """Returns W + scale B A for a linear layer, E + scale A B for an embedding; other tensors as they are."""
        if self.adapter is None or not self._has_adapter(original):
            return weight
        stem = original.removesuffix("original")
        a, b = (self._read(f"{stem}0.{key}")[self.adapter.index] for key in ("lora_A", "lora_B"))
        product: Floats = a @ b if len(a) == len(weight) else b @ a
        adapted: Floats = weight + np.float32(self.adapter.scale) * product
        return adapted

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for part, current in parts.items():
        name = name.replace(part, current)
    return name
