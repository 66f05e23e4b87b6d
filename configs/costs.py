"""What a target weighs and how many operations a run needs, from dimensions alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.target import Target

SUSTAINED = 400e12
"""FLOP/s by which plans turn operations into hours: some 40 % of what the makers of H100 and H200 say of bf16."""

SYNTHESIS_RATE = 10_000
"""Generated tokens a second of all servers together by which plans turn answers into hours."""


@dataclass(frozen=True)
class TargetCost:
    """Parameters of the language model. `products` are those that one token is multiplied with, embedding and head aside."""

    parameters: int
    products: int
    weight_bytes: int


def target_cost(target: Target) -> TargetCost:
    """Count the matrices of a decoder: grouped or latent attention, dense or expert layers, embedding and head.

    Norms and biases are left out, and so is whatever a wrapper adds for pictures. Quantised weights (compressed-tensors,
    fp8) are routed experts where there are any, else the layers' matrices; the scale of a group counts two bytes.
    """
    text = target.text_config
    hidden, layers = target.hidden_size, target.num_layers
    attention = _attention(target, text) * layers
    experts = int(_first(text, "n_routed_experts", "num_experts", "num_local_experts") or 0)
    dense_layers = int(text.get("first_k_dense_replace") or 0) if experts else layers
    dense = 3 * hidden * target.intermediate_size * dense_layers
    routed = picked = shared = router = 0
    if experts:
        expert = 3 * hidden * int(text.get("moe_intermediate_size") or target.intermediate_size)
        sparse = layers - dense_layers
        routed = expert * experts * sparse
        picked = expert * int(text.get("num_experts_per_tok") or 1) * sparse
        shared = expert * int(text.get("n_shared_experts") or 0) * sparse
        router = hidden * experts * sparse
    ends = target.vocab_size * hidden * (1 if target.tied else 2)
    always = attention + dense + shared + router
    packed = routed or always
    share = _bytes_a_weight(text.get("quantization_config") or target.config.get("quantization_config") or {})
    total = always + routed + ends
    return TargetCost(total, always + picked, int(packed * share) + (total - packed) * 2)


def harvest_flops(cost: TargetCost, tokens: int) -> float:
    """One forward pass without the head; attention's own products left out."""
    return 2.0 * cost.products * tokens


def training_flops(spec: DrafterSpec, tokens: int, unroll_steps: int) -> float:
    """One epoch if every token were supervised at every step, attention's own products left out.

    A weight costs a forward product and two backward ones in each step, fc one and one in the first alone (its input
    needs no gradient).
    """
    matrices = {name: prod(shape) for name, shape in spec.trainable_shapes().items() if len(shape) == 2}
    fusion = sum(count for name, count in matrices.items() if name.split(".")[-2] == "fc")
    return (6.0 * (sum(matrices.values()) - fusion) * unroll_steps + 4.0 * fusion) * tokens


def gpu_hours(flops: float) -> float:
    """Hours of one GPU at SUSTAINED."""
    return flops / SUSTAINED / 3600


def _attention(target: Target, text: Mapping[str, Any]) -> int:
    """Weights of one layer's projections."""
    hidden, heads = target.hidden_size, target.num_attention_heads
    rank = text.get("kv_lora_rank")
    if not rank:
        return 2 * hidden * target.head_dim * (heads + target.num_key_value_heads)
    plain, turned, value = (int(text[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query, width = text.get("q_lora_rank"), heads * (plain + turned)
    queries = hidden * query + query * width if query else hidden * width
    return int(queries + hidden * (rank + turned) + rank * heads * (plain + value) + heads * value * hidden)


def _bytes_a_weight(quantised: Mapping[str, Any]) -> float:
    if quantised.get("quant_method") == "fp8":
        return 1.0
    groups = [group.get("weights") or {} for group in (quantised.get("config_groups") or {}).values()]
    if not groups or not groups[0].get("num_bits"):
        return 2.0
    group = groups[0].get("group_size")
    return float(groups[0]["num_bits"]) / 8 + (2 / group if group else 0)


def _first(text: Mapping[str, Any], *keys: str) -> Any:
    return next((text[key] for key in keys if text.get(key)), None)
