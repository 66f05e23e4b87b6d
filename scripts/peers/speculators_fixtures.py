"""Tiny drafters that speculators' own classes hold and speculators' own code saves. Run by make_fixtures.sh.

Trained forms come from `Eagle3DraftModel.from_training_args` and the trainer's checkpointer, converted ones from
`Eagle3Converter` on a checkpoint of SafeAILab's form. Run inside the fixtures' folder, so that `target` is the path
that the configs name.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file, save_file
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.checkpointer import SingleGPUCheckpointer
from speculators.train.cli import create_transformer_layer_config

TRAINED = {
    "plain": {},
    "fc-norm-norm-output": {"fc_norm": True, "norm_output": True},
    "norm-before-fc-window-2048": {"norm_before_fc": True, "full_attention": False},
    "norm-before-residual": {"norm_before_residual": True},
}
"""Name -> what differs from plain. Without full attention the layer has speculators' default, a window of 2048."""


def main(out: Path) -> None:
    """Write `speculators-*` folders into `out`."""
    for seed, (name, changes) in enumerate(TRAINED.items()):
        chosen = {"full_attention": True} | changes
        layer = create_transformer_layer_config(
            "target", num_layers=1, draft_arch="llama", hidden_act=None, sliding_window=2048,
            full_attention_indices=[0] if chosen.pop("full_attention") else [],
        )  # fmt: skip
        layer.head_dim = 16
        arguments = {
            "target_layer_ids": [2, 4, 5], "verifier_name_or_path": "target", "draft_vocab_size": tiny.DRAFT,
            "norm_before_residual": False, "ttt_steps": 3, "draft_attn_impl": "eager",
        } | chosen  # fmt: skip
        net = Eagle3DraftModel.from_training_args(verifier_config=layer, **tiny.maps(), **arguments)
        tiny.fill(net, seed, keep=("embed_tokens.", "verifier_", "lm_head."))
        norms = [parameter for parameter in net.parameters() if parameter.dim() == 1 and parameter.requires_grad]
        optimizer = torch.optim.AdamW(norms, lr=1e-3)
        for parameter in norms:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        SingleGPUCheckpointer(out).save_checkpoint(net, optimizer, f"speculators-trained-{name}")
    convert(out)
    for copy in out.glob("speculators-*/config.py"):
        copy.unlink()  # transformers' custom-code copy of speculators' own source, which nothing reads


def convert(out: Path) -> None:
    """What Eagle3Converter makes of a checkpoint of SafeAILab's form."""
    source = out / "work-source"
    source.mkdir()
    trained = load_file(out / "speculators-trained-plain" / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    weights = {
        name.replace("layers.0.", "midlayer."): torch.randn(tensor.shape, generator=generator).bfloat16()
        for name, tensor in sorted(trained.items())
        if name not in ("embed_tokens.weight", "d2t", "t2d")
    }
    save_file(weights | tiny.maps(), source / "model.safetensors")
    config = tiny.DRAFTER | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": tiny.DRAFT,
        "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    Eagle3Converter().convert(source, out / "speculators-converted-plain", "target", validate=False)
    shutil.rmtree(source)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
