"""The unroll's attention on a GPU: causal flash attention over step-0 keys, merged with the later steps' own keys.

The step-0 part of one query's softmax is plain causal attention of its conversation, so a flash kernel does it without
a mask; the few own keys join by their scores (`rows.merge_keys`). The backward pass gives the flash kernel the *merged*
output and log-sum, with which its gradients are those of the one softmax over all keys (FlashAttention-2, arXiv
2307.08691, algorithm 2: dS = P * (dP - rowsum(dO * O)), P = exp(S - log-sum)).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftsmith.train import rows

LONG = 1024
"""Rows from which a conversation has a kernel call of its own."""

GRAIN = 256
"""Such calls are padded to multiples of this, so that few different shapes exist: cuDNN plans each of them once."""


def usable(query: Tensor) -> bool:
    """Whether the kernels take these queries (rows, heads, head_dim): on a GPU, 16 bits, head_dim a multiple of 8."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] in range(8, 257, 8)


def causal_forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, lengths: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within each conversation: output (rows, heads, dim), log-sum float32 (heads, rows).

    The leading conversations of at least LONG rows go to cuDNN's kernel one by one, the others to the flash kernel
    that takes many at once, and all of them where torch is asked for deterministic algorithms: of the two, only flash's
    backward pass has one. Values may be narrower than keys.
    """
    outputs, totals, first, size = [], [], 0, value.shape[-1]
    value = _widened(value, key)
    for length in _leading(lengths):
        part = slice(first, first + length)
        output, total = _cudnn_forward(query[part], key[part], value[part], scale)
        outputs.append(output)
        totals.append(total)
        first += length
    if first < len(query):
        rest, longest = _rest(bounds, lengths, first)
        output, total, *_ = torch.ops.aten._flash_attention_forward(
            query[first:], key[first:], value[first:], rest, rest, longest, longest, 0.0, True, False, scale=scale
        )
        outputs.append(output)
        totals.append(total)
    return _join(outputs, 0)[..., :size].contiguous(), _join(totals, 1)


def causal_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, total: Tensor, bounds: Tensor,
    lengths: list[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients in query, key and value, for the given output and log-sum."""
    parts, first, size = [], 0, value.shape[-1]
    grad, value, output = (_widened(states, key) for states in (grad, value, output))
    for length in _leading(lengths):
        part = slice(first, first + length)
        parts.append(
            _cudnn_backward(grad[part], query[part], key[part], value[part], output[part], total[:, part], scale)
        )
        first += length
    if first < len(query):
        rest, longest = _rest(bounds, lengths, first)
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        part = slice(first, None)
        parts.append(
            torch.ops.aten._flash_attention_backward(
                grad[part], query[part], key[part], value[part], output[part], total[:, part].contiguous(), rest, rest,
                longest, longest, 0.0, True, seed, seed[:0], scale=scale,
            )
        )  # fmt: skip
    query_grad, key_grad, value_grad = (_join(list(group), 0) for group in zip(*parts, strict=True))
    return query_grad, key_grad, value_grad[..., :size]


def _widened(states: Tensor, key: Tensor) -> Tensor:
    """Zeros after the last dimension up to the keys'."""
    missing = key.shape[-1] - states.shape[-1]
    return torch.nn.functional.pad(states, (0, missing)) if missing else states


def _leading(lengths: list[int]) -> list[int]:
    count = 0
    if torch.are_deterministic_algorithms_enabled():
        return []
    while count < len(lengths) and lengths[count] >= LONG:
        count += 1
    return lengths[:count]


def _rest(bounds: Tensor, lengths: list[int], first: int) -> tuple[Tensor, int]:
    """Bounds and longest length of the conversations from row `first` on."""
    count = len(_leading(lengths))
    return bounds[count:] - first, max(lengths[count:])


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _padded(states: Tensor, length: int) -> Tensor:
    """(rows, heads, dim) -> (1, heads, length, dim); added rows are zeros, which no earlier row sees."""
    missing = length - len(states)
    states = torch.nn.functional.pad(states, (0, 0, 0, 0, 0, missing)) if missing else states
    return states.transpose(0, 1)[None]


def _cudnn_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    rows, length = len(query), -(-len(query) // GRAIN) * GRAIN
    query, key, value = (_padded(states, length) for states in (query, key, value))
    output, total, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )
    return output[0].transpose(0, 1)[:rows], total.view(-1, length)[:, :rows]


