"""The training-time-test unroll: forward over all draft steps of a packed batch, loss and right drafts of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.train.batch import Batch, StepRows
from draftsmith.train.loss import Objective, lesson
from draftsmith.train.model import Drafter
from draftsmith.train.products import Bank


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


def unroll_steps(
    drafter: Drafter, batch: Batch, bank: Bank | None = None, *, recompute: bool = False
) -> Iterator[tuple[StepRows, Tensor]]:
    """For each step of `batch`: its rows, and what the draft head reads at every query (queries, hidden)."""
    hidden, cache = drafter.begin(batch.taps, batch.fed, len(batch.steps), batch.table, bank)
    queries = None if batch.segments.dense else batch.queries
    for index, rows in enumerate(batch.steps):
        hidden, normed = drafter.step(
            rows.slots, hidden, rows.positions, None if index else queries, cache, batch.segments, recompute=recompute
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
        objective: the loss.
        float8: make the layer's and the head's products in float8.
        recompute: compute gate and up again in the backward pass instead of keeping them.
    """

    targets: Tensor
    teacher_weight: Tensor
    inside: Tensor

    def __init__(
        self,
        drafter: Drafter,
        teacher_weight: Tensor,
        targets: Tensor,
        *,
        keep_outside: bool = False,
        objective: Objective | None = None,
        float8: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.keep_outside, self.objective = keep_outside, objective or Objective()
        self.float8, self.recompute = float8, recompute
        self.register_buffer("teacher_weight", teacher_weight, persistent=False)
        self.register_buffer("targets", targets, persistent=False)
        inside = torch.zeros(drafter.spec.vocab_size, dtype=torch.bool, device=targets.device)
        inside[targets] = True
        self.register_buffer("inside", inside, persistent=False)

    def forward(self, batch: Batch, coefficients: list[float]) -> tuple[Tensor, list[StepResult]]:
        """Sum over steps of coefficients[i] * (sum of step i's loss), and a StepResult a step.

        With coefficients decay^i / (global supervised positions of step i) the sum over all processes is the loss.
        Products are made in the dtype that autocast asks for, else in the weights' own.
        """
        device = batch.taps.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.drafter.fc.weight.dtype
        with torch.autocast(device, enabled=False):
            return self._unrolled(batch, coefficients, Bank(dtype, float8=self.float8))

    def _unrolled(self, batch: Batch, coefficients: list[float], bank: Bank) -> tuple[Tensor, list[StepResult]]:
        states = [normed for _, normed in unroll_steps(self.drafter, batch, bank, recompute=self.recompute)]
        outsides = [~self.inside[rows.labels] for rows in batch.steps]
        weights = [torch.ones_like(outside) if self.keep_outside else ~outside for outside in outsides]
        head = self.drafter.lm_head
        total, losses, best = lesson(
            bank[head],
            batch.final,
            batch.lessons,
            self.teacher_weight.to(bank.dtype),
            torch.cat([weight * share for weight, share in zip(weights, coefficients[: len(weights)], strict=True)]),
            self.objective,
            [rows.active for rows in batch.steps],
            states,
            learn=head.weight.requires_grad and torch.is_grad_enabled(),
        )
        results: list[StepResult] = []
        reached = torch.zeros(len(batch.queries), dtype=torch.bool, device=total.device)
        sizes = [len(rows.active) for rows in batch.steps]
        for index, (rows, loss, choice) in enumerate(
            zip(batch.steps, losses.split(sizes), best.split(sizes), strict=True)
        ):
            right = self.targets[choice] == rows.labels
            chain = right & reached[rows.active] if index else right
            reached = torch.zeros_like(reached).index_copy_(0, rows.active, chain)
            results.append(StepResult((loss * weights[index]).sum(), right, chain, outsides[index]))
        return total, results


def loss_coefficients(counts: list[int], decay: float) -> list[float]:
    """decay^i / counts_i, `counts` being the global number of supervised positions of each step (0 where there are none)."""
    return [decay**index / count if count else 0.0 for index, count in enumerate(counts)]
