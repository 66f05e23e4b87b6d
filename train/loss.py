"""Soft cross-entropy over the draft vocabulary, in chunks: no (tokens x vocabulary) tensor outlives its chunk.

All unroll steps are taken together and ordered by the target position that teaches them, so that each teacher
distribution is computed once, although up to `unroll_steps` drafts learn from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_ELEMENTS = 1 << 24
"""Logits of one chunk; at D = 32000 that is 524 rows, 64 MiB in float32."""


@dataclass(frozen=True)
class Lessons:
    """Which draft learns from which target position.

    Attributes:
        order: int64 (N,), drafts (all steps, concatenated) sorted by the position that teaches them.
        taught: int64 (U,), the rows of the target's states that teach, ascending, each once.
        place: int64 (N,), index into `taught` of each draft in `order`.
        bounds: U + 1 host integers; drafts `order[bounds[u]:bounds[u+1]]` learn from `taught[u]`.
    """

    order: Tensor
    taught: Tensor
    place: Tensor
    bounds: list[int]


def arrange(teachers: list[Tensor]) -> Lessons:
    """Lessons from the teaching rows of each step, int64 (n_i,) on the host."""
    rows = torch.cat(teachers).numpy()
    order = np.argsort(rows, kind="stable")
    taught, place, counts = np.unique(rows[order], return_inverse=True, return_counts=True)
    return Lessons(
        order=torch.from_numpy(order),
        taught=torch.from_numpy(taught),
        place=torch.from_numpy(place.reshape(-1)),
        bounds=[0, *np.cumsum(counts).tolist()],
    )


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
        lessons: Lessons,
        teacher_weight: Tensor,
        row_weight: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = hidden.device.type
        product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            head, taught = weight.to(product), teacher_weight.to(product)
            hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight)
            losses = hidden.new_empty(len(hidden), dtype=torch.float32)
            best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
            for first, last in _chunks(lessons.bounds, weight.shape[0]):
                drafts = slice(lessons.bounds[first], lessons.bounds[last])
                rows, place = lessons.order[drafts], lessons.place[drafts] - first
                teacher = (final[lessons.taught[first:last]].to(product) @ taught.t()).float().softmax(-1)[place]
                student = hidden[rows].to(product)
                log_probability = F.log_softmax((student @ head.t()).float(), dim=-1)
                best[rows] = log_probability.argmax(-1)
                losses[rows] = -torch.linalg.vecdot(teacher, log_probability)
                slope = log_probability.exp_().sub_(teacher).mul_(row_weight[rows, None]).to(product)
                hidden_grad[rows] = (slope @ head).to(hidden.dtype)
                weight_grad += (slope.t() @ student).to(weight.dtype)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.mark_non_differentiable(losses, best)
        return losses @ row_weight, losses, best

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


def _chunks(bounds: list[int], vocabulary: int) -> list[tuple[int, int]]:
    """Ranges of teaching positions whose drafts and teachers together stay near CHUNK_ELEMENTS logits."""
    room = max(1, CHUNK_ELEMENTS // vocabulary)
    ranges, first = [], 0
    for last in range(1, len(bounds)):
        if last == len(bounds) - 1 or bounds[last + 1] - bounds[first] > room:
            ranges.append((first, last))
            first = last
    return ranges


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, final: Tensor, lessons: Lessons, teacher_weight: Tensor, row_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of the soft cross-entropy over drafts, each draft's own loss, and the ids that the drafter chooses.

    Args:
        hidden: (N, hidden), what the draft head reads.
        weight: (D, hidden), the draft head.
        final: (R, H), the target's post-norm states.
        lessons: which row of `final` teaches which draft.
        teacher_weight: (D, H), the target's head at the draft vocabulary; softmax over it is the teacher (temperature 1).
        row_weight: float32 (N,), weight of each draft, 0 for those without a gradient.

    Returns:
        float32 scalar, differentiable in `hidden` and `weight`; float32 (N,) unweighted losses; int64 (N,) draft ids.
    """
    return _SoftCrossEntropy.apply(hidden, weight, final, lessons, teacher_weight, row_weight)
