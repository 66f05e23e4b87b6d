"""Files of torch.save, zip archives and the older plain form, without torch: the tree of objects, and where each
tensor's bytes lie. The bytes themselves are read later, piece by piece."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.storage.pickles import (
    BYTES,
    UNTYPED,
    ForeignNameError,
    RawStorage,
    RawTensor,
    SafeUnpickler,
    storage_of,
)
from draftsmith.convert.storage.runs import Run, RunTensor, StridedTensor

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MAX_PICKLE = 1 << 28
"""Bytes; the tree of the largest checkpoint is far smaller, the tensors do not count."""

FETCH = "fetch or save the file again"


@dataclass(frozen=True)
class TorchFile:
    """What torch.save wrote: the tree, with a RawTensor for each tensor, and key -> (byte, bytes) of the storages."""

    file: Path
    tree: Any
    places: dict[str, tuple[int, int]]

    def tensor(self, name: str, raw: RawTensor) -> RunTensor | StridedTensor:
        """The tensor that `raw` describes, after proving that it lies inside the file.

        Raises:
            DraftsmithError: a description that is no tensor, or one that reaches beyond its storage or the file.
        """
        origin = f"{name} in {self.file}"
        shape, stride, storage = raw.shape, raw.stride, raw.storage
        numbers = [*shape, *stride, raw.offset] if isinstance(shape, tuple) and isinstance(stride, tuple) else [-1]
        if (
            not all(type(number) is int and number >= 0 for number in numbers)
            or len(shape) != len(stride)
            or not isinstance(storage, RawStorage)
            or not all(isinstance(text, str) for text in (storage.key, storage.dtype, raw.dtype or ""))
            or not {storage.dtype, raw.dtype or storage.dtype} <= BYTES.keys()
        ):
            raise DraftsmithError("the file describes a tensor in a way that makes no sense", where=origin, mend=FETCH)
        dtype = raw.dtype or storage.dtype
        if storage.dtype not in (dtype, UNTYPED):
            raise DraftsmithError(
                "a tensor and its storage differ in dtype",
                where=origin,
                found=dtype,
                expected=storage.dtype,
                mend=FETCH,
            )
        size, count = BYTES[dtype], prod(shape)
        start, held = self.places.get(storage.key, (0, 0))
        last = raw.offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if count and ((last + 1) * size > held or count * size > held):
            raise DraftsmithError(
                "a tensor reaches beyond the bytes that the file holds for it",
                where=origin,
                found=f"shape {list(shape)} in {held:,} bytes",
                expected=f"{max(last + 1, count) * size:,} bytes",
                mend=FETCH,
            )
        first = start + raw.offset * size
        if not count or _contiguous(shape, stride):
            return RunTensor(name, origin, shape, dtype, (Run(self.file, first, count),))
        return StridedTensor(name, origin, shape, dtype, stride, Run(self.file, first, last + 1 - raw.offset))


def read_torch_file(file: Path, start: int = 0, length: int | None = None) -> TorchFile:
    """Read the tree of a file of torch.save, or of the part of a file that holds one; no code of it runs.

    Raises:
        DraftsmithError: a pickle that names code, a damaged or truncated file, or no file of torch.save at all.
    """
    size = file.stat().st_size
    length = size - start if length is None else length
    if length <= 0 or start < 0 or start + length > size:
        raise DraftsmithError(
            "the file is empty" if not size else "the file is shorter than what should lie in it",
            where=file,
            found=f"{size:,} bytes",
            expected=f"at least {start + max(length, 1):,}",
            mend=FETCH,
        )
    try:
        with file.open("rb") as handle:
            handle.seek(start)
            if handle.read(4) == b"PK\x03\x04":
                return _read_zip(file, _Window(handle, start, length), start)
            handle.seek(start)
            return _read_legacy(file, handle, start + length)
    except ForeignNameError as error:
        raise DraftsmithError(
            "the pickle names code, which is never run here",
            where=file,
            found=str(error),
            expected="tensors, numbers, strings and containers alone",
            mend="where you trust the file, save its state dict alone with safetensors.torch.save_file",
        ) from None
    except (DraftsmithError, OSError):
        raise
    except Exception as error:  # a hostile or damaged pickle can fail in any way
        raise DraftsmithError(
            "the file is damaged, or no file of torch.save",
            where=file,
            found=f"{type(error).__name__}: {error}",
            mend=FETCH,
        ) from None


def _read_zip(file: Path, window: _Window, start: int) -> TorchFile:
    places: dict[str, tuple[int, int]] = {}
    tree_entry = order = None
    with zipfile.ZipFile(window) as archive:
        for entry in archive.infolist():
            _, _, inner = entry.filename.partition("/")
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise pickle.UnpicklingError("compressed entries, which torch does not write")
            if inner == "data.pkl":
                tree_entry = entry
            elif inner == "byteorder":
                order = archive.read(entry)
            elif inner.startswith("data/"):
                window.seek(entry.header_offset + 26)
                names, extra = struct.unpack("<HH", window.read(4))
                first = entry.header_offset + 30 + names + extra
                if first + entry.file_size > window.length:
                    raise pickle.UnpicklingError(f"{entry.filename} reaches beyond the end")
                places[inner.removeprefix("data/")] = (start + first, entry.file_size)
        if tree_entry is None or tree_entry.file_size > MAX_PICKLE:
            raise pickle.UnpicklingError("no data.pkl" if tree_entry is None else "data.pkl is too large")
        if order not in (None, b"little"):
            raise pickle.UnpicklingError(f"byte order {order!r}")
        stream = io.BytesIO(archive.read(tree_entry))
    return TorchFile(file, SafeUnpickler(stream, storage_of).load(), places)


def _read_legacy(file: Path, handle: io.BufferedReader, end: int) -> TorchFile:
    """The form before torch 1.6: magic number, protocol, system, tree and keys, each a pickle; then the storages."""
    seen: dict[Any, RawStorage] = {}

    def note(pid: Any) -> RawStorage:
        storage = storage_of(pid)
        seen[storage.key] = storage
        return storage

    if SafeUnpickler(handle).load() != LEGACY_MAGIC or SafeUnpickler(handle).load() != LEGACY_PROTOCOL:
        raise pickle.UnpicklingError("neither a zip archive nor the magic number of the older form")
    system = SafeUnpickler(handle).load()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise pickle.UnpicklingError("numbers with the high byte first")
    tree, keys = SafeUnpickler(handle, note).load(), SafeUnpickler(handle).load()
    places = {}
    for key in keys:
        (count,) = struct.unpack("<q", handle.read(8))
        size = count * BYTES[seen[key].dtype]
        if count < 0 or handle.tell() + size > end:
            raise pickle.UnpicklingError("it ends inside a storage")
        places[key] = (handle.tell(), size)
        handle.seek(size, io.SEEK_CUR)
    return TorchFile(file, tree, places)


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for length, actual in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and actual != step:
            return False
        step *= length
    return True


class _Window(io.RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, handle: io.BufferedReader, start: int, length: int) -> None:
        self.handle, self.start, self.length, self.place = handle, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("a seek before the start")
        self.place = base + offset
        return self.place

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.length - self.place)
        size = left if size is None or size < 0 else min(size, left)
        self.handle.seek(self.start + self.place)
        data = self.handle.read(size)
        self.place += len(data)
        return data
