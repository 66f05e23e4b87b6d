"""AdamW for weights that are kept in 16 bits: float32 masters and moments live in the optimiser.

The model then needs 2 bytes a parameter and 2 for its gradient instead of 4 and 4, and no copy is cast in the forward
pass. DeepSpeed brings masters of its own; this class serves one process and DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class MasterAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` over float32 copies of `parameters`, written back after each step.

    Args:
        parameters: leaves in any floating dtype.
        options: as for AdamW.
    """

    def __init__(self, parameters: Iterable[Tensor], **options: Any) -> None:
        self.weights = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [weight.detach().float().clone().requires_grad_() for weight in self.weights]
        super().__init__(self.masters, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step from the weights' gradients."""
        assert closure is None
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
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

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state and the masters."""
        return super().state_dict() | {"masters": [master.detach() for master in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the weights follow the masters."""
        state = dict(state_dict)
        for weight, master, saved in zip(self.weights, self.masters, state.pop("masters"), strict=True):
            master.copy_(saved)
            weight.copy_(master)
        super().load_state_dict(state)
