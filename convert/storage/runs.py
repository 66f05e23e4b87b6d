"""Tensors whose values lie in stretches of one or more files, read piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from draftsmith.convert.tensors import PIECE, Array, read_into, storage_type


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
                    read_into(target, files[run.file], run.offset + done * storage.itemsize, self.origin)
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
