"""One Accelerator for every way of launching: one process, DDP, DeepSpeed; on GPUs with NCCL, on CPUs with gloo.

Notable choices: what is trained is float32 under every back end (in the weights, or in masters beside 16-bit ones) and
products run in the dtype of torch's own autocast, so that DDP and each ZeRO stage compute what one process computes
(DeepSpeed's bf16 mode would round weights, gradients and even RoPE's frequencies); accumulation and clipping come from the run's configuration, whatever the launcher's file says.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import TrainSection
from draftsmith.train.masters import MasterAdamW

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_accelerator(settings: TrainSection) -> Accelerator:
    """Accelerator from the environment that `accelerate launch` sets (or from nothing: one process).

    Without a GPU, DeepSpeed needs gloo named (accelerate leaves the back end open and then believes in one process),
    while DDP needs `cpu=True`.
    """
    if settings.deterministic:
        _one_order_only()
    launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    accumulation = settings.accumulation or (int(launched) if launched.isdigit() else 1)
    handlers: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)]
    common: dict[str, Any] = {"mixed_precision": "no", "step_scheduler_with_optimizer": False}
    if torch.cuda.is_available():
        accelerator = Accelerator(kwargs_handlers=handlers, **common)
    elif os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        _no_compiled_communication()
        accelerator = Accelerator(kwargs_handlers=[*handlers, InitProcessGroupKwargs(backend="gloo")], **common)
    else:
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **common)
    accelerator.gradient_accumulation_steps = accumulation
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": 1,  # DeepSpeed wants a batch size; ours is one packed batch a process
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": settings.grad_clip,
            "zero_force_ds_cpu_optimizer": False,  # offloaded, torch's AdamW computes the same as everywhere else
        }
    return accelerator


def precision_of(settings: TrainSection) -> torch.dtype:
    """Dtype of matrix products: the configuration's, else bfloat16 on a GPU or where the launcher asks for it, else float32.

    `no` is what `accelerate launch` sets where its file says nothing, so it asks for nothing.

    Raises:
        DraftsmithError: the launcher asks for a precision that training does not offer.
    """
    if settings.precision is not None:
        return DTYPES[settings.precision]
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", "bf16"):
        raise DraftsmithError(
            "the launcher asks for a precision that training does not offer",
            where="mixed_precision of the accelerate configuration",
            found=launched,
            expected="no or bf16",
            mend="train.precision=bfloat16",
        )
    return torch.bfloat16 if launched == "bf16" or torch.cuda.is_available() else torch.float32


def prepare(accelerator: Accelerator, unroll: nn.Module, dtype: torch.dtype, settings: TrainSection) -> tuple[Any, Any]:
    """Hand module and AdamW to the back end; the module's forward runs its products in `dtype`.

    On a GPU without DeepSpeed, matrices are kept in `dtype` and their float32 masters in the optimiser.
    """
    cuda = accelerator.device.type == "cuda"
    unroll.to(accelerator.device)
    options = {
        "lr": settings.learning_rate, "betas": settings.betas, "weight_decay": settings.weight_decay, "fused": cuda,
    }  # fmt: skip
    trained = [parameter for parameter in unroll.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if dtype is not torch.float32:
        unroll.forward = torch.autocast(accelerator.device.type, dtype)(unroll.forward)
    if dtype is not torch.float32 and cuda and accelerator.state.deepspeed_plugin is None:
        optimizer = MasterAdamW(trained, dtype, **options)
    else:
        optimizer = torch.optim.AdamW(trained, **options)
    model, prepared = accelerator.prepare(unroll, optimizer)
    return model, prepared


def _one_order_only() -> None:
    """Let torch choose kernels that give the same bits each time, and fail where it has none. A CPU's always do."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is made
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _no_compiled_communication() -> None:
    """Spare a minute of compilation at the first launch on a CPU; gloo carries the tensors, with the same results."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
