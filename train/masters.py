"""AdamW for weights that are kept in 16 bits: float32 masters and moments live in the optimiser.

The model then needs 2 bytes a weight and 2 for its gradient instead of 4 and 4, DDP sends half as much, and nothing is
cast in the forward pass. DeepSpeed brings masters of its own; this class serves one process and DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class MasterAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` over float32 masters, written back into the weights after each step.

    Args:
        parameters: float32 leaves, already on their device.
        dtype: what matrices among them become here; vectors stay float32.
        options: as for AdamW.

    Attributes:
        weights, masters: leaves that are trained, and their masters, in the same order.
    """

    def __init__(self, parameters: Iterable[Tensor], dtype: torch.dtype, **options: Any) -> None:
        self.weights = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [weight.detach().float().clone().requires_grad_() for weight in self.weights]
        for weight in self.weights:
            if weight.ndim > 1:
                weight.data = weight.data.to(dtype)
        self._factor: Tensor | None = None
        super().__init__(self.masters, **options)

    @torch.no_grad()
    def clip(self, largest: float) -> Tensor:
        """Global norm of the weights' gradients, float32 on their device; the next step scales them down to `largest`."""
        grads = [weight.grad for weight in self.weights if weight.grad is not None]
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads])
        )
        self._factor = (largest / (norm + 1e-6)).clamp(max=1.0)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step from the weights' gradients."""
        assert closure is None
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.grad is not None:
                master.grad = weight.grad.float() if self._factor is None else weight.grad.float() * self._factor
        self._factor = None
        super().step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the weights' gradients."""
        for weight in self.weights:
            if set_to_none or weight.grad is None:
                weight.grad = None
            else:
                weight.grad.zero_()
