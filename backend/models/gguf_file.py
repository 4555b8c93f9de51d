"""The GGUF container: metadata and tensors of one file.

The header is parsed here, in a twentieth of the time that `gguf.GGUFReader` spends on a vocabulary of 50k strings;
block formats and their dequantisation are the package's. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize, quant_shape_to_byte_shape
from torch import Tensor

from kvproof.backend.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)

SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in PyTorch's order, outermost dimension first; `offset` counts from the file's
    first byte."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `metadata` by key and `tensors` by name.

    Raises `CheckpointError` if it is not one, or not all of one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise CheckpointError(f"{path}: not a GGUF file")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self.tensors = _parse(self._data)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
        except (struct.error, ValueError, IndexError) as error:
            raise CheckpointError(f"{path}: damaged or truncated GGUF file: {error}") from error

    def tensor(self, name: str) -> Tensor:
        """A copy of the tensor in float32, whatever it is stored as. Raises `CheckpointError` for a block format
        that the gguf package can't dequantise."""
        info = self.tensors[name]
        stored = np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)
        try:
            values = dequantize(stored.reshape(quant_shape_to_byte_shape(info.shape, info.kind)), info.kind)
        except NotImplementedError:
            raise CheckpointError(f"{self.path}: tensor {name!r} is {info.kind.name}, which isn't supported") from None
        return torch.from_numpy(values if values.flags.writeable else values.copy()).view(info.shape)


class _Cursor:
    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self.data = data
        self.offset = offset

    def read(self, layout: str) -> Any:
        """The one little-endian value of the struct format `layout`."""
        return self.read_many(layout)[0]

    def read_many(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{layout}")
        return values

    def string(self) -> str:
        start = self.offset + 8
        end = start + self.read("Q")
        if end > len(self.data):
            raise ValueError(f"a string of {end - start} bytes at {start} reaches past the end")
        self.offset = end
        return self.data[start:end].decode()

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.read(SCALARS[kind])
        element, count = GGUFValueType(self.read("I")), self.read("Q")
        if element is GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        if element is GGUFValueType.ARRAY:
            raise ValueError("an array of arrays")
        return list(self.read_many(f"{count}{SCALARS[element]}"))


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    cursor = _Cursor(data, len(MAGIC))
    if (version := cursor.read("I")) not in VERSIONS:
        raise ValueError(f"version {version}, supported are {VERSIONS}")
    num_tensors, num_keys = cursor.read_many("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(GGUFValueType(cursor.read("I")))

    stored: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        shape = cursor.read_many(f"{cursor.read('I')}Q")[::-1]
        if name in stored:
            raise ValueError(f"tensor {name!r} occurs twice")
        stored[name] = GGMLQuantizationType(cursor.read("I")), shape, cursor.read("Q")

    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {}
    for name, (kind, shape, offset) in stored.items():
        num_bytes = prod(quant_shape_to_byte_shape(shape, kind))
        if start + offset + num_bytes > len(data):
            raise ValueError(f"tensor {name!r} reaches past the end")
        tensors[name] = TensorInfo(kind, shape, start + offset, num_bytes)
    return metadata, tensors
