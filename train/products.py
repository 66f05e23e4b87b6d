"""Matrix products with weights that are used many times in one unroll: cast once, gradients summed in place.

A drafter's layer runs `unroll_steps` times on the same weights. Autograd would make a gradient for every use and add
them up, and mixed precision would keep what it casts for each. Here a weight is *held* for the length of one forward
and backward pass: its copy in the dtype of the products is made once, each use adds its part to one gradient by a
product that accumulates, and the parameter receives that gradient once, so that DDP's and DeepSpeed's hooks see what
they expect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.train import float8


class Held:
    """One weight (out, in) during one forward and backward pass.

    Attributes:
        token: scalar that ties the parameter into the graph; every product takes it as an input.
        gradient: the sum so far, None before the first part.
    """

    def __init__(self, parameter: Tensor, dtype: torch.dtype) -> None:
        self.gradient: Tensor | None = None
        self.token: Tensor = _Collect.apply(parameter, self)
        self.value = parameter.detach().to(dtype)

    def left(self, x: Tensor) -> Any:
        """What `forward` and `back` take in place of `x` (rows, size): prepared once for several weights."""
        return x

    def forward(self, x: Any, add: Tensor | None = None) -> Tensor:
        """x @ value.T, plus `add` (rows, out)."""
        return x @ self.value.t() if add is None else torch.addmm(add, x, self.value.t())

    def back(self, grad: Any, into: Tensor | None = None) -> Tensor:
        """Gradient in the input of a product: grad @ value, added to `into` in place where that is given."""
        return grad @ self.value if into is None else into.addmm_(grad, self.value)

    def learn(self, grad: Any, x: Any) -> None:
        """Add this use's part, grad.T @ x, to the gradient. `grad` and `x` come from `right`."""
        if self.gradient is None:
            self.gradient = grad.t() @ x
        else:
            self.gradient.addmm_(grad.t(), x)

    def right(self, x: Tensor) -> Any:
        """What `learn` takes in place of `x`."""
        return x

    def take(self) -> Tensor | None:
        """The gradient, which is forgotten here."""
        gradient, self.gradient = self.gradient, None
        return gradient


class Halves:
    """A weight (out, 2 * size) whose left and right half multiply different inputs.

    Attributes:
        left_half, right_half: held on their own; the parameter receives both gradients side by side.
    """

    def __init__(self, kind: type[Held], parameter: Tensor, dtype: torch.dtype) -> None:
        self.token: Tensor = _Collect.apply(parameter, self)
        size = parameter.shape[1] // 2
        self.left_half, self.right_half = (
            kind(parameter.detach()[:, columns], dtype) for columns in (slice(0, size), slice(size, None))
        )

    def take(self) -> Tensor | None:
        """Both gradients as one, forgotten here."""
        parts = [half.take() for half in (self.left_half, self.right_half)]
        return None if parts[0] is None or parts[1] is None else torch.cat([parts[0], parts[1]], dim=1)


class HeldFloat8(Held):
    """The same with float8 products, every row and column of the operands scaled on its own; the gradient stays wide."""

    def __init__(self, parameter: Tensor, dtype: torch.dtype) -> None:
        super().__init__(parameter, dtype)
        self.dtype = dtype
        self.by_row, self.by_column = float8.rows(self.value), float8.columns(self.value)
        del self.value

    def left(self, x: Tensor) -> Any:
        return float8.rows(x)

    def forward(self, x: Any, add: Tensor | None = None) -> Tensor:
        product = float8.product(x, self.by_row, self.dtype)
        return product if add is None else product + add

    def back(self, grad: Any, into: Tensor | None = None) -> Tensor:
        product = float8.product(grad, self.by_column, self.dtype)
        return product if into is None else into.add_(product)

    def learn(self, grad: Any, x: Any) -> None:
        part = float8.product(grad, x, self.dtype)
        self.gradient = part if self.gradient is None else self.gradient.add_(part)

    def right(self, x: Tensor) -> Any:
        return float8.columns(x)


class Bank:
    """The weights held for one pass, made on first use.

    Args:
        dtype: of the products; None: the weight's own.
        float8: use float8 products where both sides of a weight are multiples of 16.
    """

    def __init__(self, dtype: torch.dtype | None = None, *, float8: bool = False) -> None:
        self.dtype, self.float8 = dtype, float8
        self._held: dict[nn.Module, Held] = {}
        self._halves: dict[nn.Module, Halves] = {}

    def __getitem__(self, module: nn.Linear) -> Held:
        if module not in self._held:
            weight = module.weight
            self._held[module] = self._kind(weight)(weight, self.dtype or weight.dtype)
        return self._held[module]

    def halves(self, module: nn.Linear) -> Halves:
        """The two halves of a module that reads a concatenation."""
        if module not in self._halves:
            weight = module.weight
            self._halves[module] = Halves(self._kind(weight), weight, self.dtype or weight.dtype)
        return self._halves[module]

    def _kind(self, weight: Tensor) -> type[Held]:
        return HeldFloat8 if self.float8 and not (weight.shape[0] % 16 or weight.shape[1] % 32) else Held

    def linear(self, module: nn.Linear, x: Tensor, add: Tensor | None = None) -> Tensor:
        """module(x) for x (rows, in), plus `add` (rows, out) without keeping it."""
        held = self[module]
        result: Tensor = _Product.apply(x, add, held.token, held)
        return result if module.bias is None else result + module.bias.to(result.dtype)


class _Collect(torch.autograd.Function):
    """Hands a weight's summed gradient to its parameter, after all products that took the token went backward."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, held: Held | Halves) -> Tensor:
        ctx.held, ctx.dtype = held, parameter.dtype
        ctx.set_materialize_grads(False)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        held, ctx.held = ctx.held, None  # the token's node and its owner would keep each other alive
        gradient = held.take()
        return None if gradient is None else gradient.to(ctx.dtype), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, add: Tensor | None, token: Tensor, held: Held) -> Tensor:
        ctx.held = held
        ctx.save_for_backward(x)
        return held.forward(held.left(x), add)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,), held, grad = ctx.saved_tensors, ctx.held, grads[0]
        if ctx.needs_input_grad[2]:
            held.learn(held.right(grad), held.right(x))
        back = held.back(held.left(grad)) if ctx.needs_input_grad[0] else None
        return back, grad if ctx.needs_input_grad[1] else None, None, None
