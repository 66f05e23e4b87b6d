"""Writes real checkpoints for the storage tests, each with the parameters that the processes held beside it.

Run as a script: `storage_writers.py zero OUT` (DeepSpeed engines in 1, 2 and 3 processes), `storage_writers.py dcp
OUT` (torch.distributed.checkpoint in 1 and 2), or under `accelerate launch` with `state OUT` (accelerate.save_state).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import multiprocessing, nn

RUNS = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3}},
    "zero1-bfloat16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "zero2-bfloat16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "zero3-bfloat16": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    "zero2-aligned": {"zero_optimization": {"stage": 2, "parameter_alignment": True}},
    "zero2-round-robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "zero1-float32-gradients": {
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
    },
}  # fmt: skip


WORLDS = {run: (1, 2, 3) if len(run) == 5 else (3,) for run, config in RUNS.items()}
"""Numbers of processes."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(10, 7, bias=False)
        self.mlp = nn.Linear(5, 3)


class Drafter(nn.Module):
    """Drafter names, odd sizes, buffers, a frozen embedding, and norms that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(15, 5, bias=False)
        self.midlayer = Layer()
        self.norm = nn.LayerNorm(5, bias=False)
        self.hidden_norm = nn.LayerNorm(5, bias=False)
        self.hidden_norm.weight = self.norm.weight
        self.lm_head = nn.Linear(5, 11, bias=False)
        self.embed_tokens = nn.Embedding(13, 5)
        self.embed_tokens.weight.requires_grad_(False)
        self.register_buffer("d2t", torch.arange(11) * 3)
        self.register_buffer("t2d", torch.arange(13) < 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        h = self.midlayer.q_proj(torch.cat((h, h), -1))
        h = torch.cat((self.midlayer.mlp(h[..., :5]), h[..., 5:]), -1)
        return self.lm_head(self.norm(h)).square().mean()


def groups(net: nn.Module) -> list[dict]:
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def held(net: nn.Module) -> dict[str, torch.Tensor]:
    """Masters, frozen parameters and buffers as the processes hold them.

    In float32 a whole parameter is its own master. DeepSpeed's `safe_get_full_fp32_param` is asked for the others only:
    with round_robin_gradients 0.19.8 returns other values than the module computes with.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    values = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        whole = parameter.dtype == torch.float32 and not hasattr(parameter, "ds_id")
        if parameter.requires_grad and not whole:
            values[name] = safe_get_full_fp32_param(parameter).clone()
        elif hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                values[name] = parameter.detach().clone()
        else:
            values[name] = parameter.detach().clone()
    return values | {name: buffer.clone() for name, buffer in net.named_buffers()}


def zero(rank: int, world: int, out: str) -> None:
    import deepspeed

    rendezvous(rank, world, out)
    deepspeed.init_distributed(dist_backend="gloo")
    for run, config in RUNS.items():
        if world not in WORLDS[run]:
            continue
        torch.manual_seed(0)
        net = Drafter()
        if "zero3" not in run:  # a module under two names: DeepSpeed records nothing of it
            net.input_norm = net.norm
        engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(groups(net), lr=1e-2),
            config={"train_micro_batch_size_per_gpu": 1, **config},
        )
        for _ in range(2):
            x = torch.randn(4, 15)
            engine.backward(engine(x.bfloat16() if "bf16" in config else x))
            engine.step()
        folder = f"{out}/{run}-of-{world}"
        engine.save_checkpoint(folder)
        values = held(net)
        if rank == 0:
            torch.save(values, f"{folder}.held")
    torch.distributed.barrier()


def dcp(rank: int, world: int, out: str) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rendezvous(rank, world, out)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    values = Drafter().state_dict()
    values["lm_head.weight"] = values["lm_head.weight"].bfloat16()
    del values["hidden_norm.weight"]
    cut = {"fc.weight": Shard(0), "midlayer.q_proj.weight": Shard(1), "embed_tokens.weight": Shard(1)}
    cut |= {"midlayer.mlp.bias": Shard(0), "norm.weight": Replicate()}
    state = {
        f"_orig_mod.{name}": distribute_tensor(value, mesh, [cut[name]]) if name in cut else value
        for name, value in values.items()
    }
    nested = {
        "model": state,
        "optim": {"state": {"fc.weight": {"exp_avg": torch.zeros(5, 15)}}, "param_groups": [{"lr": 0.1}]},
        "step": torch.tensor(3),
        "words": "a string",
    }
    checkpoint.save(nested, checkpoint_id=f"{out}/dcp-of-{world}")
    checkpoint.save(state, checkpoint_id=f"{out}/flat-of-{world}")
    if rank == 0:
        torch.save(values, f"{out}/dcp-of-{world}.held")
    torch.distributed.barrier()


def state(out: str) -> None:
    """As a training script would: an Accelerator from the launcher, two steps, save_state."""
    from draftsmith.configs.schema import TrainSection
    from draftsmith.train.launch import make_accelerator

    accelerator = make_accelerator(TrainSection(precision="float32"))
    torch.manual_seed(0)
    net = Drafter()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(groups(net), lr=1e-2))
    for _ in range(2):
        accelerator.backward(net(torch.randn(4, 15)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(out)
    values = held(accelerator.unwrap_model(net))
    if accelerator.is_main_process:
        torch.save(values, f"{out}.held")
    accelerator.wait_for_everyone()


def rendezvous(rank: int, world: int, out: str) -> None:
    torch.set_num_threads(1)
    port = 20000 + (os.getppid() * 7 + world) % 10000
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


if __name__ == "__main__":
    what, place = sys.argv[1:]
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    if what == "state":
        state(place)
    if what == "zero":  # imported once, before the processes fork
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # spares a minute of compilation
        for count in (1, 2, 3):
            multiprocessing.start_processes(zero, (count, place), count, start_method="fork")
    if what == "dcp":
        for count in (1, 2):
            multiprocessing.start_processes(dcp, (count, place), count, start_method="fork")
