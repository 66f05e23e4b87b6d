"""A tiny target, a fake training checkpoint and a converted drafter, made of random numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.target import default_drafter, read_target
from draftsmith.convert.write import convert

HIDDEN, VOCAB, DRAFT = 64, 512, 128
TAPS = (2, 4, 5)

TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 128,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 5e6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip

SHAPES = {
    "fc.weight": (64, 192),
    "midlayer.input_layernorm.weight": (64,),
    "midlayer.hidden_norm.weight": (64,),
    "midlayer.post_attention_layernorm.weight": (64,),
    "midlayer.self_attn.q_proj.weight": (128, 128),
    "midlayer.self_attn.k_proj.weight": (64, 128),
    "midlayer.self_attn.v_proj.weight": (64, 128),
    "midlayer.self_attn.o_proj.weight": (64, 128),
    "midlayer.mlp.gate_proj.weight": (128, 64),
    "midlayer.mlp.up_proj.weight": (128, 64),
    "midlayer.mlp.down_proj.weight": (64, 128),
    "norm.weight": (64,),
    "lm_head.weight": (128, 64),
}
"""Written out by hand from the network's definition."""


def make_target(folder: Path, **changes) -> Path:
    """A target folder with config and the three tensors that a drafter needs."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TARGET | changes))
    generator, hidden = torch.Generator().manual_seed(1), changes.get("hidden_size", HIDDEN)
    save_file(
        {
            "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=generator).bfloat16(),
            "model.norm.weight": torch.rand(hidden, generator=generator).bfloat16() + 0.5,
            "lm_head.weight": torch.randn(VOCAB, hidden, generator=generator).bfloat16(),
        },
        folder / "model.safetensors",
    )
    (folder / "tokenizer.json").write_text("{}")
    return folder


def random_tensors(shapes=None, seed: int = 0) -> dict[str, torch.Tensor]:
    """float32 weights by canonical name, and maps that keep every fourth token plus one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in (shapes or SHAPES).items()}
    ids = torch.arange(DRAFT) * 4 + 1
    tensors["d2t"] = ids - torch.arange(DRAFT)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def make_spec(target: Path, **changes) -> DrafterSpec:
    values = {"draft_vocab_size": DRAFT, "taps": TAPS, "trained_length": 2048} | changes
    return default_drafter(read_target(target), **values)


def make_checkpoint(folder: Path, target: Path, tensors=None, **changes) -> Path:
    """A training checkpoint as the trainer writes it; `changes` go to the spec."""
    drafter = folder / "drafter"
    drafter.mkdir(parents=True)
    save_file(random_tensors() if tensors is None else tensors, drafter / "model.safetensors")
    provenance = {
        "tool_version": "0.1.0", "step": 123, "target": read_target(target).fingerprint(), "unroll_steps": 7,
        "mask": "aligned", "target_path": str(target), "vocab_sha256": "0" * 64, "store": {"manifest": "1" * 64}, "accept_length": {"3": 2.5},
    }  # fmt: skip
    described = {"schema": 1, "spec": make_spec(target, **changes).model_dump(mode="json"), "provenance": provenance}
    (drafter / "drafter.json").write_text(json.dumps(described))
    (folder / "trainer.json").write_text("{}")
    return folder


@pytest.fixture
def target(tmp_path) -> Path:
    return make_target(tmp_path / "target")


@pytest.fixture
def checkpoint(tmp_path, target) -> Path:
    return make_checkpoint(tmp_path / "train" / "checkpoint-00000123", target)


@pytest.fixture
def drafter(tmp_path, target, checkpoint) -> Path:
    """A converted drafter."""
    return convert(checkpoint, target, tmp_path / "drafter")


def edit_config(folder: Path, *, drop=(), **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in (config | changes).items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, edit) -> None:
    """Load the folder's tensors, let `edit` change the dict, save them."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def listing(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its bytes."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
