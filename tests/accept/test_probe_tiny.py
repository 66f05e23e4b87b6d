"""A teacher without its final norm, found in the store and in the drafter that learnt from it, on a tiny target."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from draftsmith.accept.probe import probe
from draftsmith.accept.spot import harvest_spot
from draftsmith.configs.schema import load_config
from draftsmith.data.harvest import harvest
from draftsmith.data.store import HarvestReader
from draftsmith.data.store_writer import StoreWriter
from draftsmith.data.synthesize import synthesize
from draftsmith.data.vocab import build_vocab
from draftsmith.train.trainer import train
from tests.tiny_target import make_tiny_target

SUBJECTS = ["the quick brown fox", "a river", "numbers", "gardens", "music", "physics", "colours", "a lazy dog"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run whose held-out conversations are the trained ones, since a random target's texts have nothing in common."""
    folder = tmp_path_factory.mktemp("taught")
    rows = [
        {"id": f"{n}", "category": "chat", "turns": [f"tell me about {what}", f"and {what}?"]}
        for n, what in enumerate(SUBJECTS)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "none.jsonl").write_text('{"id": "other", "category": "chat", "turns": ["what else"]}\n')
    values = {
        "name": "run", "runs": str(folder / "runs"), "target": {"path": str(make_tiny_target(folder / "target"))},
        "prompts": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "none.jsonl")},
        "synthesize": {"batch_size": 8, "max_new_tokens": 40}, "harvest": {"batch_tokens": 512}, "vocab": {"size": 400},
        "train": {
            "unroll_steps": 2, "epochs": 20, "batch_tokens": 256, "max_length": 512, "learning_rate": 3e-3,
            "save_every": 10000, "evaluate_every": 10000, "head_init": "random", "guard_threshold": 0.0,
        },
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(values))
    config = load_config(folder / "run.yaml")
    synthesize(config, "train")
    build_vocab(config)
    harvest(config, "train")
    shutil.copy(config.conversations("train"), config.conversations("heldout"))
    shutil.copytree(config.store("train"), config.store("heldout"))
    return config


def names(found):
    return [finding.name for finding in found.findings]


def test_a_teacher_without_its_final_norm_is_found_in_store_and_drafter(config, tmp_path):
    mine = config.model_copy(update={"runs": tmp_path})
    (tmp_path / "run").mkdir()
    for name in ("conversations", "vocab.safetensors"):
        (tmp_path / "run" / name).symlink_to(config.folder / name)
    reader = HarvestReader(config.store("train"))
    fields = reader.manifest.model_dump(exclude={"schema_version", "tool_version", "complete", "shards"})
    spots = {spot.id: spot for spot in harvest_spot(config, [2], 100, 1024)}
    with StoreWriter(mine.store("train"), type(reader.manifest).__mro__[1](**fields)) as writer:
        for one in reader:
            raw = spots[one.id].unnormed[: len(one.input_ids)].bfloat16()
            writer.append(dataclasses.replace(one, final=raw))
    shutil.copytree(mine.store("train"), mine.store("heldout"))
    found = probe(mine, train(mine), conversations=8, steps=2)
    assert "stored final states is another state" in names(found) or "stored final states are another state" in names(
        found
    )


def _final_norm(config):
    from safetensors.torch import load_file

    return load_file(config.target.path / "model.safetensors")["model.norm.weight"].float()
