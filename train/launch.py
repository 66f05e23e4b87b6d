"""One Accelerator for every way of launching: one process, DDP, DeepSpeed; on GPUs with NCCL, on CPUs with gloo."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs


def make_accelerator(mixed_precision: str | None) -> Accelerator:
    """Accelerator from the environment that `accelerate launch` sets (or from nothing: one process).

    Without a GPU, DeepSpeed needs gloo named (accelerate leaves the back end open and then believes in one process),
    while DDP needs `cpu=True`.

    Args:
        mixed_precision: `no` or `bf16`; none: what the launcher names, else bf16 on a GPU and no on a CPU.
    """
    named = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    precision = named or ("bf16" if torch.cuda.is_available() else "no")
    common: dict[str, Any] = {"mixed_precision": precision, "step_scheduler_with_optimizer": False}
    if torch.cuda.is_available():
        return Accelerator(**common)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        _no_compiled_communication()
        return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **common)
    return Accelerator(cpu=True, **common)


def _no_compiled_communication() -> None:
    """Spare a minute of compilation at the first launch on a CPU; gloo carries the tensors, with the same results."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
