"""Tiny targets and drafters whose config.json is written out by hand, as engines read it; tensors are random numbers.

Nothing of `draftsmith.convert` takes part: what the tests say of an engine does not lean on what our writer writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith.configs.drafter import MLA, DrafterSpec, MlaSpec, RopeSpec

Tensors = dict[str, torch.Tensor]
HIDDEN, VOCAB, DRAFT, LAYERS, CONTEXT = 64, 512, 128, 8, 2048
ABSENT: Any = object()
"""As a value of a config field: leave the field out."""

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 0.8, "mscale_all_dim": 0.6,
}  # fmt: skip
LATENT = MlaSpec(q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)


def make_target(folder: Path) -> Path:
    """A Llama target: its config, its embedding and its head."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 96,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}  # fmt: skip
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    return folder


def make_latent_target(folder: Path) -> Path:
    """A DeepSeek target with latent attention, as Kimi-K2's text model is one: its config, its embedding, its head."""
    make_target(folder)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": HIDDEN,
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_spec(**changes: Any) -> DrafterSpec:
    values: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 24, "vocab_size": VOCAB, "draft_vocab_size": DRAFT, "target_hidden_size": HIDDEN,
        "target_num_layers": LAYERS, "taps": (2, 4, 5), "rms_norm_eps": 1e-5, "rope": RopeSpec(theta=50000.0),
        "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    if "mla" in changes:
        values |= {
            "architecture": MLA, "num_key_value_heads": 4, "head_dim": changes["mla"].qk_rope_head_dim,
        }  # fmt: skip
    return DrafterSpec(**(values | changes))


def random_tensors(spec: DrafterSpec, seed: int = 0) -> Tensors:
    """Every tensor of the checkpoint, scaled so that each part is audible; maps that keep every fourth token plus one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in spec.trainable_shapes().items():
        drawn = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * drawn if len(shape) == 1 else drawn * 1.5 / shape[-1] ** 0.5
    if spec.hidden_size != spec.target_hidden_size:
        tensors["embed_tokens.weight"] = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)
    if spec.draft_vocab_size < spec.vocab_size:
        ids = torch.arange(spec.draft_vocab_size) * (spec.vocab_size // spec.draft_vocab_size) + 1
        tensors["d2t"] = ids - torch.arange(spec.draft_vocab_size)
        tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def config_of(spec: DrafterSpec) -> dict[str, Any]:
    """The portable config.json: one file that both engines load as the drafter that `spec` describes."""
    config: dict[str, Any] = {
        "architectures": [spec.architecture],
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.target_hidden_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rope.theta,
        "rope_parameters": {"rope_type": "default", **(spec.rope.scaling or {}), "rope_theta": spec.rope.theta},
        "torch_dtype": "float32",
        "num_aux_hidden_states": len(spec.taps),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in spec.taps],  # SGLang counts layer outputs
        },
        "eagle_aux_hidden_state_layer_ids": list(spec.taps),  # vLLM counts layer inputs
    }
    if spec.mla is None:
        config |= {"model_type": "llama", "head_dim": spec.head_dim, "attention_bias": False}
    else:
        config |= {"model_type": "kimi_k2", **spec.mla.model_dump()}
    for flag in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"):
        if getattr(spec, flag):
            config[flag] = True
    if spec.fc_bias:
        config["bias"] = True
    return config


def write(folder: Path, spec: DrafterSpec, tensors: Tensors | None = None, **changes: Any) -> Path:
    """A drafter folder; `changes` are fields of config.json that replace the portable ones or, if ABSENT, go missing."""
    folder.mkdir(parents=True)
    config = {key: value for key, value in (config_of(spec) | changes).items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(random_tensors(spec) if tensors is None else tensors, folder / "model.safetensors")
    return folder
