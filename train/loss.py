"""Losses over the draft vocabulary, in chunks: no (tokens x vocabulary) tensor outlives its chunk.

All unroll steps are taken together and ordered by the target position that teaches them, so that each teacher
distribution is computed once, although up to `unroll_steps` drafts learn from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from draftsmith.train.products import Held
from draftsmith.train.rows import compiled, scaled, wide

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Logits of one chunk; at D = 32000 that is 524 rows and 64 MiB in float32, or 2097 rows and 128 MiB in bfloat16."""

LossKind = Literal["soft_cross_entropy", "total_variation", "lk_alpha", "lk_lambda"]


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


@dataclass(frozen=True)
class Objective:
    """Which loss a draft's distribution q and the teacher's p, both over the draft vocabulary, are compared by.

    soft_cross_entropy: -sum p log q. The others follow "LK Losses" (arXiv 2602.23881), with the acceptance rate
    a = sum min(p, q): total_variation is 1 - a, lk_alpha is -log a, and lk_lambda is l * KL(p, q) + (1 - l) * (1 - a)
    with l = exp(-eta * a) taken as a constant.
    """

    kind: LossKind = "soft_cross_entropy"
    eta: float = 3.0


@compiled(0)
def log_sum(logits: Tensor) -> Tensor:
    """Log of the sum of exp over the last dimension, wide."""
    return torch.logsumexp(wide(logits), -1)


def compare(
    teacher: Tensor, teacher_sum: Tensor, place: Tensor, logits: Tensor, row_weight: Tensor, kind: LossKind, eta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Slope in the logits, loss and choice of each draft.

    Args:
        teacher: (U, D) the teacher's logits; `teacher_sum` wide (U,), their `log_sum`.
        place: int64 (n,), which of them teaches each draft.
        logits: (n, D), the drafts'.
        row_weight: float32 (n,), factor on each draft's slope.
        kind, eta: an `Objective`'s.

    Returns:
        row_weight * d loss / d logits in the logits' dtype (n, D); wide losses (n,); int64 argmax (n,).
    """
    scores = wide(logits)
    log_q = scores - torch.logsumexp(scores, -1, keepdim=True)
    log_p = wide(teacher)[place] - teacher_sum[place][:, None]
    p, q = log_p.exp(), log_q.exp()
    if kind == "soft_cross_entropy":
        loss = -(p * log_q).sum(-1)
        slope = q - p
    else:
        accepted = torch.minimum(p, q).sum(-1)
        missing = q * (q < p).to(q.dtype)
        slope = q * missing.sum(-1, keepdim=True) - missing
        loss = 1 - accepted
        if kind == "lk_alpha":
            accepted = accepted.clamp(min=1e-6)
            slope = slope / accepted[:, None]
            loss = -accepted.log()
        elif kind == "lk_lambda":
            share = (-eta * accepted).exp()
            loss = share * (p * (log_p - log_q)).sum(-1) + (1 - share) * loss
            slope = share[:, None] * (q - p) + (1 - share)[:, None] * slope
    return (slope * row_weight[:, None]).to(logits.dtype), loss, scores.argmax(-1)


_compare = compiled(0, 1, 2, 3, 4)(compare)


class _Lesson(torch.autograd.Function):
    """The head's product, loss and both gradients in one forward pass over chunks of drafts."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, head: Held, final: Tensor, lessons: Lessons, teacher_weight: Tensor, row_weight: Tensor,
        objective: Objective, actives: list[Tensor], learn: bool, *states: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.head, ctx.actives, ctx.counts, ctx.learn = head, actives, [len(state) for state in states], learn
        student = torch.cat(
            [
                state if len(state) == len(active) else state.index_select(0, active)
                for state, active in zip(states, actives, strict=True)
            ]
        )
        peak = row_weight.max().clamp(min=torch.finfo(row_weight.dtype).tiny)
        share = row_weight / peak  # slopes near 1 lose nothing in 16 bits; the backward pass multiplies by the peak
        losses = student.new_empty(len(student), dtype=row_weight.dtype)
        best = torch.empty(len(student), dtype=torch.int64, device=student.device)
        for first, last in _chunks(lessons.bounds, teacher_weight.shape[0], student.device.type):
            drafts = slice(lessons.bounds[first], lessons.bounds[last])
            order, place = lessons.order[drafts], lessons.place[drafts] - first
            teacher = final[lessons.taught[first:last]].to(teacher_weight.dtype) @ teacher_weight.t()
            read = student.index_select(0, order)
            logits = head.forward(head.left(read))
            slope, loss, choice = _compare(
                teacher, log_sum(teacher), place, logits, share[order], objective.kind, objective.eta
            )
            losses[order], best[order] = loss.to(losses.dtype), choice
            if learn:
                head.learn(head.right(slope), head.right(read))
            student.index_copy_(0, order, head.back(head.left(slope)))
        ctx.save_for_backward(student, peak)
        ctx.mark_non_differentiable(losses, best)
        return losses @ row_weight, losses, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slopes, peak = ctx.saved_tensors
        factor = wide(grads[0]) * peak
        if ctx.learn:
            ctx.head.gradient = scaled(ctx.head.gradient, factor)
        parts = []
        for slope, active, count in zip(
            slopes.split([len(active) for active in ctx.actives]), ctx.actives, ctx.counts, strict=True
        ):
            part = scaled(slope, factor)
            if count != len(active):
                part = slope.new_zeros(count, slope.shape[1]).index_copy_(0, active, part)
            parts.append(part)
        return *(None,) * 9, *parts


def _chunks(bounds: list[int], vocabulary: int, device: str) -> list[tuple[int, int]]:
    """Ranges of teaching positions whose drafts and teachers together stay near CHUNK_ELEMENTS logits."""
    room = max(1, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cpu"]) // vocabulary)
    ranges, first = [], 0
    for last in range(1, len(bounds)):
        if last == len(bounds) - 1 or bounds[last + 1] - bounds[first] > room:
            ranges.append((first, last))
            first = last
    return ranges


def lesson(
    head: Held,
    final: Tensor,
    lessons: Lessons,
    teacher_weight: Tensor,
    row_weight: Tensor,
    objective: Objective,
    actives: list[Tensor],
    states: list[Tensor],
    *,
    learn: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of the loss over all drafts of all steps, each draft's own loss, and the ids that the drafter chooses.

    Args:
        head: the draft head (D, hidden).
        final: (R, H), the target's post-norm states.
        lessons: which row of `final` teaches which draft.
        teacher_weight: (D, H), the target's head at the draft vocabulary; softmax over it is the teacher (temperature 1).
        row_weight: float32 (N,), weight of each draft, 0 for those without a gradient.
        objective: the loss.
        actives: of each step, int64 (n_i,): the rows that are drafts, N of them in all.
        states: of each step (rows, hidden), what the draft head reads.
        learn: give the head a gradient.

    Returns:
        float32 scalar, differentiable in `states` and the head; float32 (N,) unweighted losses; int64 (N,) draft ids.
    """
    return _Lesson.apply(
        head.token, head, final, lessons, teacher_weight, row_weight, objective, actives, learn, *states
    )
