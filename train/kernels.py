"""Triton kernels for what the compiler does badly: float8 operands, by row or transposed by column, and own keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.data.codec import E4M3_MAX
from draftsmith.train import float8

LARGEST = tl.constexpr(E4M3_MAX)
TINY = tl.constexpr(float8.TINY)


@triton.jit
def _by_row(x, values, scales, columns, stride, BLOCK: tl.constexpr):
    """One row a program: its peak in a first pass, its values in a second one that reads from the cache."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    peak = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        peak = tl.maximum(peak, tl.abs(tl.load(x + row * stride + first + offsets, inside, 0.0).to(tl.float32)))
    scale = tl.maximum(tl.max(peak, 0), TINY) / LARGEST
    tl.store(scales + row, scale)
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        part = tl.load(x + row * stride + first + offsets, inside, 0.0).to(tl.float32) / scale
        tl.store(values + row * columns + first + offsets, part.to(tl.float8e4nv), inside)


@triton.jit
def _column_peaks(x, peaks, rows, columns, stride, SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Peaks of COLUMNS columns over SPAN rows a program, joined by an atomic maximum."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.program_id(1).to(tl.int64) * SPAN
    peak = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, SPAN, ROWS):
        row = start + first + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        peak = tl.maximum(
            peak, tl.abs(tl.load(x + row[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32))
        )
    tl.atomic_max(peaks + column, tl.max(peak, 0), column < columns)


@triton.jit
def _by_column(x, peaks, values, rows, columns, padded, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tile a program, transposed; rows from `rows` to `padded` become zeros."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(x + row[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32)
    scale = tl.maximum(tl.load(peaks + column, column < columns, 1.0), TINY) / LARGEST
    tile = tl.trans((tile / scale[None, :]).to(tl.float8e4nv))
    tl.store(
        values + column[:, None] * padded + row[None, :], tile, (column[:, None] < columns) & (row[None, :] < padded)
    )


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 (n, k) -> float8 (n, k) and float32 (n, 1), a scale a row."""
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    _by_row[(len(x),)](x, values, scales, x.shape[1], x.stride(0), BLOCK=2048, num_warps=8)
    return values, scales


def by_column(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """bfloat16 (k, n) -> float8 (n, padded), zero from k on, and float32 (n, 1), a scale a column of `x`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    values = torch.empty(columns, padded, dtype=torch.float8_e4m3fn, device=x.device)
    peaks = torch.zeros(columns, dtype=torch.float32, device=x.device)
    _column_peaks[(triton.cdiv(columns, 128), triton.cdiv(rows, 512))](
        x, peaks, rows, columns, x.stride(0), SPAN=512, ROWS=32, COLUMNS=128, num_warps=4
    )
    _by_column[(triton.cdiv(padded, 128), triton.cdiv(columns, 64))](
        x, peaks, values, rows, columns, padded, x.stride(0), ROWS=128, COLUMNS=64, num_warps=4
    )
    return values, (peaks.clamp(min=float8.TINY) / E4M3_MAX)[:, None]


@triton.jit
def _merge(
    mixed, total, query, keys, values, result, grown, count, keys_step, values_step, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    KVS: tl.constexpr, GROUPS: tl.constexpr, DIMS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """`rows.merge_keys` for one row and KVS key heads: an online softmax over `count` own keys."""
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1) * KVS + tl.arange(0, KVS)
    group, dim, part = tl.arange(0, GROUPS), tl.arange(0, DIMS), tl.arange(0, VALUES)
    head = row * KV * GROUP + kv[:, None] * GROUP + group[None, :]
    heads = (kv < KV)[:, None] & (group < GROUP)[None, :]
    asked = tl.load(
        query + head[:, :, None] * DIM + dim[None, None, :], heads[:, :, None] & (dim < DIM)[None, None, :], 0.0
    )
    asked = asked.to(tl.float32)
    wide = heads[:, :, None] & (part < VALUE)[None, None, :]
    sum_of = tl.load(mixed + head[:, :, None] * VALUE + part[None, None, :], wide, 0.0).to(tl.float32)
    peak = tl.load(total + head, heads, 0.0)
    whole = tl.full((KVS, GROUPS), 1.0, tl.float32)
    at_key = (row * KV + kv)[:, None] * DIM + dim[None, :]
    at_value = (row * KV + kv)[:, None] * VALUE + part[None, :]
    for step in range(count):
        key = tl.load(keys + step * keys_step + at_key, (kv < KV)[:, None] & (dim < DIM)[None, :], 0.0).to(tl.float32)
        value = tl.load(values + step * values_step + at_value, (kv < KV)[:, None] & (part < VALUE)[None, :], 0.0)
        score = tl.sum(asked * key[:, None, :], 2) * scale
        higher = tl.maximum(peak, score)
        before, here = tl.exp(peak - higher), tl.exp(score - higher)
        sum_of = sum_of * before[:, :, None] + value.to(tl.float32)[:, None, :] * here[:, :, None]
        whole = whole * before + here
        peak = higher
    tl.store(
        result + head[:, :, None] * VALUE + part[None, None, :],
        (sum_of / whole[:, :, None]).to(result.dtype.element_ty),
        wide,
    )
    tl.store(grown + head, peak + tl.log(whole), heads)


@triton.jit
def _merge_backward(
    query_grad, grad, mixed, total, query, keys, values, key_grads, value_grads, result, count, keys_step, values_step, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    KVS: tl.constexpr, GROUPS: tl.constexpr, DIMS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """`rows.merge_keys_backward` for one row and KVS key heads; the own keys' gradients grow in place."""
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1) * KVS + tl.arange(0, KVS)
    group, dim, part = tl.arange(0, GROUPS), tl.arange(0, DIMS), tl.arange(0, VALUES)
    head = row * KV * GROUP + kv[:, None] * GROUP + group[None, :]
    heads = (kv < KV)[:, None] & (group < GROUP)[None, :]
    narrow, wide = heads[:, :, None] & (dim < DIM)[None, None, :], heads[:, :, None] & (part < VALUE)[None, None, :]
    at_query, at_output = head[:, :, None] * DIM + dim[None, None, :], head[:, :, None] * VALUE + part[None, None, :]
    asked = tl.load(query + at_query, narrow, 0.0).to(tl.float32)
    back = tl.load(query_grad + at_query, narrow, 0.0).to(tl.float32)
    slope_out = tl.load(grad + at_output, wide, 0.0).to(tl.float32)
    delta = tl.sum(slope_out * tl.load(mixed + at_output, wide, 0.0).to(tl.float32), 2)
    log_sum = tl.load(total + head, heads, 0.0)
    at_key, at_value = (row * KV + kv)[:, None] * DIM + dim[None, :], (row * KV + kv)[:, None] * VALUE + part[None, :]
    key_inside, value_inside = (kv < KV)[:, None] & (dim < DIM)[None, :], (kv < KV)[:, None] & (part < VALUE)[None, :]
    for step in range(count):
        key = tl.load(keys + step * keys_step + at_key, key_inside, 0.0).to(tl.float32)
        value = tl.load(values + step * values_step + at_value, value_inside, 0.0).to(tl.float32)
        weight = tl.exp(tl.sum(asked * key[:, None, :], 2) * scale - log_sum)
        weight = tl.where(heads, weight, 0.0)
        slope = weight * (tl.sum(slope_out * value[:, None, :], 2) - delta) * scale
        back += slope[:, :, None] * key[:, None, :]
        place = key_grads + step * keys_step + at_key
        grown = tl.load(place, key_inside, 0.0).to(tl.float32) + tl.sum(slope[:, :, None] * asked, 1)
        tl.store(place, grown.to(key_grads.dtype.element_ty), key_inside)
        place = value_grads + step * values_step + at_value
        grown = tl.load(place, value_inside, 0.0).to(tl.float32) + tl.sum(weight[:, :, None] * slope_out, 1)
        tl.store(place, grown.to(value_grads.dtype.element_ty), value_inside)
    tl.store(result + at_query, back.to(result.dtype.element_ty), narrow)


def _shape(query: Tensor, keys: Tensor, values: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and sizes: about 1024 numbers a program."""
    kv_heads, dim, value_dim = keys.shape[2], keys.shape[3], values.shape[3]
    group, power = query.shape[1] // kv_heads, triton.next_power_of_2
    each = max(1, 1024 // (power(group) * power(max(dim, value_dim))))
    each = min(each, power(kv_heads))
    sizes = {
        "KV": kv_heads, "GROUP": group, "DIM": dim, "VALUE": value_dim,
        "KVS": each, "GROUPS": power(group), "DIMS": power(dim), "VALUES": power(value_dim),
    }  # fmt: skip
    return (len(query), triton.cdiv(kv_heads, each)), sizes


def merge_keys(
    mixed: Tensor, total: Tensor, query: Tensor, keys: Tensor, values: Tensor, count: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`rows.merge_keys`."""
    grid, sizes = _shape(query, keys, values)
    result, grown = torch.empty_like(mixed, memory_format=torch.contiguous_format), torch.empty_like(total)
    _merge[grid](
        mixed.contiguous(), total, query.contiguous(), keys, values, result, grown, count, keys.stride(0), values.stride(0),
        scale, **sizes,
    )  # fmt: skip
    return result, grown


def merge_keys_backward(
    query_grad: Tensor, grad: Tensor, mixed: Tensor, total: Tensor, query: Tensor, keys: Tensor, values: Tensor,
    key_grads: Tensor, value_grads: Tensor, count: int, scale: float,
) -> Tensor:  # fmt: skip
    """`rows.merge_keys_backward`."""
    grid, sizes = _shape(query, keys, values)
    result = torch.empty_like(query, memory_format=torch.contiguous_format)
    _merge_backward[grid](
        query_grad.contiguous(), grad.contiguous(), mixed, total, query.contiguous(), keys, values, key_grads, value_grads,
        result, count, keys.stride(0), values.stride(0), scale, **sizes,
    )  # fmt: skip
    return result
