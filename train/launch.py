"""One Accelerator for every way of launching: one process, DDP, DeepSpeed; on GPUs with NCCL, on CPUs with gloo."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs


def make_accelerator(precision: str | None) -> Accelerator:
    """Accelerator from the environment that `accelerate launch` sets (or from nothing: one process).

    Without a GPU, DeepSpeed needs gloo named (accelerate leaves the back end open and then believes in one process),
    while DDP needs `cpu=True`.

    Args:
        precision: `float32` or `bfloat16`; none: what the launcher names, else bfloat16 on a GPU and float32 on a CPU.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION") or ("bf16" if torch.cuda.is_available() else "no")
    mixed = {None: launched, "float32": "no", "bfloat16": "bf16"}[precision]
    common: dict[str, Any] = {"mixed_precision": mixed, "step_scheduler_with_optimizer": False}
    if torch.cuda.is_available():
        accelerator = Accelerator(**common)
    elif os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        _no_compiled_communication()
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **common)
    else:
        accelerator = Accelerator(cpu=True, **common)
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:  # DeepSpeed asks for a batch size; ours is one packed batch a process
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    return accelerator


def _no_compiled_communication() -> None:
    """Spare a minute of compilation at the first launch on a CPU; gloo carries the tensors, with the same results."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
