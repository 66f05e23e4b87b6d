"""Drafters in every foreign form, written by hand from the forms' documented names: an oracle that shares no code.

`Variant` says what the drafter is; `tensors_of` makes its weights by SGLang's names; each `write_*` lays them out as the
form's own tools do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, DRAFT, LAYERS = 64, 512, 128, 8
THETA = 5e6


@dataclass(frozen=True)
class Variant:
    """One drafter; `taps` are layer inputs."""

    taps: tuple[int, ...] = (2, 4, 5)
    head_dim: int = 16
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    full: bool = False
    mla: bool = False
    target_hidden: int = HIDDEN

    @property
    def draft(self) -> int:
        return VOCAB if self.full else DRAFT


def draft_ids(variant: Variant) -> torch.Tensor:
    return torch.arange(VOCAB) if variant.full else torch.arange(DRAFT) * 4 + 1


def tensors_of(variant: Variant, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Weights by SGLang's names (midlayer.*), maps not among them."""
    heads, kv, features = 4, 2, len(variant.taps) * variant.target_hidden
    shapes = {
        "fc.weight": (HIDDEN, features),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.mlp.gate_proj.weight": (96, HIDDEN),
        "midlayer.mlp.up_proj.weight": (96, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 96),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (variant.draft, HIDDEN),
    }
    if variant.mla:
        shapes |= {
            "midlayer.self_attn.q_a_proj.weight": (24, 2 * HIDDEN),
            "midlayer.self_attn.q_a_layernorm.weight": (24,),
            "midlayer.self_attn.q_b_proj.weight": (heads * (16 + 8), 24),
            "midlayer.self_attn.kv_a_proj_with_mqa.weight": (32 + 8, 2 * HIDDEN),
            "midlayer.self_attn.kv_a_layernorm.weight": (32,),
            "midlayer.self_attn.kv_b_proj.weight": (heads * (16 + 12), 32),
            "midlayer.self_attn.o_proj.weight": (HIDDEN, heads * 12),
        }
    else:
        shapes |= {
            "midlayer.self_attn.q_proj.weight": (heads * variant.head_dim, 2 * HIDDEN),
            "midlayer.self_attn.k_proj.weight": (kv * variant.head_dim, 2 * HIDDEN),
            "midlayer.self_attn.v_proj.weight": (kv * variant.head_dim, 2 * HIDDEN),
            "midlayer.self_attn.o_proj.weight": (HIDDEN, heads * variant.head_dim),
        }
    if variant.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (variant.target_hidden,) for index in range(len(variant.taps))}
    if variant.norm_before_fc:
        shapes["input_norm.weight"] = (features,)
    if variant.target_hidden != HIDDEN:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def maps_of(variant: Variant) -> dict[str, torch.Tensor]:
    ids = draft_ids(variant)
    return {
        "d2t": ids - torch.arange(ids.numel()),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
    }


def layer_config(variant: Variant) -> dict[str, object]:
    config: dict[str, object] = {
        "hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1,
        "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 4096,
        "rope_theta": THETA, "attention_bias": False,
    }  # fmt: skip
    if variant.mla:
        latent = {
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        }
        return config | {"num_key_value_heads": 4} | latent
    return config | {"num_key_value_heads": 2, "head_dim": variant.head_dim}


def save(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def layers_0(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}


def write_sglang(folder: Path, variant: Variant) -> Path:
    """SpecForge's export: flat config, eagle_config with SGLang's ids, no embedding."""
    config = layer_config(variant) | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if variant.mla else "LlamaForCausalLMEagle3"],
        "model_type": "deepseek_v3" if variant.mla else "llama", "draft_vocab_size": variant.draft,
        "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [t - 1 for t in variant.taps]},
    }  # fmt: skip
    config |= {flag: True for flag in ("fc_norm", "norm_output", "norm_before_fc") if getattr(variant, flag)}
    config |= {} if variant.target_hidden == HIDDEN else {"target_hidden_size": variant.target_hidden}
    maps = {} if variant.full else maps_of(variant)
    return save(folder, config, tensors_of(variant) | maps)


def write_legacy_specforge(folder: Path, variant: Variant) -> Path:
    """Three norms by name, and the flag that goes with them."""
    assert variant.fc_norm and len(variant.taps) == 3
    tensors = tensors_of(variant)
    for index, word in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{word}.weight"] = tensors.pop(f"fc_norm.{index}.weight")
    folder = write_sglang(folder, variant)
    config = json.loads((folder / "config.json").read_text())
    del config["fc_norm"]
    (folder / "config.json").write_text(json.dumps(config | {"use_aux_norm": True}))
    save_file(tensors | ({} if variant.full else maps_of(variant)), folder / "model.safetensors")
    return folder


