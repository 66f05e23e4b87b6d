"""The canonical drafter: its dimensions, its tensors by name and shape, and the default dimensions for a target.

Names are those that SGLang and vLLM both read (`LlamaForCausalLMEagle3`, no `model.` prefix). Taps are layer-input
indices: tap k is the residual stream entering 0-based layer k.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Architecture = Literal["LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"]
"""The two EAGLE-3 classes that SGLang and vLLM both know: grouped-query attention, and DeepSeek's latent attention."""

LLAMA: Architecture = "LlamaForCausalLMEagle3"
MLA: Architecture = "Eagle3DeepseekV2ForCausalLM"

NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
"""The layer's norms: of the token embedding, of the incoming hidden state, and of the MLP's input."""


class RopeSpec(BaseModel):
    """Rotary embedding of the drafter: base `theta` and the engine's scaling dictionary (None: plain RoPE)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    theta: float = Field(gt=0, allow_inf_nan=False)
    scaling: dict[str, Any] | None = None


class MlaSpec(BaseModel):
    """Dimensions of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A head's query and key are qk_nope_head_dim values without position and qk_rope_head_dim rotated ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    q_lora_rank: int = Field(gt=0)
    kv_lora_rank: int = Field(gt=0)
    qk_nope_head_dim: int = Field(gt=0)
    qk_rope_head_dim: int = Field(gt=0)
    v_head_dim: int = Field(gt=0)
    rope_interleave: bool = Field(default=True, description="rotated pairs are neighbours (2j, 2j+1), not halves")


class DrafterSpec(BaseModel):
    """Everything that a drafter is, besides the values of its tensors.

    An MLA drafter has `head_dim` = mla.qk_rope_head_dim, the part of a head that RoPE turns, and as many key-value
    heads as heads.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    architecture: Architecture = LLAMA
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0, description="the target's vocabulary V")
    draft_vocab_size: int = Field(gt=0, description="draft vocabulary D, rows of lm_head")
    target_hidden_size: int = Field(gt=0)
    target_num_layers: int = Field(gt=0)
    taps: tuple[int, ...] = Field(min_length=1, description="layer-input indices, ascending")
    rms_norm_eps: float = Field(gt=0, lt=0.1, allow_inf_nan=False)
    rope: RopeSpec
    max_position_embeddings: int = Field(gt=0, description="the context that engines may serve: the target's")
    trained_length: int | None = Field(default=None, description="longest position seen in training")
    fc_norm: bool = Field(default=False, description="EAGLE-3.1: an RMSNorm of its own on each tap before fc")
    norm_output: bool = Field(default=False, description="EAGLE-3.1: recurrence passes on the post-norm hidden state")
    norm_before_fc: bool = Field(default=False, description="one RMSNorm over the concatenated taps before fc")
    norm_before_residual: bool = Field(default=False, description="the residual is the normed hidden state; vLLM alone")
    fc_bias: bool = Field(default=False, description="fc has a bias; SGLang alone serves it")
    sliding_window: int | None = Field(default=None, gt=0, description="attention window of training, in tokens")
    mla: MlaSpec | None = Field(default=None, description="latent attention; None: grouped-query attention")

    @model_validator(mode="after")
    def _consistent(self) -> DrafterSpec:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding turns pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        if (self.mla is not None) != (self.architecture == MLA):
            raise ValueError(f"{MLA} and the dimensions in `mla` go together")
        if self.mla is not None:
            if self.head_dim != self.mla.qk_rope_head_dim or self.num_key_value_heads != self.num_attention_heads:
                raise ValueError("an MLA drafter has head_dim = qk_rope_head_dim and as many key-value heads as heads")
            if self.norm_before_fc:
                raise ValueError(f"{MLA} has no norm over the concatenated taps in any engine")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other")
        if list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0 or self.taps[-1] >= self.target_num_layers:
            raise ValueError(
                f"taps {list(self.taps)} must ascend within 0..{self.target_num_layers - 1}: engines feed them ascending"
            )
        if len(self.taps) * self.target_hidden_size == self.hidden_size:
            raise ValueError(
                f"{len(self.taps)} taps x target_hidden_size {self.target_hidden_size} equals hidden_size {self.hidden_size}: "
                "SGLang would skip fc in silence"
            )
        return self

    def trainable_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every floating-point tensor of a checkpoint, the frozen embedding left out."""
        hidden, inter = self.hidden_size, self.intermediate_size
        features = len(self.taps) * self.target_hidden_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, features)}
        if self.fc_bias:
            shapes["fc.bias"] = (hidden,)
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (features,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (self.target_hidden_size,) for i in range(len(self.taps))}
        shapes |= {f"midlayer.{norm}.weight": (hidden,) for norm in NORMS}
        shapes |= {f"midlayer.self_attn.{name}.weight": shape for name, shape in self._attention_shapes().items()}
        shapes |= {
            "midlayer.mlp.gate_proj.weight": (inter, hidden),
            "midlayer.mlp.up_proj.weight": (inter, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, inter),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }
        return shapes

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if self.mla is None:
            query, key = heads * self.head_dim, self.num_key_value_heads * self.head_dim
            return {
                "q_proj": (query, 2 * hidden),
                "k_proj": (key, 2 * hidden),
                "v_proj": (key, 2 * hidden),
                "o_proj": (hidden, query),
            }
        mla = self.mla
        return {
            "q_a_proj": (mla.q_lora_rank, 2 * hidden),
            "q_a_layernorm": (mla.q_lora_rank,),
            "q_b_proj": (heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), mla.q_lora_rank),
            "kv_a_proj_with_mqa": (mla.kv_lora_rank + mla.qk_rope_head_dim, 2 * hidden),
            "kv_a_layernorm": (mla.kv_lora_rank,),
            "kv_b_proj": (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
            "o_proj": (hidden, heads * mla.v_head_dim),
        }

    def map_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the draft vocabulary's maps: d2t int64 offsets (D,), t2d bool (V,)."""
        return {"d2t": (self.draft_vocab_size,), "t2d": (self.vocab_size,)}

    def parameter_count(self) -> int:
        """Trainable parameters (the target's embedding is frozen and not counted)."""
        return sum(prod(shape) for shape in self.trainable_shapes().values())


def default_taps(num_layers: int) -> tuple[int, ...]:
    """`[2, L//2, L-3]`, which SGLang and vLLM take by default; 2/30/58 for the 61 layers of Kimi-K2.5."""
    return (2, num_layers // 2, num_layers - 3)
