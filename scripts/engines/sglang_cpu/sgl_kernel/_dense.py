"""Start-up hooks, linear layers, norms, SiLU and RoPE of the stand-in (see the package docstring)."""

import os

import torch
import torch.nn.functional as F

from ._registry import operator


@operator("init_cpu_threads_env(str cpu_ids) -> str")
def init_cpu_threads_env(cpu_ids: str) -> str:
    """The original pins OpenMP threads to cores; here only their number is set, from OMP_NUM_THREADS (default 1)."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return ""


@operator("initialize(int size, int rank) -> ()")
def initialize(size: int, rank: int) -> None:
    """The original opens shared memory between tensor-parallel ranks; the stand-in serves one rank."""
    if size != 1:
        raise NotImplementedError(f"the PyTorch stand-in for sgl_kernel serves tensor parallel size 1, found {size}")


@operator("convert_weight_packed(Tensor(a) weight) -> Tensor(a)")
def convert_weight_packed(weight: torch.Tensor) -> torch.Tensor:
    """The original reorders a 16-bit weight into AMX tiles; a plain matrix product reads it as it is."""
    return weight.detach()


@operator("weight_packed_linear(Tensor x, Tensor weight, Tensor? bias, bool is_vnni) -> Tensor")
def weight_packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_vnni: bool):
    """x (T, in) times weight (out, in) transposed, in the dtype of x. float32 models never come here."""
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


@operator("rmsnorm_cpu(Tensor x, Tensor weight, float eps) -> Tensor")
def rmsnorm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


@operator("fused_add_rmsnorm_cpu(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()")
def fused_add_rmsnorm_cpu(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """In place: residual becomes x + residual, x becomes its RMS norm (from the sum before rounding)."""
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(F.rms_norm(total, (x.shape[-1],), weight.float(), eps))


@operator("silu_and_mul_cpu(Tensor x) -> Tensor")
def silu_and_mul_cpu(x: torch.Tensor) -> torch.Tensor:
    """(T, 2n) -> (T, n): silu of the first half times the second half."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate.float()).mul_(up.float()).to(x.dtype)


@operator(
    "rotary_embedding_cpu(Tensor positions, Tensor q, Tensor k, int head_size, Tensor cos_sin, bool neox)"
    " -> (Tensor, Tensor)"
)
def rotary_embedding_cpu(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, head_size: int, cos_sin: torch.Tensor, neox: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k (T, heads * head_size) by their positions (T,).

    cos_sin is (max_position, rotary_dim): cosines in the first half, sines in the second. `neox` pairs element i with
    i + rotary_dim / 2, otherwise elements 2i and 2i + 1 are a pair. Elements past rotary_dim pass through.
    """
    cos, sin = cos_sin[positions.long()].float().unsqueeze(1).chunk(2, -1)
    rotary_dim = 2 * cos.shape[-1]

    def rotate(states: torch.Tensor) -> torch.Tensor:
        heads = states.reshape(positions.numel(), -1, head_size)
        turning, rest = heads[..., :rotary_dim].float(), heads[..., rotary_dim:]
        if neox:
            first, second = turning.chunk(2, -1)
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        else:
            first, second = turning[..., ::2], turning[..., 1::2]
            turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
        turned = turned.to(states.dtype)
        return (torch.cat((turned, rest), -1) if rest.shape[-1] else turned).reshape(states.shape)

    return rotate(q), rotate(k)
