"""One optimiser step on this process's share of the data, and its figures, which stay on the device until asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.configs.schema import TrainSection
from draftsmith.train.loader import Share
from draftsmith.train.masters import MasterAdamW
from draftsmith.train.unroll import StepResult, loss_coefficients


def learning_rate(step: int, steps: int, settings: TrainSection) -> float:
    """Linear warm-up over warmup_ratio of the steps, then half a cosine down to the minimum at the last step."""
    warmup = max(1, round(settings.warmup_ratio * steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    low = settings.min_learning_rate_ratio
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@dataclass(frozen=True)
class Figures:
    """Means over the optimiser steps since the last reading, over all processes; one value an unroll step in lists.

    Attributes:
        loss: soft cross-entropy of each unroll step.
        acc, accept: as EAGLE-3's metrics define them.
        outside: share of step 0's labels outside the draft vocabulary.
        supervised: supervised positions of step 0.
        norms: gradient norm before clipping, of each optimiser step.
        losses: decayed sum of the unroll steps' losses, of each optimiser step.
    """

    loss: list[float]
    acc: list[float]
    accept: list[float]
    outside: float
    supervised: int
    norms: list[float]
    losses: list[float]


class Optimiser:
    """Runs optimiser steps and adds up what they say. No step waits for the device; `figures` does."""

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, settings: TrainSection) -> None:
        self.accelerator, self.model, self.optimizer, self.settings = accelerator, model, optimizer, settings
        self._norms: list[Tensor | float] = []
        self._sums: list[Tensor] = []
        self._counts: list[list[int]] = []

    def step(self, share: Share, rate: float, seed: int) -> None:
        """Forward, backward and update at learning rate `rate`.

        The loss is a sum over this process's positions divided by the global count, then multiplied by what accelerate
        and the back end divide by, so that the gradient does not depend on how a step is split. `seed` fixes whatever
        is drawn at random in it.
        """
        accelerator = self.accelerator
        torch.manual_seed(seed * accelerator.num_processes + accelerator.process_index)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        scale = accelerator.num_processes * accelerator.gradient_accumulation_steps
        coefficients = [scale * value for value in loss_coefficients(share.counts, self.settings.step_decay)]
        sums = torch.zeros(4, len(coefficients), device=accelerator.device)
        norm: Any = None
        for batch in share.batches:
            with accelerator.accumulate(self.model):
                weights = [0.0] * len(coefficients) if batch is None else coefficients
                computed = share.filler if batch is None else batch
                if computed is not None:
                    loss, results = self.model(computed.to(accelerator.device), weights)
                    accelerator.backward(loss)
                if batch is not None:
                    _add(sums, results)
                if accelerator.sync_gradients:
                    norm = self._clip()
                self.optimizer.step()
                self.optimizer.zero_grad()
        if norm is None:  # DeepSpeed clips by itself
            norm = self.model.get_global_grad_norm()
        self._norms.append(norm.detach() if isinstance(norm, Tensor) else float(norm or 0.0))
        self._sums.append(sums)
        self._counts.append(share.counts)

    def _clip(self) -> Any:
        inner = self.optimizer.optimizer
        if isinstance(inner, MasterAdamW):
            return inner.clip(self.settings.grad_clip)
        return self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)

    def figures(self) -> Figures:
        """Read and forget what the steps since the last call added up; a collective call."""
        device = self.accelerator.device
        summed = self.accelerator.reduce(torch.stack(self._sums).double(), "sum").cpu()  # (steps, 4, unroll steps)
        counts = torch.tensor(self._counts, dtype=torch.float64)
        decay = torch.tensor([self.settings.step_decay**index for index in range(counts.shape[1])], dtype=torch.float64)
        each = (summed[:, 0] / counts.clamp(min=1) * decay).sum(1)
        loss, acc, accept, outside = (summed.sum(0) / counts.sum(0).clamp(min=1)).tolist()
        norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32, device=device) for norm in self._norms])
        supervised = sum(step[0] for step in self._counts)
        self._norms, self._sums, self._counts = [], [], []
        return Figures(loss, acc, accept, outside[0], supervised, norms.tolist(), each.tolist())


def _add(sums: Tensor, results: list[StepResult]) -> None:
    for index, step in enumerate(results):
        parts = (step.loss, step.right.sum(), step.chain.sum(), step.outside.sum())
        sums[:, index] += torch.stack([part.float() for part in parts])