def _cudnn_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, total: Tensor, scale: float
) -> tuple[Tensor, ...]:
    rows, length = len(query), -(-len(query) // GRAIN) * GRAIN
    total = torch.nn.functional.pad(total, (0, length - rows)).contiguous()[None, ..., None]
    grad, query, key, value, output = (_padded(states, length) for states in (grad, query, key, value, output))
    seed = torch.zeros((), dtype=torch.int64, device=grad.device)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, output, total, seed, seed, None, None, None, length, length, 0.0, True, scale=scale
    )
    return tuple(part[0].transpose(0, 1)[:rows] for part in found)


class OwnKeys:
    """Keys and values of the later steps, one row a query each, in stacks that the kernels read and whose gradients they sum.

    Args:
        steps: most pairs that will be added.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.tokens: list[Tensor] = []
        self._sums: tuple[Tensor, Tensor] | None = None

    def add(self, key: Tensor, value: Tensor) -> None:
        """(queries, kv_heads, head_dim) and (queries, kv_heads, value_dim) of the next step."""
        if self.keys is None or self.values is None:
            self.keys, self.values = key.new_empty(self.steps, *key.shape), value.new_empty(self.steps, *value.shape)
        place = len(self.tokens)
        self.tokens.append(_Stack.apply(key, value, self, place))

    def sums(self) -> tuple[Tensor, Tensor]:
        """Gradients in keys and values so far, zeros at first."""
        if self._sums is None:
            assert self.keys is not None and self.values is not None
            self._sums = torch.zeros_like(self.keys), torch.zeros_like(self.values)
        return self._sums


class _Stack(torch.autograd.Function):
    """Puts one pair into the stacks; the token that comes out ties it into the graph."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, own: OwnKeys, place: int) -> Tensor:
        ctx.sums, ctx.place = own.sums, place
        ctx.set_materialize_grads(False)
        assert own.keys is not None and own.values is not None
        own.keys[place].copy_(key)
        own.values[place].copy_(value)
        return key.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        sums, ctx.sums = ctx.sums, None  # the token's node and its owner would keep each other alive
        key_grads, value_grads = sums()
        return key_grads[ctx.place], value_grads[ctx.place], None, None


class _FlashUnroll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, where: Tensor | None, bounds: Tensor, lengths: list[int],
        scale: float, own: OwnKeys, *tokens: Tensor,
    ) -> Tensor:  # fmt: skip
        output, everywhere = causal_forward(_place(query, key, where), key, value, bounds, lengths, scale)
        mixed, total = _pick(output, where), _pick(everywhere.t(), where).contiguous()
        if tokens:
            assert own.keys is not None and own.values is not None
            mixed, total = rows.merge_keys(mixed, total, query, own.keys, own.values, len(tokens), scale)
        ctx.save_for_backward(query, key, value, where, bounds, mixed, total, None if where is None else everywhere)
        ctx.rest = lengths, scale, own, len(tokens)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, where, bounds, mixed, total, everywhere = ctx.saved_tensors
        (lengths, scale, own, count), ctx.rest = ctx.rest, None
        grad = grads[0].contiguous()
        whole = total.t().contiguous() if where is None else everywhere.index_copy(1, where, total.t())
        query_grad, key_grad, value_grad = causal_backward(
            _place(grad, key, where), _place(query, key, where), key, value, _place(mixed, key, where), whole, bounds,
            lengths, scale,
        )  # fmt: skip
        query_grad = _pick(query_grad, where)
        if count:
            key_grads, value_grads = own.sums()
            query_grad = rows.merge_keys_backward(
                query_grad, grad, mixed, total, query, own.keys, own.values, key_grads, value_grads, count, scale
            )
        return query_grad, key_grad, value_grad, *(None,) * (5 + count)


def _place(states: Tensor, key: Tensor, where: Tensor | None) -> Tensor:
    """Rows of the queries at their places among the key rows, zeros elsewhere."""
    if where is None:
        return states
    return states.new_zeros(len(key), *states.shape[1:]).index_copy_(0, where, states)


def _pick(states: Tensor, where: Tensor | None) -> Tensor:
    return states if where is None else states.index_select(0, where)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: OwnKeys,
    where: Tensor | None,
    bounds: Tensor,
    lengths: list[int],
    scale: float,
) -> Tensor:
    """What `attention.unroll_attention` computes; (queries, heads, value_dim).

    Args:
        query: (queries, heads, head_dim), rotated.
        key, value: step 0's, (rows, kv_heads, head_dim) and (rows, kv_heads, value_dim).
        own: keys and values of the later steps up to this one.
        where: int64 (queries,), each query's row among the keys; None: all of them in order.
        bounds: int32 (conversations + 1,), first row of each conversation.
        lengths: rows of each conversation.
        scale: factor on the scores.
    """
    return _FlashUnroll.apply(query, key, value, where, bounds, lengths, scale, own, *own.tokens)
