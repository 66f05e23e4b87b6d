"""The drafter's one kind of norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftsmith.train.layer import rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(rows, size) -> (rows, size)."""
        return rms_norm(x, self.weight, self.eps)
