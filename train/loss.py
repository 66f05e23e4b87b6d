"""Soft cross-entropy over the draft vocabulary, in chunks: no (tokens x vocabulary) tensor outlives its chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_ELEMENTS = 1 << 24
"""Logits of one chunk; at D = 32000 that is 524 rows, 64 MiB in float32."""


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of w * -sum_v teacher_v log_softmax(logits)_v, with both gradients made in the forward pass.

    d loss / d logits = w * (softmax(logits) - teacher), since the teacher sums to one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        final: Tensor,
        rows: Tensor,
        teacher_weight: Tensor,
        row_weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        chunk = max(1, CHUNK_ELEMENTS // weight.shape[0])
        product = (
            torch.get_autocast_dtype(hidden.device.type)
            if torch.is_autocast_enabled(hidden.device.type)
            else hidden.dtype
        )
        with torch.autocast(hidden.device.type, enabled=False):
            head, taught = weight.to(product), teacher_weight.to(product)
            hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight)
            total = hidden.new_zeros((), dtype=torch.float32)
            best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
            for first in range(0, len(hidden), chunk):
                part = slice(first, first + chunk)
                student = hidden[part].to(product)
                logits = (student @ head.t()).float()
                teacher = (final[rows[part]].to(product) @ taught.t()).float().softmax(-1)
                best[part] = logits.argmax(-1)
                log_probability = F.log_softmax(logits, dim=-1)
                total += -(teacher * log_probability).sum(-1) @ row_weight[part]
                slope = ((log_probability.exp_() - teacher) * row_weight[part, None]).to(product)
                hidden_grad[part] = (slope @ head).to(hidden.dtype)
                weight_grad += (slope.t() @ student).to(weight.dtype)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return (
            grads[0].to(hidden_grad.dtype) * hidden_grad,
            grads[0].to(weight_grad.dtype) * weight_grad,
            None,
            None,
            None,
            None,
        )


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, final: Tensor, rows: Tensor, teacher_weight: Tensor, row_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the soft cross-entropy, and the draft ids that the drafter would choose.

    Args:
        hidden: (n, hidden), what the draft head reads.
        weight: (D, hidden), the draft head.
        final: (R, H), the target's post-norm states N.
        rows: int64 (n,), the row of `final` that teaches each position.
        teacher_weight: (D, H), the target's head at the draft vocabulary; softmax over it is the teacher (temperature 1).
        row_weight: float32 (n,), 0 for positions without a gradient.

    Returns:
        float32 scalar, differentiable in `hidden` and `weight`; int64 (n,) argmax over the draft vocabulary.
    """
    return _SoftCrossEntropy.apply(hidden, weight, final, rows, teacher_weight, row_weight)
