"""One Accelerator for every way of launching: one process, DDP, DeepSpeed; on GPUs with NCCL, on CPUs with gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator, InitProcessGroupKwargs


def make_accelerator() -> Accelerator:
    """Accelerator from the environment that `accelerate launch` sets (or from nothing: one process).

    Without a GPU, DeepSpeed needs gloo named (accelerate leaves the back end open and then believes in one process),
    while DDP needs `cpu=True`. On a GPU bf16 is the default where the launcher names no precision.
    """
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if torch.cuda.is_available():
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "bf16")
        return Accelerator(mixed_precision=precision, step_scheduler_with_optimizer=False)
    if deepspeed:
        _no_compiled_communication()
        return Accelerator(
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], step_scheduler_with_optimizer=False
        )
    return Accelerator(cpu=True, step_scheduler_with_optimizer=False)


@contextmanager
def whole_tensors(accelerator: Accelerator) -> Iterator[None]:
    """Keep ZeRO-3 from partitioning models that are loaded inside: accelerate registers its plugin with transformers
    even where zero3_init_flag is off, and every `from_pretrained` then yields empty shards."""
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    plugin = accelerator.state.deepspeed_plugin if accelerator.distributed_type.value == "DEEPSPEED" else None
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if plugin is not None and getattr(plugin, "dschf", None) is not None:
            set_hf_deepspeed_config(plugin.dschf)


def _no_compiled_communication() -> None:
    """Spare a minute of compilation at the first launch on a CPU; gloo carries the tensors, with the same results."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
