"""Counted floating-point operations of a training step, and the rate at which the device could do them at best."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.train.batch import MaskRule, Window, supervised
from draftsmith.train.mla import LatentAttention
from draftsmith.train.model import Attention

DENSE_BF16 = {
    "B200": 2250e12, "B100": 1750e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12,
    "H20": 148e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10": 125e12,
}  # fmt: skip
"""Makers' figures in FLOP/s without sparsity, by a part of the device's name; the first that fits counts."""

KEY_ROWS = ("k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Projections that step 0 computes for every packed row and not for drafting rows only."""

JOINED = (*Attention.reads_input, *LatentAttention.reads_input)
"""Projections whose left half multiplies embeddings, once for each token that is fed."""


def step_flops(spec: DrafterSpec, windows: Sequence[Window], unroll_steps: int, rule: MaskRule = "aligned") -> int:
    """FLOPs that one forward and backward pass over `windows` needs: two a multiplication, nothing for elementwise work.

    A matrix costs one forward product and two backward ones (fc's input needs no gradient), the teacher's head one.
    Rows that a step does not supervise count for nothing, whether or not they are computed.
    """
    keys = first = later = taught = pairs = fed = 0
    for window in windows:
        generated, turn = window.generated.numpy(), window.turn.numpy()
        masks = [supervised(generated, turn, step, rule)[: window.stop - window.start] for step in range(unroll_steps)]
        rows = [mask.nonzero()[0] for mask in masks]
        if not len(rows[0]):
            continue
        keys += int(rows[0][-1]) + 1
        fed += int(rows[0][-1]) + unroll_steps
        first += len(rows[0])
        later += sum(map(len, rows[1:]))
        taught += len(np.unique(np.concatenate([row + step for step, row in enumerate(rows)])))
        pairs += sum(int((row + 1).sum()) + step * len(row) for step, row in enumerate(rows))
    total = 0
    for name, shape in spec.trainable_shapes().items():
        if len(shape) != 2:
            continue
        part = name.split(".")[-2]
        count = keys if part == "fc" else keys + later if part in KEY_ROWS else first + later
        if part in JOINED:
            total += 3 * prod(shape) * (count + fed)
        else:
            total += 2 * prod(shape) * count * (2 if part == "fc" else 3)
    total += 2 * spec.draft_vocab_size * spec.target_hidden_size * taught
    mla = spec.mla
    width = 2 * spec.head_dim if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
    return total + 3 * 2 * spec.num_attention_heads * width * pairs


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that matrix products of `dtype` reach at best: the maker's figure, else measured in about a second."""
    if device.type == "cuda" and dtype is not torch.float32:
        name = torch.cuda.get_device_name(device)
        known = next((rate for part, rate in DENSE_BF16.items() if part in name), None)
        if known is not None:
            return known
    return measured_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The best of a few products of square matrices."""
    size = 4096 if device.type == "cuda" else 768
    left = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        _finish(device)
        began = time.perf_counter()
        left @ left
        _finish(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
