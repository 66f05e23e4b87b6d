"""A foreign drafter of 131072 positions for Kimi-K2.5, whose nested context is 262144: found by verify, mended by convert."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftsmith.convert.verify import verify
from draftsmith.convert.write import convert
from tests.convert import foreign

FACTS = Path(__file__).parents[2] / "configs" / "presets" / "facts" / "kimi-k2.5.json"


def failing(folder, target, **how):
    return {check.name: check for check in verify(folder, target, **how) if check.status == "fail"}


def kimi_target(folder):
    """Kimi-K2.5's own config, nested context and RoPE; of the weights only what a drafter needs, thin in vocabulary."""
    config = json.loads(FACTS.read_text())
    config["text_config"]["vocab_size"] = 512
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {
            "language_model.model.embed_tokens.weight": torch.zeros(512, 7168, dtype=torch.bfloat16),
            "language_model.lm_head.weight": torch.ones(512, 7168, dtype=torch.bfloat16),
        },
        folder / "model.safetensors",
    )
    return folder


def kimi_drafter(folder):
    """A foreign drafter of Kimi's width, thin in every other dimension; nested ids as drafters for it are published with."""
    shapes = {
        "fc.weight": (7168, 3 * 7168), "norm.weight": (7168,), "lm_head.weight": (64, 7168),
        "midlayer.input_layernorm.weight": (7168,), "midlayer.hidden_norm.weight": (7168,),
        "midlayer.post_attention_layernorm.weight": (7168,), "midlayer.self_attn.q_proj.weight": (128, 2 * 7168),
        "midlayer.self_attn.k_proj.weight": (128, 2 * 7168), "midlayer.self_attn.v_proj.weight": (128, 2 * 7168),
        "midlayer.self_attn.o_proj.weight": (7168, 128), "midlayer.mlp.gate_proj.weight": (64, 7168),
        "midlayer.mlp.up_proj.weight": (64, 7168), "midlayer.mlp.down_proj.weight": (7168, 64),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(9)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    ids = torch.arange(64) * 8 + 3
    tensors |= {"d2t": ids - torch.arange(64), "t2d": torch.zeros(512, dtype=torch.bool).index_fill_(0, ids, True)}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 7168,
        "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
        "num_hidden_layers": 1, "vocab_size": 512, "draft_vocab_size": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rope_theta": 50000.0, "tie_word_embeddings": False,
        "attention_bias": False, "torch_dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
    }  # fmt: skip
    return foreign.save(folder, config, tensors), tensors


def test_a_drafter_of_131072_positions_for_kimi_fails_with_sglang_s_reason_and_is_mended_bit_by_bit(tmp_path):
    """The server warned once and stopped another time; only one number was wrong."""
    target = kimi_target(tmp_path / "kimi")
    source, tensors = kimi_drafter(tmp_path / "source")
    assert not (source / "draftsmith.json").exists()
    checks = failing(source, target)
    assert set(checks) == {"context.sglang", "context.vllm"}
    assert (
        "Target model's context_length (262144) is greater than the derived context_length (131072)"
        in checks["context.sglang"].message
    )
    assert checks["context.sglang"].mend.startswith(f"draftsmith convert {source} --target {target}")
    out = convert(source, target, tmp_path / "out")
    assert not failing(out, target, deep=True)
    found = load_file(out / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[key].dtype == value.dtype and torch.equal(found[key], value) for key, value in tensors.items())
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 262144
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    assert config["rope_scaling"] is None  # the drafter's own; the target's YaRN is not its
    # Of a DeepSeek-like target SGLang feeds [2, 30, 58] for ids [1, 29, 57] as for [2, 30, 58].
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 29, 57]
