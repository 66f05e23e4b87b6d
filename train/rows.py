"""Row-wise parts of the layer, forward and backward: norms, SwiGLU, rotation, one more key merged into an attention.

Plain functions of tensors, without autograd: train/layer.py and train/flash.py call them from their own backward
passes, which recompute these cheap parts instead of keeping their results. On a GPU each is compiled once, for any
number of rows; elsewhere, and in float64, the very same lines run as they stand. Inner arithmetic is float32 (float64
where the input is).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compiled(*rows: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function on its first use with CUDA tensors; the first dimension of the arguments numbered `rows` varies.

    Fewer than two rows run uncompiled, since the compiler gives the sizes 0 and 1 programs of their own.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        program: list[Callable[..., Any]] = []

        def call(*arguments: Any) -> Any:
            tensors = [arguments[index] for index in rows]
            if not tensors[0].is_cuda or min(len(tensor) for tensor in tensors) < 2:
                return function(*arguments)
            if not program:
                torch.fx.experimental._config.use_duck_shape = False
                program.append(torch.compile(function))
            bare = [item.detach() if isinstance(item, Tensor) else item for item in arguments]
            for index in rows:
                torch._dynamo.maybe_mark_dynamic(bare[index], 0)
            return program[0](*bare)

        return call

    return decorate


def wide(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 where it is that already."""
    return x if x.dtype == torch.float64 else x.float()


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = wide(x)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * wide(weight)


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x / sqrt(mean(x^2) + eps) * weight in `x` and `weight`, both wide."""
    grad, x = wide(grad), wide(x)
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    unit = x * scale
    inner = grad * wide(weight)
    return scale * (inner - unit * (inner * unit).mean(-1, keepdim=True)), (grad * unit).sum(0)


@compiled(0)
def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm: (rows, size) -> (rows, size) in the dtype of `x`."""
    return _norm(x, weight, eps).to(x.dtype)


@compiled(0, 1)
def norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients in `x`, in its dtype, and in `weight`, in its dtype."""
    inner, outer = _norm_backward(grad, x, weight, eps)
    return inner.to(x.dtype), outer.to(weight.dtype)


@compiled(0, 1, 2)
def added_norm_backward(add: Tensor, grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `norm_backward`, plus `add` (rows, size), what the residual path brings to the gradient in `x`."""
    inner, outer = _norm_backward(grad, x, weight, eps)
    return (wide(add) + inner).to(x.dtype), outer.to(weight.dtype)


@compiled(0, 1)
def embed(table: Tensor, ids: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """norm(table[ids]): (rows, size) in `dtype`."""
    return _norm(table[ids].to(dtype), weight, eps).to(dtype)


@compiled(0, 1, 2)
def embed_backward(grad: Tensor, table: Tensor, ids: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gradient of `embed` in its weight; the table is frozen."""
    return _norm_backward(grad, table[ids].to(grad.dtype), weight, eps)[1].to(weight.dtype)


@compiled(0, 1, 2)
def add_rows(total: Tensor, places: Tensor, part: Tensor) -> None:
    """total[places] += part in place, for places that are all different."""
    total[places] = (wide(total[places]) + wide(part)).to(total.dtype)


@compiled(0, 1)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return (torch.nn.functional.silu(wide(gate)) * wide(up)).to(gate.dtype)


@compiled(0, 1, 2)
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up once more, and the gradients in `gate` and `up`."""
    grad, wide_gate, wide_up = wide(grad), wide(gate), wide(up)
    share = torch.sigmoid(wide_gate)
    silu = wide_gate * share
    in_gate = grad * wide_up * (share + silu * (1 - share))
    return (silu * wide_up).to(gate.dtype), in_gate.to(gate.dtype), (grad * silu).to(gate.dtype)


@compiled(0, 1, 2)
def turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (rows, heads, size) by angles whose `cos` and `sin` are (rows, size / 2): halves paired, as Llama does."""
    first, second = wide(states).chunk(2, dim=-1)
    cos, sin = cos[:, None].to(first.dtype), sin[:, None].to(first.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(states.dtype)


def merge_keys(
    mixed: Tensor, total: Tensor, query: Tensor, keys: Tensor, values: Tensor, count: int, scale: float
) -> tuple[Tensor, Tensor]:
    """More keys and values, one a row each, in a softmax that is already summed up.

    Args:
        mixed: (rows, heads, value_dim), attention's output so far.
        total: wide (rows, heads), log of the sum of exp(score) so far.
        query: (rows, heads, head_dim).
        keys, values: (at least `count`, rows, kv_heads, head_dim) and (.., value_dim).
        count: how many of them join.
        scale: factor on the scores.

    Returns:
        The new `mixed`, in its dtype, and `total`.
    """
    if mixed.is_cuda:
        from draftsmith.train import kernels

        return kernels.merge_keys(mixed, total, query, keys, values, count, scale)
    scores = [total, *(_own_score(query, key, scale) for key in keys[:count])]
    grown = torch.logsumexp(torch.stack(scores), 0)
    result = wide(mixed) * (total - grown).exp()[..., None]
    for score, value in zip(scores[1:], values[:count], strict=True):
        result = result + _spread(value, query) * (score - grown).exp()[..., None]
    return result.to(mixed.dtype), grown


def merge_keys_backward(
    query_grad: Tensor, grad: Tensor, mixed: Tensor, total: Tensor, query: Tensor, keys: Tensor, values: Tensor,
    key_grads: Tensor, value_grads: Tensor, count: int, scale: float,
) -> Tensor:  # fmt: skip
    """Gradients of the whole softmax that pass through the own keys and values of `merge_keys`.

    Args:
        query_grad: (rows, heads, head_dim), the gradient in the queries through the other keys.
        grad: (rows, heads, value_dim), gradient in the output of the whole softmax.
        mixed, total: that output, and wide (rows, heads) the log of the sum of exp(score) over all keys.
        key_grads, value_grads: as `keys` and `values`; this adds to the first `count` of them in place.

    Returns:
        The whole gradient in the queries.
    """
    if query.is_cuda:
        from draftsmith.train import kernels

        return kernels.merge_keys_backward(
            query_grad, grad, mixed, total, query, keys, values, key_grads, value_grads, count, scale
        )
    kept = query_grad.dtype
    query_grad, grad, mixed = wide(query_grad), wide(grad), wide(mixed)
    delta = (grad * mixed).sum(-1)
    for step in range(count):
        rows, kv_heads, size = keys[step].shape
        weight = (_own_score(query, keys[step], scale) - total).exp()
        slope = (weight * ((grad * _spread(values[step], query)).sum(-1) - delta) * scale)[..., None]
        query_grad = query_grad + slope * _spread(keys[step], query)
        key_grads[step].add_((slope * wide(query)).view(rows, kv_heads, -1, size).sum(2))
        value_grads[step].add_((weight[..., None] * grad).view(rows, kv_heads, -1, values.shape[-1]).sum(2))
    return query_grad.to(kept)


@compiled(0)
def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x (rows, size) times the wide scalar `factor`, in the dtype of `x`."""
    return (wide(x) * factor).to(x.dtype)


def _spread(states: Tensor, query: Tensor) -> Tensor:
    """(rows, kv_heads, size) for each query head that shares a key head: wide (rows, heads, size)."""
    rows, kv_heads, size = states.shape
    group = query.shape[1] // kv_heads
    return wide(states)[:, :, None].expand(rows, kv_heads, group, size).reshape(rows, kv_heads * group, size)


def _own_score(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return (wide(query) * _spread(key, query)).sum(-1) * scale
