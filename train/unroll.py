"""The training-time-test unroll: forward over all draft steps of a packed batch, loss and right drafts of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.train.batch import Batch, StepRows
from draftsmith.train.loss import soft_cross_entropy
from draftsmith.train.model import Cache, Drafter


@dataclass(frozen=True)
class StepResult:
    """What one unroll step did at its supervised positions (n,).

    Attributes:
        loss: float32 scalar, sum of the soft cross-entropy over positions with a gradient; not differentiable.
        right: bool (n,), the draft equals the label.
        chain: bool (n,), this draft and all earlier ones of the chain are right.
        outside: bool (n,), the label is outside the draft vocabulary (a miss).
    """

    loss: Tensor
    right: Tensor
    chain: Tensor
    outside: Tensor


def unroll_steps(drafter: Drafter, batch: Batch) -> Iterator[tuple[StepRows, Tensor]]:
    """For each step of `batch`: its rows, and what the draft head reads there (n_i, hidden)."""
    hidden, cache = drafter.fuse(batch.taps.to(drafter.fc.weight.dtype)), Cache()
    for index, rows in enumerate(batch.steps):
        if index:
            hidden = hidden[rows.keep]
            cache.keep(rows.keep)
        hidden, normed = drafter.step(
            rows.ids, hidden, rows.positions, None if index else rows.keep, cache, rows.segments
        )
        yield rows, normed


class Unroll(nn.Module):
    """Drafter plus frozen teacher; its forward is the whole of a training step's computation.

    Args:
        drafter: the module that is trained.
        teacher_weight: (D, H), rows of the target's head in the draft vocabulary, in draft-id order.
        targets: int64 (D,), target id of each draft id (arange + d2t).
        keep_outside: give positions whose label is outside the draft vocabulary a gradient too (the teacher is
            the target's distribution renormalised over the draft vocabulary).
    """

    targets: Tensor
    teacher_weight: Tensor
    inside: Tensor

    def __init__(
        self, drafter: Drafter, teacher_weight: Tensor, targets: Tensor, *, keep_outside: bool = False
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.keep_outside = keep_outside
        self.register_buffer("teacher_weight", teacher_weight, persistent=False)
        self.register_buffer("targets", targets, persistent=False)
        inside = torch.zeros(drafter.spec.vocab_size, dtype=torch.bool)
        inside[targets] = True
        self.register_buffer("inside", inside, persistent=False)

    def forward(self, batch: Batch, coefficients: list[float]) -> tuple[Tensor, list[StepResult]]:
        """Sum over steps of coefficients[i] * (sum of step i's soft cross-entropy), and a StepResult a step.

        With coefficients decay^i / (global supervised positions of step i) the sum over all processes is the loss.
        """
        states, weights, outsides = [], [], []
        for index, (rows, normed) in enumerate(unroll_steps(self.drafter, batch)):
            outside = ~self.inside[rows.labels]
            weight = torch.ones_like(outside) if self.keep_outside else ~outside
            states.append(normed)
            weights.append(weight * coefficients[index])
            outsides.append((outside, weight))
        total, losses, best = soft_cross_entropy(
            torch.cat(states),
            self.drafter.lm_head.weight,
            batch.final,
            batch.lessons,
            self.teacher_weight,
            torch.cat(weights),
        )
        results: list[StepResult] = []
        sizes = [len(state) for state in states]
        for rows, loss, choice, (outside, weight) in zip(
            batch.steps, losses.split(sizes), best.split(sizes), outsides, strict=True
        ):
            right = self.targets[choice] == rows.labels
            chain = right & results[-1].chain[rows.keep] if results else right
            results.append(StepResult((loss * weight).sum(), right, chain, outside))
        return total, results


def loss_coefficients(counts: list[int], decay: float) -> list[float]:
    """decay^i / counts_i, `counts` being the global number of supervised positions of each step (0 where there are none)."""
    return [decay**index / count if count else 0.0 for index, count in enumerate(counts)]
