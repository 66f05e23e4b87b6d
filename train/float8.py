"""Float8 products (e4m3): every row of the left and every column of the right operand has its own scale.

Source of the format: "FP8 Formats for Deep Learning", arXiv 2209.05433; e4m3's largest value is 448. Products run in
the tensor cores through `torch._scaled_mm` and need sizes in multiples of 16, which `columns` pads with zeros; a CPU
multiplies the same float8 values in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.data.codec import E4M3_MAX

TINY = 1e-12


@dataclass(frozen=True)
class Scaled:
    """`values` float8 (n, k), k contiguous, times `scale` float32 (n, 1)."""

    values: Tensor
    scale: Tensor


def rows(x: Tensor) -> Scaled:
    """`x` (n, k) with a scale a row."""
    if x.is_cuda:
        from draftsmith.train import kernels

        return Scaled(*kernels.by_row(x))
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=TINY) / E4M3_MAX
    return Scaled((x.float() / scale).to(torch.float8_e4m3fn), scale)


def columns(x: Tensor) -> Scaled:
    """The transpose of `x` (k, n) -> (n, k), with a scale a column of `x`; k is padded with zeros to a multiple of 16."""
    padded = -(-len(x) // 16) * 16
    if x.is_cuda:
        from draftsmith.train import kernels

        return Scaled(*kernels.by_column(x, padded))
    scale = x.float().abs().amax(0).clamp(min=TINY) / E4M3_MAX
    values = torch.nn.functional.pad((x.float() / scale).t(), (0, padded - len(x)))
    return Scaled(values.to(torch.float8_e4m3fn), scale[:, None])


def product(left: Scaled, right: Scaled, dtype: torch.dtype) -> Tensor:
    """left (n, k) @ right (m, k).T -> (n, m) in `dtype`; without a GPU, from the same float8 values in float32."""
    if not left.values.is_cuda:
        return ((left.values.float() * left.scale) @ (right.values.float() * right.scale).t()).to(dtype)
    return torch._scaled_mm(
        left.values, right.values.t(), scale_a=left.scale, scale_b=right.scale.t(), out_dtype=dtype, use_fast_accum=True
    )
