"""The training-time-test unroll: forward over all draft steps of a packed batch, loss and right drafts of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.train.batch import Batch
from draftsmith.train.loss import soft_cross_entropy
from draftsmith.train.model import Cache, Drafter


@dataclass(frozen=True)
class StepSums:
    """Sums over the supervised positions of one step, for a later division by global counts.

    Attributes:
        loss: float32 scalar, differentiable.
        right: bool (n,), the draft equals the label.
        chain: bool (n,), this draft and all earlier ones of the chain are right.
        outside: bool (n,), the target's own choice is outside the draft vocabulary (a miss).
    """

    loss: Tensor
    right: Tensor
    chain: Tensor
    outside: Tensor


class Unroll(nn.Module):
    """Drafter plus frozen teacher; its forward is the whole of a training step's computation.

    Args:
        drafter: the module that is trained.
        teacher_weight: (D, H), rows of the target's head in the draft vocabulary, in draft-id order.
        targets: int64 (D,), target id of each draft id (arange + d2t).
        keep_outside: give positions whose label is outside the draft vocabulary a gradient too (the teacher is
            the target's distribution renormalised over the draft vocabulary).
    """

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

    def forward(self, batch: Batch) -> list[StepSums]:
        """One StepSums a step of `batch`. Sums are local: divide by the global number of supervised positions."""
        hidden = self.drafter.fuse(batch.taps.to(self.drafter.fc.weight.dtype))
        cache, sums = Cache(), []
        chain: Tensor | None = None
        for index, rows in enumerate(batch.steps):
            if index:
                hidden = hidden[rows.keep]
                cache.keep(rows.keep)
            hidden, normed = self.drafter.step(
                rows.ids, hidden, rows.positions, None if index else rows.keep, cache, rows.segments
            )
            outside = ~self.inside[rows.labels]
            weight = torch.ones_like(outside, dtype=torch.float32) if self.keep_outside else (~outside).float()
            loss, best = soft_cross_entropy(
                normed, self.drafter.lm_head.weight, batch.final, rows.teacher, self.teacher_weight, weight
            )
            right = self.targets[best] == rows.labels
            chain = right if chain is None else right & chain[rows.keep]
            sums.append(StepSums(loss, right, chain, outside))
        return sums


def total_loss(sums: list[StepSums], counts: list[int], decay: float) -> Tensor:
    """sum_i decay^i * loss_i / counts_i, `counts` being the global number of supervised positions of each step."""
    parts = [decay**index * step.loss / counts[index] for index, step in enumerate(sums)]
    return torch.stack(parts).sum()