def write_speculators(folder: Path, variant: Variant) -> Path:
    """The current writer: nested layer config, layers.0.*, layer ids as inputs, a frozen embedding."""
    config = {
        "architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": variant.draft, "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(variant.taps), "embed_requires_grad": False,
        "fc_norm": variant.fc_norm, "norm_before_fc": variant.norm_before_fc, "norm_output": variant.norm_output,
        "norm_before_residual": variant.norm_before_residual, "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "target_hidden_size": None if variant.target_hidden == HIDDEN else variant.target_hidden, "tie_word_embeddings": False,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 3}], "verifier": {"name_or_path": "t", "architectures": []}},
        "transformer_layer_config": layer_config(variant) | {"model_type": "llama", "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA}},
    }  # fmt: skip
    maps = {} if variant.full else maps_of(variant)
    return save(folder, config, layers_0(tensors_of(variant)) | maps)


def write_modelopt(folder: Path, variant: Variant) -> Path:
    """Hugging Face export after 2025-12: layers.0.*, ids as layer outputs, d2t in frequency order, no t2d, nulls."""
    tensors = layers_0(tensors_of(variant))
    ids = draft_ids(variant)
    if not variant.full:
        order = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(4))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
        tensors["d2t"] = ids[order] - torch.arange(ids.numel())
    return save(folder, _modelopt_config(variant), tensors)


def write_modelopt_midlayer(folder: Path, variant: Variant) -> Path:
    """The era before, and the Megatron export, which never writes d2t."""
    assert variant.full
    return save(folder, _modelopt_config(variant), tensors_of(variant))


def _modelopt_config(variant: Variant) -> dict[str, object]:
    return layer_config(variant) | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if variant.mla else "LlamaForCausalLMEagle3"],
        "model_type": "kimi_k2" if variant.mla else "llama", "draft_vocab_size": variant.draft, "mlp_bias": None,
        "pretraining_tp": None, "attention_dropout": None, "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in variant.taps],
            "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
            "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": None,
            "parallel_draft_heads_num_layers": None},
    }  # fmt: skip


def write_safeailab(folder: Path, variant: Variant) -> Path:
    """The target's class name, midlayer.*, no layer ids, a context of 2048 from the template."""
    config = layer_config(variant) | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": variant.draft, "bias": False,
        "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return save(folder, config, tensors_of(variant) | maps_of(variant))


def write_angelslim(folder: Path, variant: Variant) -> Path:
    config = layer_config(variant) | {
        "architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": variant.draft,
        "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    return save(folder, config, tensors_of(variant) | maps_of(variant))


def write_torchspec(folder: Path, variant: Variant) -> Path:
    """Converted files: the class of SGLang, no eagle_config, the embedding of the target among the tensors."""
    config = layer_config(variant) | {
        "architectures": ["DeepSeekForCausalLMEagle3" if variant.mla else "LlamaForCausalLMEagle3"],
        "model_type": "deepseek_v3" if variant.mla else "llama", "draft_vocab_size": variant.draft,
        "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    return save(folder, config, tensors_of(variant) | ({} if variant.full else maps_of(variant)))


WRITERS = {
    "sglang": write_sglang,
    "legacy-specforge": write_legacy_specforge,
    "speculators": write_speculators,
    "modelopt": write_modelopt,
    "modelopt-midlayer": write_modelopt_midlayer,
    "safeailab": write_safeailab,
    "angelslim": write_angelslim,
    "torchspec": write_torchspec,
}


def can_say(dialect: str, variant: Variant) -> bool:
    """Whether the form has words for this drafter."""
    plain = (
        variant.taps == (2, 4, 5)
        and variant.target_hidden == HIDDEN
        and not (variant.norm_output or variant.norm_before_fc or variant.fc_norm)
    )
    if dialect == "legacy-specforge":
        return variant.fc_norm and len(variant.taps) == 3 and not variant.mla
    if dialect in ("safeailab", "angelslim"):
        return plain and not variant.mla and not variant.norm_before_residual
    if dialect == "torchspec":
        return plain and not variant.norm_before_residual
    if dialect == "modelopt-midlayer":
        return plain and variant.full and not variant.norm_before_residual
    if dialect == "modelopt":
        return plain and not variant.norm_before_residual
    if dialect == "speculators":
        return not variant.mla
    return not variant.norm_before_residual
