"""What the peers' fixtures share: a target of 8 layers with the three tensors that trainers read, weights, and a map.

`python tiny.py FOLDER` writes the target. Every random number is seeded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, DRAFT, LAYERS = 64, 512, 128, 8

TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 96,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 5e6,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

DRAFTER = {
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 4096, "rope_theta": 5e6, "attention_bias": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
"""The decoder layer's fields as a flat config spells them."""


def write_target(folder: Path) -> None:
    """The folder of the target: config, embedding, final norm and head in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TARGET, indent=2) + "\n")
    generator = torch.Generator().manual_seed(1)
    save_file(
        {
            "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16(),
            "model.norm.weight": torch.rand(HIDDEN, generator=generator).bfloat16() + 0.5,
            "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16(),
        },
        folder / "model.safetensors",
    )


def maps() -> dict[str, torch.Tensor]:
    """Every fourth token plus one: d2t as offsets, t2d as a mask."""
    ids = torch.arange(DRAFT) * 4 + 1
    return {
        "d2t": ids - torch.arange(DRAFT),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
    }


def fill(net: torch.nn.Module, seed: int, keep: tuple[str, ...] = ("embed_tokens.", "verifier_")) -> None:
    """Random weights in place of an initialisation; `keep` are beginnings of names that stay."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(net.named_parameters()):
            if not name.startswith(keep):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


if __name__ == "__main__":
    write_target(Path(sys.argv[1]))
