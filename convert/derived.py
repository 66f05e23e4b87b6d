"""Tensors that are made of others: some rows, or a norm with another folded in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from draftsmith.convert.tensors import PIECE, Array, Tensor, ValueTensor, read_array, to_float32


@dataclass(frozen=True)
class RowsTensor:
    """Rows of `source`, in the order of `rows`; the whole source is in memory while it is read."""

    source: Tensor
    rows: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return (int(self.rows.size), *self.source.shape[1:])

    @property
    def dtype(self) -> str:
        """The source's."""
        return self.source.dtype

    @property
    def origin(self) -> str:
        """Where the values come from."""
        return f"rows of {self.source.origin}"

    def pieces(self) -> Iterator[Array]:
        """The values in order."""
        values = read_array(self.source)
        step = max(1, PIECE // max(1, prod(self.source.shape[1:])))
        for first in range(0, self.rows.size, step):
            yield values[self.rows[first : first + step]].reshape(-1)


def fold_norm(hidden_norm: Tensor, input_norm: Tensor) -> ValueTensor:
    """hidden_norm * gamma / rms(gamma), gamma being `input_norm`: float32.

    Makes one norm of two that stood one behind the other, up to the second one's dependence on the direction of its
    input: RMSNorm(gamma * x / rms(x)) is gamma * x / rms(gamma * x), and rms(gamma * x) is about rms(gamma) rms(x).
    """
    gamma = to_float32(read_array(input_norm), input_norm.dtype).astype(np.float64)
    weight = to_float32(read_array(hidden_norm), hidden_norm.dtype).astype(np.float64)
    folded = weight * gamma / np.sqrt(np.mean(gamma**2))
    return ValueTensor(folded.astype("<f4"), f"{hidden_norm.origin} and {input_norm.origin}")


def all_zero(tensor: Tensor) -> bool:
    """Whether every value is zero."""
    return not any(to_float32(piece, tensor.dtype).any() for piece in tensor.pieces())
