"""Tensors whose values lie in stretches of one or more files, read piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.tensors import PIECE, STORAGE, Array


@dataclass(frozen=True)
class Run:
    """`count` elements in a row, from byte `offset` of `file`."""

    file: Path
    offset: int
    count: int


@dataclass(frozen=True)
class RunTensor:
    """A tensor whose values are those of `runs`, one after the other."""

    name: str
    origin: str
    shape: tuple[int, ...]
    dtype: str
    runs: Iterable[Run]

    def pieces(self) -> Iterator[Array]:
        """The values in order, as flat arrays of STORAGE[dtype]; every one but the last has PIECE elements."""
        storage, left = storage_type(self.dtype, self.origin), prod(self.shape)
        files: dict[Path, int] = {}
        piece, filled = np.empty(min(PIECE, left), storage), 0
        try:
            for run in self.runs:
                if run.file not in files:
                    files[run.file] = os.open(run.file, os.O_RDONLY)
                done = 0
                while done < run.count:
                    take = min(run.count - done, piece.size - filled)
                    target = piece[filled : filled + take]
                    _read(files[run.file], run.offset + done * storage.itemsize, target, self.origin)
                    filled, done = filled + take, done + take
                    if filled == piece.size:
                        yield piece
                        left -= filled
                        piece, filled = np.empty(min(PIECE, left), storage), 0
        finally:
            for descriptor in files.values():
                os.close(descriptor)


@dataclass(frozen=True)
class StridedTensor:
    """A tensor that its file keeps in another order than its own (a transposed weight, say); `stride` in elements.

    Read through a map of the file that lasts for one piece, so memory may reach the size of the tensor.
    """

    name: str
    origin: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    run: Run

    def pieces(self) -> Iterator[Array]:
        """The values in the tensor's own order, as flat arrays of STORAGE[dtype]."""
        storage = storage_type(self.dtype, self.origin)
        for start in range(0, prod(self.shape), PIECE):
            flat = np.memmap(self.run.file, storage, "r", self.run.offset, (self.run.count,))
            steps = tuple(step * storage.itemsize for step in self.stride)
            yield np.array(np.lib.stride_tricks.as_strided(flat, self.shape, steps).flat[start : start + PIECE])


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


def part(runs: Iterable[Run], start: int, count: int, itemsize: int) -> list[Run]:
    """The `count` elements from the `start`-th on of the row that `runs` form."""
    taken = []
    for run in runs:
        if start < run.count and count:
            size = min(run.count - start, count)
            taken.append(Run(run.file, run.offset + start * itemsize, size))
            start, count = 0, count - size
        else:
            start -= min(start, run.count)
    return taken


def _read(descriptor: int, offset: int, target: Array, origin: str) -> None:
    view = target.view(np.uint8).data
    while view:
        got = os.preadv(descriptor, [view], offset)
        if not got:
            raise DraftsmithError("the file ends inside a tensor", where=origin, mend="fetch it again")
        view, offset = view[got:], offset + got
