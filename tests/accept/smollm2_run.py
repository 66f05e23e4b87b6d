"""A run with a real drafter of SmolLM2-135M and conversations that it was not trained on, without training anything.

smollm2/drafter.safetensors was trained by scripts/gpu_loop.sh on one H200 (3.9 million generated tokens, accept_length@3
2.71 on its own held-out prompts, 2.16 on these conversations), each row of a matrix rounded to 8 bits. smollm2/heldout.jsonl
are the demo's held-out conversations, whose prompts stand in no training set: float32 greedy answers of the target.
smollm2/long.jsonl are 24 held-out conversations of that loop with answers of 384 tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftsmith.accept.spot import Spot, harvest_spot
from draftsmith.configs.schema import RunConfig, load_config
from draftsmith.configs.target import read_target
from draftsmith.convert.write import convert
from draftsmith.data.store import HarvestedConversation, Provenance
from draftsmith.data.store_writer import StoreWriter
from draftsmith.data.target_model import target_mark

HERE = Path(__file__).parent / "smollm2"
TAPS = (2, 15, 27)


def make_run(folder: Path, target: Path, conversations: int = 28, text: str = "heldout") -> RunConfig:
    """A run in `folder` whose held-out conversations are the first so many of `text` (heldout or long), and whose drafter
    is converted in float32."""
    values = {
        "name": "smollm2", "runs": str(folder / "runs"), "target": {"path": str(target)},
        "synthesize": {"max_new_tokens": 96}, "evaluate": {"draft_steps": 3},
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(values))
    config = load_config(folder / "run.yaml")
    file = config.conversations("heldout")
    file.parent.mkdir(parents=True)
    mark = target_mark(read_target(target))
    lines = (HERE / f"{text}.jsonl").read_text().splitlines()[:conversations]
    file.write_text("".join(json.dumps(json.loads(line) | {"target": mark}) + "\n" for line in lines))
    write_checkpoint(folder / "checkpoint")
    convert(folder / "checkpoint", target, config.drafter_folder, dtype="float32")
    return config


def write_checkpoint(folder: Path) -> Path:
    """The drafter as training writes it."""
    stored = load_file(HERE / "drafter.safetensors")
    ids = stored.pop("target_ids").long()
    tensors = {}
    for name, values in stored.items():
        if not name.endswith(".scale"):
            scale = stored.get(f"{name}.scale")
            tensors[name] = values.float() if scale is None else values.float() * scale.float()[:, None]
    spec = json.loads((HERE / "spec.json").read_text())
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(spec["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "drafter").mkdir(parents=True)
    save_file(tensors, folder / "drafter" / "model.safetensors")
    (folder / "drafter" / "drafter.json").write_text(json.dumps({"schema": 1, "spec": spec, "provenance": {}}))
    return folder


def harvested(config: RunConfig) -> list[Spot]:
    """The target's states of every held-out conversation, at every layer that a probe of the drafter or of its
    neighbours may ask for."""
    layers = [tap + shift for tap in TAPS for shift in (-2, -1, 0, 1, 2) if 0 <= tap + shift < 30]
    return harvest_spot(config, sorted(layers), 1000, 1024)


def write_store(config: RunConfig, spots: list[Spot]) -> None:
    """The held-out store of a run, from states harvested on the spot."""
    target = read_target(config.target.path)
    provenance = Provenance(
        target=target.fingerprint(), target_mark=target_mark(target), taps=TAPS, hidden_size=target.hidden_size,
        vocab_size=target.vocab_size, computed_in="float32", source="0" * 64, planned=len(spots), max_length=1024,
        shard_tokens=100_000,
    )  # fmt: skip
    with StoreWriter(config.store("heldout"), provenance) as writer:
        for spot in spots:
            own = slice(0, len(spot.ids) - spot.added)
            writer.append(
                HarvestedConversation(
                    id=spot.id,
                    input_ids=spot.ids[own],
                    generated=spot.generated[own],
                    taps=torch.stack([spot.layers[tap][own] for tap in TAPS], dim=1).bfloat16(),
                    final=spot.final[own].bfloat16(),
                    argmax=spot.argmax[own],
                    greedy=True,
                    mean_logprob=None,
                )
            )
