"""Weights and AdamW's moments as whole float32 tensors by parameter name, whatever the back end has made of them.

DDP keeps both whole on every process; ZeRO flattens and cuts them. Gathered by name they fit any back end and any
number of processes, and nothing is lost: AdamW's only other state is its step count, which is the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftsmith.train.masters import MasterAdamW
from draftsmith.train.model import Drafter

MOMENTS = ("exp_avg", "exp_avg_sq")


def drafter_of(accelerator: Accelerator, model: Any) -> Drafter:
    """The drafter inside what the back end has wrapped."""
    return accelerator.unwrap_model(model).drafter


def gather_weights(accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Served name -> whole float32 tensor on the host; a collective call, empty on all processes but the first."""
    masters = _masters(optimizer)
    return _gather(accelerator, model, lambda parameter: _whole(masters.get(parameter, parameter)))


def gather_moments(accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, Tensor]:
    """`exp_avg/NAME` and `exp_avg_sq/NAME` -> whole tensor on the host; as `gather_weights`."""
    found: dict[str, Tensor] = {}
    masters = _masters(optimizer)
    for key in MOMENTS:
        part = _gather(
            accelerator, model, lambda own, key=key: _moment(optimizer, masters.get(own, own), key), trained=True
        )
        found |= {f"{key}/{name}": tensor for name, tensor in part.items()}
    return found


def restore_moments(
    accelerator: Accelerator, model: Any, optimizer: Any, moments: Mapping[str, Tensor], step: int
) -> None:
    """Put gathered moments into a fresh optimiser that counts `step` steps; weights go in before it is made."""
    parameters = {n: p for n, p in drafter_of(accelerator, model).named_parameters() if p.requires_grad}
    masters = _masters(optimizer)
    wrapper = optimizer.optimizer
    base = getattr(wrapper, "optimizer", wrapper)  # ZeRO wraps the optimiser that was given
    if base is wrapper:
        holders = [masters.get(parameter, parameter) for parameter in parameters.values()]
    elif hasattr(wrapper, "single_partition_of_fp32_groups"):
        holders = list(wrapper.single_partition_of_fp32_groups)
    else:
        holders = list(wrapper.fp32_partitioned_groups_flat)
    for holder in holders:
        base.state[holder] = {
            "step": _step_count(base, holder, step),
            **{key: torch.zeros_like(holder, memory_format=torch.preserve_format) for key in MOMENTS},
        }
    for name, parameter in parameters.items():
        for key in MOMENTS:
            value = moments[f"{key}/{name}"]
            if hasattr(parameter, "ds_id"):
                _set_zero3(parameter, value, key)
            elif hasattr(parameter, "_hp_mapping"):
                _set_zero2(wrapper, base, parameter, value, key)
            else:
                base.state[masters.get(parameter, parameter)][key].copy_(value)


@contextmanager
def whole_drafter(accelerator: Accelerator, model: Any) -> Iterator[Drafter]:
    """The drafter with all its weights on every process, for evaluation: itself, or under ZeRO-3 a copy of it."""
    drafter = drafter_of(accelerator, model)
    if not any(hasattr(parameter, "ds_id") for parameter in drafter.parameters()):
        yield drafter
        return
    copy = Drafter(drafter.spec, drafter.embedding).to(accelerator.device)
    with torch.no_grad():
        for parameter, own in zip(drafter.parameters(), copy.parameters(), strict=True):
            own.copy_(_whole(parameter))
    yield copy


def _masters(optimizer: Any) -> dict[Any, Any]:
    """Parameter -> its float32 master, where the optimiser keeps them beside 16-bit weights."""
    inner = optimizer.optimizer
    return dict(zip(inner.weights, inner.masters, strict=True)) if isinstance(inner, MasterAdamW) else {}


def _gather(accelerator: Accelerator, model: Any, read: Any, *, trained: bool = False) -> dict[str, Tensor]:
    """What `read` gives for every parameter; `trained`: for those that are not frozen."""
    found = {}
    for name, parameter in drafter_of(accelerator, model).named_parameters():
        if trained and not parameter.requires_grad:
            continue
        tensor = read(parameter)
        if accelerator.is_main_process:
            found[name] = tensor.detach().float().cpu().contiguous()
    return found


def _whole(parameter: Any) -> Tensor:
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)
    return parameter.data


def _moment(optimizer: Any, parameter: Any, key: str) -> Tensor:
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, key)
    return optimizer.state[parameter][key]


def _set_zero2(wrapper: Any, base: Any, parameter: Any, value: Tensor, key: str) -> None:
    """Stages 1 and 2: a process holds a slice of the flattened parameters, of this one perhaps nothing."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return
    flat = wrapper.single_partition_of_fp32_groups[mapping.param_group_index]
    there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
    part = value.flatten().narrow(0, here.start, here.numel)
    base.state[flat][key].narrow(0, there.start, there.numel).copy_(part)


def _set_zero3(parameter: Any, value: Tensor, key: str) -> None:
    """Stage 3: every process holds one equal part of each parameter, the last one filled up with zeros."""
    from deepspeed.utils import safe_set_local_optimizer_state

    size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()
    part = value.flatten()[rank * size : (rank + 1) * size]
    filled = nn.functional.pad(part, (0, size - part.numel()))
    safe_set_local_optimizer_state(parameter, filled.to(parameter.device), key)


def _step_count(base: Any, holder: Tensor, step: int) -> Any:
    """AdamW counts in a float32 tensor, on the device if it is fused; DeepSpeed's own Adam in an integer."""
    if not isinstance(base, torch.optim.Optimizer) or type(base).__module__.startswith("deepspeed"):
        return step
    group = base.param_groups[0]
    on_device = group.get("fused") or group.get("capturable")
    return torch.tensor(float(step), dtype=torch.float32, device=holder.device if on_device else "cpu")
