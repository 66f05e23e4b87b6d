"""Tiny drafters that SpecForge's own classes hold and SpecForge's own code saves. Run by make_fixtures.sh.

Each starts as a training checkpoint, written by CheckpointManager with the payload of TrainerController;
`specforge.export` then writes it for SGLang and for Hugging Face.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import tiny
import torch
from specforge.export import export_to_hf, export_to_sglang
from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
from specforge.optimizer import BF16Optimizer
from specforge.training.checkpoint import CheckpointManager

OUTPUT_IDS = [1, 3, 4]
"""SpecForge counts outputs of layers: these are the inputs of layers 2, 4 and 5."""

DRAFTERS = {
    "plain": {},
    "head-dim-32": {"head_dim": 32},
    "fc-norm-context-2048": {"fc_norm": True, "max_position_embeddings": 2048, "eagle_config": None},
}
"""Name -> fields that differ from tiny.DRAFTER. The last has what recipes' templates have: no layer ids, 2048 positions."""

FORMS = {"plain": ("sglang", "training"), "head-dim-32": ("hf",), "fc-norm-context-2048": ("sglang",)}
"""Name -> the forms that are kept."""


def main(out: Path, target: Path) -> None:
    """Write `specforge-*` folders into `out`."""
    for seed, (name, changes) in enumerate(DRAFTERS.items()):
        work = out / f"work-{name}"
        work.mkdir(parents=True)
        fields = tiny.DRAFTER | {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": tiny.DRAFT,
            "torch_dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": OUTPUT_IDS, "use_aux_hidden_state": True},
        }  # fmt: skip
        fields = {key: value for key, value in (fields | changes).items() if value is not None}
        config = work / "draft-config.json"
        config.write_text(json.dumps(fields, indent=2) + "\n")
        net = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(config)), torch_dtype=torch.bfloat16)
        tiny.fill(net, seed)
        torch.save(tiny.maps(), work / "vocab-mapping.pt")
        net.load_vocab_mapping(str(work / "vocab-mapping.pt"))
        net.load_embedding(str(target))
        net.freeze_embedding()
        run = work / "run"
        checkpoint = save_training_state(net, run, name)
        if "sglang" in FORMS[name]:
            export_to_sglang(checkpoint, str(config), str(out / f"specforge-sglang-{name}"))
        if "hf" in FORMS[name]:
            export_to_hf(checkpoint, str(config), str(out / f"specforge-hf-{name}"), embedding_source=str(target))
        if "training" in FORMS[name]:
            shutil.copytree(checkpoint, out / f"specforge-training-{name}")
            # The draft config is a file of the run, not of the checkpoint.
            shutil.copy(config, out / f"specforge-training-{name}" / "draft-config.json")
        shutil.rmtree(work)


def save_training_state(net: torch.nn.Module, run: Path, name: str) -> str:
    """A checkpoint after one optimizer step on the norms, with the payload that TrainerController gives its manager."""
    norms = torch.nn.ParameterList([p for key, p in net.named_parameters() if p.dim() == 1])
    optimizer = BF16Optimizer(norms, lr=1e-6, total_steps=10, warmup_ratio=0.0)
    for parameter in norms:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {
        "draft_state_dict": {key: value for key, value in net.state_dict().items() if "embed" not in key},
        "global_step": 1, "epoch": 0, "epoch_batch": 1, "epoch_samples": 1, "strategy": "eagle3", "run_id": name,
        "world_size": 1, "replicated_optimizer_state": optimizer.state_dict(),
    }  # fmt: skip
    rng = {"torch": torch.Generator().manual_seed(0).get_state(), "device_type": "cpu", "cuda": None, "npu": None}
    return CheckpointManager(str(run), name).save(state, 1, rank_state={"optimizer": None, "rng": rng})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
