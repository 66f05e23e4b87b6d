"""Rows of a shard that is whole: by its safetensors header, from wherever its bytes lie.

A local file is read and not mapped: a read takes megabytes at once, where a mapping comes in page by page and ends the
process with a bus error if the file gets shorter under it.
"""

from __future__ import annotations

import json
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.configs.errors import DraftsmithError

DTYPES = {
    "I64": torch.int64, "I32": torch.int32, "F32": torch.float32, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8,
}  # fmt: skip

PIECE = 8 << 20
"""Bytes of one read."""


class ShardRows(ABC):
    """One shard."""

    @abstractmethod
    def _bytes(self, spans: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """uint8 (last - first,) of each span [first, last) of the file."""

    @cached_property
    def _header(self) -> tuple[int, dict[str, Any]]:
        (start,) = self._bytes([(0, 8)])
        (length,) = struct.unpack("<Q", start.numpy().tobytes())
        (head,) = self._bytes([(8, 8 + length)])
        return 8 + length, json.loads(head.numpy().tobytes())

    def rows(self, names: Sequence[str], here: slice) -> dict[str, torch.Tensor]:
        """Rows of several tensors, a copy of their own."""
        base, header = self._header
        spans = []
        for name in names:
            first, last = header[name]["data_offsets"]
            width = (last - first) // max(1, header[name]["shape"][0])
            spans.append((base + first + here.start * width, base + first + here.stop * width))
        return {
            name: data.view(DTYPES[header[name]["dtype"]]).reshape(here.stop - here.start, *header[name]["shape"][1:])
            for name, data in zip(names, self._bytes(spans), strict=True)
        }


class LocalShard(ShardRows):
    """A shard in a file, which is open for the time of a read only: a store may have more shards than a process files."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def _bytes(self, spans: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Raises DraftsmithError: the file is gone, cannot be read, or has become shorter."""
        try:
            with self._file.open("rb", buffering=0) as handle:
                return [self._span(handle.fileno(), first, last) for first, last in spans]
        except OSError as error:
            raise DraftsmithError(
                f"a shard cannot be read: {error.strerror}", where=self._file, mend=f"draftsmith store check {self._file.parent}"
            ) from error  # fmt: skip

    def _span(self, handle: int, first: int, last: int) -> torch.Tensor:
        data = np.empty(
            last - first, dtype=np.uint8
        )  # NumPy asks for huge pages, torch does not: half of a read's time
        left = data.data
        while left:
            count = os.preadv(handle, [left[:PIECE]], last - len(left))
            if not count:
                raise DraftsmithError(
                    "a shard has become shorter since the store was opened", where=self._file,
                    found=f"{last - len(left):,} bytes", expected=f"at least {last:,} bytes",
                    mend=f"draftsmith store check {self._file.parent}",
                )  # fmt: skip
            left = left[count:]
        return torch.from_numpy(data)
