"""The decoder layer's compound parts as autograd functions that keep little and recompute what is cheap.

Kept for the backward pass of one step and token: the hidden state fed, queries, keys, values, attention's output, the
state after attention, and gate and up (unless those are recomputed too). Norms, the joined input and SwiGLU's product
are computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.train import rows
from draftsmith.train.products import Bank, Held


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rows.norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return *rows.norm_backward(grads[0], *ctx.saved_tensors, ctx.eps), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of (rows, size), in the dtype of `x`."""
    return _Norm.apply(x, weight, eps)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rows.turn(states, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rows.turn(grads[0].contiguous(), cos, -sin), None, None


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (rows, heads, size) by angles whose cosines and sines are (rows, size / 2)."""
    return _Turn.apply(states, cos, sin)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.count = len(states)
        return states.index_select(0, chosen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (chosen,), grad = ctx.saved_tensors, grads[0]
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, chosen, grad), None


def select(states: Tensor, chosen: Tensor) -> Tensor:
    """states[chosen] for int64 rows that are all different, so that the gradient is a copy and not a sum."""
    return _Select.apply(states, chosen)


class Fed:
    """What the tokens' embeddings bring to the first projections, made once for all steps of an unroll.

    Those projections read concat(norm(embedding), norm(hidden)): their left half multiplies a token's embedding alone,
    and step after step feeds the same tokens, one index further on. So each token's product is made once, its rows are
    added to each step's product with the hidden state, and what the steps bring to its gradient is summed before the
    backward product is made once.

    Args:
        bank: holds the weights.
        modules: the projections, which all read the concatenation.
        weight, eps: of the embedding's norm.
        table: (tokens, hidden), the frozen embedding or some of its rows.
        ids: int64 (slots,), the row of `table` that each slot feeds.
        dtype: of the products.
    """

    def __init__(
        self,
        bank: Bank,
        modules: list[nn.Linear],
        weight: Tensor,
        eps: float,
        table: Tensor,
        ids: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.halves = [bank.halves(module) for module in modules]
        self.products: list[Tensor] = []
        self._sums: list[Tensor] | None = None
        self.token: Tensor = _Feed.apply(
            weight, table, ids, eps, dtype, self, *(halves.token for halves in self.halves)
        )

    def sums(self) -> list[Tensor]:
        """Gradients in `products` so far, zeros at first."""
        if self._sums is None:
            self._sums = [torch.zeros_like(product) for product in self.products]
        return self._sums


class _Feed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, table: Tensor, ids: Tensor, eps: float, dtype: torch.dtype, fed: Fed, *tokens: Tensor
    ) -> Tensor:
        ctx.save_for_backward(weight, table, ids)
        ctx.eps, ctx.fed = eps, fed
        ctx.set_materialize_grads(False)
        normed = rows.embed(table, ids, weight, eps, dtype)
        halves = [each.left_half for each in fed.halves]
        read = halves[0].left(normed)
        fed.products = [half.forward(read) for half in halves]
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, table, ids = ctx.saved_tensors
        fed, ctx.fed = ctx.fed, None  # the token's node and its owner would keep each other alive
        sums = fed.sums()
        normed = rows.embed(table, ids, weight, ctx.eps, sums[0].dtype)
        halves = [each.left_half for each in fed.halves]
        read, back = halves[0].right(normed), None
        for half, total in zip(halves, sums, strict=True):
            half.learn(half.right(total), read)
            back = half.back(half.left(total), back)
        return rows.embed_backward(back, table, ids, weight, ctx.eps), *(None,) * (5 + len(halves))


class _FirstProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        slots: Tensor,
        queries: Tensor | None,
        eps: float,
        fed: Fed,
        *tokens: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, slots, queries)
        ctx.eps, ctx.fed = eps, fed
        normed = rows.norm(hidden, weight, eps)
        halves = [each.right_half for each in fed.halves]
        everywhere = halves[0].left(normed)
        asking = everywhere if queries is None else halves[0].left(normed.index_select(0, queries))
        results = []
        for index, half in enumerate(halves):
            places = slots if index or queries is None else slots[queries]
            results.append(half.forward(everywhere if index else asking, fed.products[index].index_select(0, places)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, slots, queries = ctx.saved_tensors
        fed, ctx.fed = ctx.fed, None
        halves, sums = [each.right_half for each in fed.halves], fed.sums()
        normed = rows.norm(hidden, weight, ctx.eps)
        everywhere, back = halves[0].right(normed), None
        asking = everywhere if queries is None else halves[0].right(normed.index_select(0, queries))
        del normed
        for half, total, grad in zip(halves[1:], sums[1:], grads[1:], strict=True):
            rows.add_rows(total, slots, grad)
            half.learn(half.right(grad), everywhere)
            back = half.back(half.left(grad), back)
        rows.add_rows(sums[0], slots if queries is None else slots[queries], grads[0])
        halves[0].learn(halves[0].right(grads[0]), asking)
        asked = halves[0].left(grads[0])
        assert back is not None
        if queries is None:
            back = halves[0].back(asked, back)
        else:
            back.index_copy_(0, queries, halves[0].back(asked, back.index_select(0, queries)))
        found = rows.norm_backward(back, hidden, weight, ctx.eps)
        return *found, *(None for _ in range(4 + 1 + len(halves)))


def first_products(
    fed: Fed, hidden: Tensor, weight: Tensor, slots: Tensor, queries: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """Products of concat(norm(embedding), norm(hidden)) with the modules of `fed`.

    Args:
        fed: the embeddings' part.
        hidden: (rows, hidden).
        weight: of the hidden state's norm.
        slots: int64 (rows,), all different: the slot of `fed` that each row reads.
        queries: where the first module's product is made (None: at all rows); the others' are made at all rows.
    """
    tokens = [halves.token for halves in fed.halves]
    return _FirstProducts.apply(hidden, weight, slots, queries, eps, fed, fed.token, *tokens)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        gate: Held,
        up: Held,
        down: Held,
        recompute: bool,
        *tokens: Tensor,
    ) -> Tensor:
        ctx.eps, ctx.held, ctx.recompute = eps, (gate, up, down), recompute
        normed = gate.left(rows.norm(x, weight, eps))
        gated, upped = gate.forward(normed), up.forward(normed)
        ctx.save_for_backward(x, weight, *(() if recompute else (gated, upped)))
        return down.forward(down.left(rows.swiglu(gated, upped)), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, down = ctx.held
        x, weight = ctx.saved_tensors[:2]
        normed = rows.norm(x, weight, ctx.eps)
        if ctx.recompute:
            left = gate.left(normed)
            gated, upped = gate.forward(left), up.forward(left)
            del left
        else:
            gated, upped = ctx.saved_tensors[2:]
        inner, gate_grad, up_grad = rows.swiglu_backward(down.back(down.left(grads[0])), gated, upped)
        del gated, upped
        down.learn(down.right(grads[0]), down.right(inner))
        del inner
        read = gate.right(normed)
        gate.learn(gate.right(gate_grad), read)
        up.learn(up.right(up_grad), read)
        back = up.back(up.left(up_grad), gate.back(gate.left(gate_grad)))
        return *rows.added_norm_backward(grads[0], back, x, weight, ctx.eps), *(None for _ in range(8))


def mlp(
    bank: Bank,
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate: nn.Linear,
    up: nn.Linear,
    down: nn.Linear,
    *,
    recompute: bool,
) -> Tensor:
    """x + down(silu(gate(n)) * up(n)) with n = norm(x); (rows, hidden). `recompute`: keep x only."""
    held = [bank[module] for module in (gate, up, down)]
    return _Mlp.apply(x, norm_weight, eps, *held, recompute, *(weight.token for weight in held))
