"""Tensors read and written piece by piece with numpy, so that converting a drafter takes the memory of one piece.

A piece is a flat array of at most PIECE elements. bfloat16, which numpy lacks, travels as its uint16 bits.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import TensorRef, read_header

Array = npt.NDArray[Any]

PIECE = 1 << 22
"""Elements read at once: 16 MiB of float32."""

STORAGE: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
"""safetensors dtype -> the array type of its pieces."""

FLOATS = ("F32", "BF16", "F16")
"""Floating-point dtypes that a drafter may come in."""

TORCH_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Name in config.json -> name in a safetensors header."""


class Tensor(Protocol):
    """A named tensor whose values are read only when asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def origin(self) -> str: ...

    def pieces(self) -> Iterator[Array]:
        """The values in order, as flat arrays of STORAGE[dtype]."""
        ...


@dataclass(frozen=True)
class FileTensor:
    """A tensor inside a safetensors file; `offset` counts bytes from the start of the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def origin(self) -> str:
        """Where it lies, for messages."""
        return f"{self.name} in {self.file}"

    def pieces(self) -> Iterator[Array]:
        """The values in order, as flat arrays of STORAGE[dtype]."""
        if self.dtype not in STORAGE:
            raise DraftsmithError(
                "a tensor has a dtype that drafters do not come in",
                where=self.origin,
                found=self.dtype,
                expected=", ".join(STORAGE),
            )
        storage, left = STORAGE[self.dtype], prod(self.shape)
        with self.file.open("rb") as handle:
            handle.seek(self.offset)
            while left:
                piece = np.fromfile(handle, dtype=storage, count=min(PIECE, left))
                if not piece.size:
                    raise DraftsmithError("the file ends inside a tensor", where=self.origin, mend="fetch it again")
                left -= piece.size
                yield piece


@dataclass(frozen=True)
class ValueTensor:
    """A small tensor that was derived from others; `origin` says from which."""

    values: Array
    origin: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> str:
        """Its safetensors dtype."""
        return next(name for name, storage in STORAGE.items() if storage == self.values.dtype and name != "BF16")

    def pieces(self) -> Iterator[Array]:
        """The values in order, in one piece."""
        yield self.values.reshape(-1)


@dataclass(frozen=True)
class CastTensor:
    """`source` in another floating-point dtype, rounded to nearest even, every value checked to be finite."""

    name: str
    source: Tensor
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return self.source.shape

    @property
    def origin(self) -> str:
        """Where the values come from."""
        return self.source.origin

    def pieces(self) -> Iterator[Array]:
        """The cast values in order.

        Raises:
            DraftsmithError: a NaN or an infinity in the source, or a value too large for the new dtype.
        """
        for piece in self.source.pieces():
            values = to_float32(piece, self.source.dtype)
            if not np.isfinite(values).all():
                raise DraftsmithError(
                    f"{self.name} holds values that are not finite",
                    where=self.origin,
                    found=f"{int((~np.isfinite(values)).sum()):,} NaN or infinite values in one piece",
                    expected="finite values",
                    mend="convert an earlier checkpoint; this one diverged",
                )
            cast = piece if self.source.dtype == self.dtype else from_float32(values, self.dtype)
            if not np.isfinite(to_float32(cast, self.dtype)).all():
                raise DraftsmithError(
                    f"{self.name} holds values too large for {self.dtype}",
                    where=self.origin,
                    found=f"largest magnitude {float(np.abs(values).max()):g}",
                    mend="convert with --dtype bfloat16 or float32",
                )
            yield cast


def file_tensors(file: Path) -> list[FileTensor]:
    """Every tensor of one safetensors file, by its header alone."""
    header = read_header(file)
    with file.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
    return [
        FileTensor(name, file, tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    ]


def from_ref(ref: TensorRef) -> FileTensor:
    """The same tensor of a target, readable piece by piece."""
    return next(tensor for tensor in file_tensors(ref.file) if tensor.name == ref.name)


def read_array(tensor: Tensor) -> Array:
    """All values of a small tensor in its shape (bfloat16 as bits)."""
    pieces = list(tensor.pieces())
    flat = np.concatenate(pieces) if pieces else np.empty(0, STORAGE[tensor.dtype])
    return flat.reshape(tensor.shape)


def to_float32(piece: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Stored floating-point values as float32 (exact for F32, F16 and BF16)."""
    if dtype == "BF16":
        return (piece.astype(np.uint32) << 16).view(np.float32)
    return piece.astype(np.float32, copy=False)


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> Array:
    """float32 values in STORAGE[dtype], rounded to nearest, ties to even."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(STORAGE[dtype])


def same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same floating-point numbers, piece by piece (dtypes may differ)."""
    if first.shape != second.shape:
        return False
    return all(
        np.array_equal(to_float32(a, first.dtype), to_float32(b, second.dtype))
        for a, b in zip(first.pieces(), second.pieces(), strict=True)
    )


def sha256_tensor(tensor: Tensor) -> str:
    """Hex SHA-256 of a tensor's stored bytes."""
    digest = hashlib.sha256()
    for piece in tensor.pieces():
        digest.update(np.ascontiguousarray(piece).view(np.uint8).data)
    return digest.hexdigest()


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors' values in a file."""
    return sum(prod(tensor.shape) * STORAGE[tensor.dtype].itemsize for tensor in tensors.values())


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], wrote: Callable[[str, int], None] | None = None
) -> dict[str, str]:
    """Write a safetensors file, one piece in memory at a time; returns name -> SHA-256 of the tensor's bytes.

    Wider dtypes come first, then names in order: every tensor is aligned, and equal input gives equal bytes.

    Args:
        wrote: told the tensor's name and the number of bytes after every piece.
    """
    order = sorted(tensors, key=lambda name: (-STORAGE[tensors[name].dtype].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        first, end = end, end + prod(tensor.shape) * STORAGE[tensor.dtype].itemsize
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [first, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    hashes = {}
    with file.open("wb") as handle:
        handle.write(struct.pack("<Q", len(head)) + head)
        for name in order:
            digest = hashlib.sha256()
            for piece in tensors[name].pieces():
                data = np.ascontiguousarray(piece).view(np.uint8).data
                digest.update(data)
                handle.write(data)
                if wrote:
                    wrote(name, len(data))
            hashes[name] = digest.hexdigest()
    return hashes
