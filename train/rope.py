"""Rotary embedding of the drafter, from the same table of initialisers that transformers (and so vLLM and SGLang) use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftsmith.configs.drafter import DrafterSpec, RopeSpec
from draftsmith.configs.errors import DraftsmithError

Turned = tuple[Tensor, Tensor]
"""Cosines and sines of rows' positions, as `angles` makes them."""


def inverse_frequencies(spec: DrafterSpec) -> tuple[Tensor, float]:
    """Inverse frequencies float32 (head_dim/2,) and the factor on cos and sin (1 unless the scaling is YaRN).

    Source: `transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS`; plain RoPE is theta ** (-2j / head_dim).
    """
    if spec.rope.scaling is None:
        exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        return 1.0 / (spec.rope.theta**exponent), 1.0
    if spec.mla is not None and spec.rope.scaling.get("rope_type") != "yarn":
        raise DraftsmithError(
            "engines compute every scaled RoPE of a latent-attention drafter as YaRN",
            where="drafter.rope.scaling",
            found=spec.rope.scaling.get("rope_type"),
            expected="none or yarn",
        )
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_theta": spec.rope.theta, **spec.rope.scaling},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[spec.rope.scaling["rope_type"]](config, torch.device("cpu"))
    if spec.mla is not None:
        factor = (
            _growth(spec.rope, "mscale", 1.0) / latent_growth(spec.rope) * spec.rope.scaling.get("attn_factor", 1.0)
        )
    return frequencies.float(), float(factor)


def latent_growth(rope: RopeSpec) -> float:
    """`mscale_all_dim`'s factor: latent attention multiplies its scores by the square of it (1 without YaRN).

    Source: `yarn_get_mscale` of DeepSeek-V2's published modeling code, which SGLang's and vLLM's `deepseek_yarn` keep.
    """
    return _growth(rope, "mscale_all_dim", 0.0)


def _growth(rope: RopeSpec, key: str, default: float) -> float:
    factor = 1.0 if rope.scaling is None else float(rope.scaling["factor"])
    if rope.scaling is None or factor <= 1:
        return 1.0
    return 0.1 * float(rope.scaling.get(key, default)) * math.log(factor) + 1.0


def angles(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 (rows, head_dim / 2) each, of int64 positions (rows,), times `factor`."""
    turned = positions.to(torch.float32)[:, None] * frequencies[None, :]
    return turned.cos() * factor, turned.sin() * factor
