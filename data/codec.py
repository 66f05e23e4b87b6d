"""How rows of hidden states become bytes of the store: bf16 as they are, or about half of that as fp8.

fp8 keeps a tap as float8_e4m3fn under one float32 scale a tap and token (largest value -> 448): a tap's few huge channels
would ruin an integer grid, while e4m3 errs by 2 % of each value. The final state is even after its norm, so int8 in
groups of 32 channels, one bf16 scale each, errs four times less than e4m3 at the same size; it carries the teacher.
Bytes a token for width H and K taps: bf16 2(K+1)H; fp8 (K + 1.0625)H + 4K.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

import torch
from torch import Tensor

Codec = Literal["bfloat16", "fp8"]

E4M3_MAX = 448.0
"""Largest value of float8_e4m3fn."""

GROUP = 32
"""Channels of the final state that share a scale."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a shard: safetensors dtype, torch dtype, and shape behind the token axis."""

    code: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def layout(codec: Codec, taps: int, hidden: int) -> dict[str, Stored]:
    """The tensors that hold the states of `taps` taps and the final state, each with one row a token."""
    if codec == "bfloat16":
        return {
            "taps": Stored("BF16", torch.bfloat16, (taps, hidden)),
            "final": Stored("BF16", torch.bfloat16, (hidden,)),
        }
    groups = hidden // gcd(hidden, GROUP)
    return {
        "taps": Stored("F8_E4M3", torch.float8_e4m3fn, (taps, hidden)),
        "taps_scale": Stored("F32", torch.float32, (taps,)),
        "final": Stored("I8", torch.int8, (hidden,)),
        "final_scale": Stored("BF16", torch.bfloat16, (groups,)),
    }


def token_bytes(codec: Codec, taps: int, hidden: int) -> int:
    """Bytes of one token's states."""
    return sum(one.dtype.itemsize * torch.Size(one.shape).numel() for one in layout(codec, taps, hidden).values())


def encode(codec: Codec, taps: Tensor, final: Tensor) -> dict[str, Tensor]:
    """Tensors of a shard from taps (T, K, H) and final (T, H), on the device that holds them.

    States of any float dtype are rounded to bf16 first, so that both codecs start from the same values. A value that is
    not finite stays so in the scale or the value: see `not_finite`.
    """
    taps, final = taps.bfloat16(), final.bfloat16()
    if codec == "bfloat16":
        return {"taps": taps, "final": final}
    taps_scale = _scale(taps.abs().amax(dim=-1).float() / E4M3_MAX)
    groups = final.unflatten(-1, (-1, gcd(final.shape[-1], GROUP)))
    final_scale = _scale((groups.abs().amax(dim=-1).float() / 127).bfloat16())
    steps = (groups.float() / final_scale[..., None].float()).round().clamp(-127, 127)
    return {
        "taps": (taps.float() / taps_scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn),
        "taps_scale": taps_scale,
        "final": steps.nan_to_num().to(torch.int8).flatten(-2),
        "final_scale": final_scale,
    }


def decode(codec: Codec, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """taps bf16 (T, K, H) and final bf16 (T, H) from what `encode` gave, or from the same rows of each tensor."""
    if codec == "bfloat16":
        return stored["taps"], stored["final"]
    scale = stored["final_scale"]
    groups = stored["final"].unflatten(-1, (scale.shape[-1], -1))
    return (
        (stored["taps"].float() * stored["taps_scale"][..., None]).bfloat16(),
        (groups.float() * scale[..., None].float()).bfloat16().flatten(-2),
    )


def not_finite(codec: Codec, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Bool (T,) for taps and for final: rows that hold a value that is not finite."""
    names = ("taps", "final") if codec == "bfloat16" else ("taps_scale", "final_scale")
    return {
        name.removesuffix("_scale"): ~torch.isfinite(stored[name]).flatten(1).all(dim=1) for name in names
    }  # a row's scale is its largest value, so it tells for all of them


def _scale(scale: Tensor) -> Tensor:
    """A row of zeros has no largest value to divide by; it stays zero under any scale."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)
