"""Tensors read and written piece by piece with numpy, so that converting a drafter takes the memory of one piece.

A piece is a flat array of at most PIECE elements. bfloat16, which numpy lacks, travels as its uint16 bits.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import TensorRef, tensors_of

Array = npt.NDArray[Any]

PIECE = 1 << 18
"""Elements read at once: 512 KiB of bfloat16, which stay in the cache from reading to writing."""

STORAGE: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
"""safetensors dtype -> the array type of its pieces."""

FLOATS = ("F32", "BF16", "F16")
"""Floating-point dtypes that a drafter may come in."""

TORCH_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Name in config.json -> name in a safetensors header."""


DEPTH = 3
"""Pieces on their way to the disk at once."""

FLUSH_BYTES = 1 << 27
"""Bytes after which the disk is told to write, so that the last flush does not wait for all of it."""

BLOCK = 1 << 17
"""Elements computed on at once: what fits into a core's cache."""

_EXPONENTS: dict[str, tuple[Any, Any, Any]] = {
    "F32": (np.uint32, np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)),
    "BF16": (np.uint16, np.uint16(0x7FFF), np.uint16(0x7F80)),
    "F16": (np.uint16, np.uint16(0x7FFF), np.uint16(0x7C00)),
}
"""dtype -> unsigned type of the same width, mask of everything but the sign, and the bits of infinity."""


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
        storage, left = storage_type(self.dtype, self.origin), prod(self.shape)
        with self.file.open("rb", buffering=0) as handle:
            offset = self.offset
            while left:
                piece = np.empty(min(PIECE, left), storage)
                read_into(piece, handle.fileno(), offset, self.origin)
                left, offset = left - piece.size, offset + piece.nbytes
                yield piece


def storage_type(dtype: str, origin: str) -> np.dtype[Any]:
    """The array type of a dtype's pieces.

    Raises:
        DraftsmithError: a dtype that drafters do not come in.
    """
    if dtype not in STORAGE:
        raise DraftsmithError(
            "a tensor has a dtype that drafters do not come in", where=origin, found=dtype, expected=", ".join(STORAGE)
        )
    return STORAGE[dtype]


def read_into(piece: Array, descriptor: int, offset: int, origin: str) -> None:
    """Fill a flat array with the bytes of an open file from `offset` on.

    Raises:
        DraftsmithError: the file ends first.
    """
    space = piece.view(np.uint8).data
    while space:
        count = os.preadv(descriptor, [space], offset)
        if not count:
            raise DraftsmithError("the file ends inside a tensor", where=origin, mend="fetch it again")
        space, offset = space[count:], offset + count


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
        wanted = self.source.dtype
        for piece in self.source.pieces():
            if not all_finite(piece, wanted):
                bad = int((~np.isfinite(to_float32(piece, wanted))).sum())
                raise DraftsmithError(
                    f"{self.name} holds values that are not finite",
                    where=self.origin,
                    found=f"{bad:,} NaN or infinite values in one piece",
                    expected="finite values",
                    mend="convert an earlier checkpoint; this one diverged",
                )
            if wanted == self.dtype:
                yield piece
                continue
            cast = np.empty(piece.size, STORAGE[self.dtype])
            for at in range(0, piece.size, BLOCK):
                block = slice(at, at + BLOCK)
                cast[block] = from_float32(to_float32(piece[block], wanted), self.dtype)
            if not all_finite(cast, self.dtype):
                raise DraftsmithError(
                    f"{self.name} holds values too large for {self.dtype}",
                    where=self.origin,
                    found=f"largest magnitude {float(np.abs(to_float32(piece, wanted)).max()):g}",
                    mend="convert with --dtype bfloat16 or float32",
                )
            yield cast


def all_finite(piece: Array, dtype: str) -> bool:
    """Whether no stored value is NaN or infinite, told by the exponent bits (all ones), a cache-sized block at a time."""
    bits, magnitude, infinity = _EXPONENTS[dtype]
    view = piece.view(bits)
    return all(
        not view[at : at + BLOCK].size or (view[at : at + BLOCK] & magnitude).max() < infinity
        for at in range(0, view.size, BLOCK)
    )


def file_tensors(file: Path) -> list[FileTensor]:
    """Every tensor of one safetensors file, by its header alone."""
    return [from_ref(ref) for ref in tensors_of(file)]


def from_ref(ref: TensorRef) -> FileTensor:
    """The same tensor, readable piece by piece."""
    return FileTensor(ref.name, ref.file, ref.shape, ref.dtype, ref.span[0])


def read_array(tensor: Tensor) -> Array:
    """All values of a small tensor in its shape (bfloat16 as bits)."""
    pieces = list(tensor.pieces())
    flat = np.concatenate(pieces) if pieces else np.empty(0, STORAGE[tensor.dtype])
    return flat.reshape(tensor.shape)


def read_rows(tensor: FileTensor, rows: Iterable[int]) -> npt.NDArray[np.float32]:
    """Some rows of a matrix in a file, as float32 (rows, columns); nothing else of it is read."""
    storage, width = STORAGE[tensor.dtype], tensor.shape[1]
    found = []
    with tensor.file.open("rb") as handle:
        for row in rows:
            handle.seek(tensor.offset + row * width * storage.itemsize)
            found.append(to_float32(np.fromfile(handle, dtype=storage, count=width), tensor.dtype))
    return np.stack(found)


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


def digest_tensor(tensor: Tensor) -> str:
    """XXH3-128 of a tensor's stored bytes, hex: tells accidents, not attacks, at memory speed."""
    digest = xxhash.xxh3_128()
    for piece in tensor.pieces():
        digest.update(np.ascontiguousarray(piece).view(np.uint8).data)
    return digest.hexdigest()


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors' values in a file."""
    return sum(prod(tensor.shape) * STORAGE[tensor.dtype].itemsize for tensor in tensors.values())


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], wrote: Callable[[str, int], None] | None = None
) -> dict[str, str]:
    """Write a safetensors file, one piece in memory at a time; returns name -> XXH3-128 of the tensor's bytes.

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
    with file.open("wb") as handle, _Pipeline(handle) as pipeline:
        handle.write(struct.pack("<Q", len(head)) + head)
        for name in order:
            digest = xxhash.xxh3_128()
            for piece in tensors[name].pieces():
                data = np.ascontiguousarray(piece).view(np.uint8).data
                pipeline.take(data, digest)
                if wrote:
                    wrote(name, len(data))
            pipeline.drain()
            hashes[name] = digest.hexdigest()
    return hashes


class _Pipeline:
    """Hash, write and flush pieces in threads of their own, while the next piece is read and cast."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self._threads = [ThreadPoolExecutor(1) for _ in range(3)]
        self._pending: deque[Future[Any]] = deque()
        self._flush: Future[None] | None = None
        self._dirty = 0

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)

    def take(self, data: memoryview, digest: Any) -> None:
        """Hash and write one piece; waits while several are on their way."""
        hasher, writer, flusher = self._threads
        self._pending += [hasher.submit(digest.update, data), writer.submit(self._handle.write, data)]
        self._dirty += len(data)
        while len(self._pending) > 2 * DEPTH:
            self._pending.popleft().result()
        if self._dirty > FLUSH_BYTES and (self._flush is None or self._flush.done()):
            if self._flush is not None:
                self._flush.result()
            self._flush, self._dirty = flusher.submit(os.fdatasync, self._handle.fileno()), 0

    def drain(self) -> None:
        """Wait until everything taken is hashed and handed to the system."""
        while self._pending:
            self._pending.popleft().result()
