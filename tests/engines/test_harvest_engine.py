"""Harvest from a target that vLLM holds, beside the harvest of transformers: the same rows of the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig, load_config
from draftsmith.configs.target import read_target
from draftsmith.data.conversations import Conversation, write_conversations
from draftsmith.data.harvest import harvest
from draftsmith.data.store import HarvestReader, read_manifest
from draftsmith.data.target_model import target_mark
from tests.tiny_target import make_tiny_target

pytestmark = pytest.mark.engine
TAPS = (2, 4, 5)
LENGTHS = (700, 3, 41, 41, 300, 120)
"""The first is computed in pieces by both: vLLM's batches hold 256 tokens."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


def configure(folder: Path, target: Path, name: str, **section: Any) -> RunConfig:
    values = {
        "name": name, "runs": str(folder / "runs"), "target": {"path": str(target), "taps": TAPS},
        "prompts": {"train": str(folder / "none.jsonl")}, "harvest": {"batch_tokens": 256, "shard_tokens": 600, **section},
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(values))
    config = load_config(folder / f"{name}.yaml")
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 400, (20,), generator=generator).tolist()  # what a prefix cache would answer from
    conversations = []
    for number, length in enumerate(LENGTHS):
        ids = (shared + torch.randint(3, 400, (length,), generator=generator).tolist())[:length]
        conversations.append(
            Conversation(
                id=f"c{number}",
                category="test",
                messages=({"role": "assistant", "content": "x"},),
                input_ids=ids,
                spans=((1, length),),
                finish=("stop",),
                mean_logprob=-1.0,
                greedy=False,
                target=target_mark(read_target(target)),
            )
        )
    write_conversations(config.conversations("train"), conversations)
    return config


@pytest.fixture(scope="module")
def stores(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[HarvestReader, HarvestReader]:
    """The store of transformers, and that of one start of vLLM."""
    folder = tmp_path_factory.mktemp("stores")
    return tuple(HarvestReader(harvest(configure(folder, target, name, backend=name), "train")) for name in ("transformers", "vllm"))  # type: ignore[return-value]  # fmt: skip


def test_every_row_is_the_one_that_transformers_computes(stores: tuple[HarvestReader, HarvestReader]) -> None:
    own, served = stores
    assert served.ids == own.ids and served.manifest.taps == TAPS
    for ours, theirs in zip(own, served, strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.generated, theirs.generated)
        assert ours.taps.shape == theirs.taps.shape == (len(ours.input_ids), 3, 64)
        # float32 on both sides, stored as bfloat16: rounding may fall to the other side, nothing else differs
        for one, other in ((ours.taps, theirs.taps), (ours.final, theirs.final)):
            torch.testing.assert_close(other.float(), one.float(), rtol=2**-7, atol=1e-4)
            assert float((one == other).float().mean()) > 0.99
        assert float((ours.argmax == theirs.argmax).float().mean()) > 0.99


def test_the_tap_is_told_apart_from_its_neighbours(stores: tuple[HarvestReader, HarvestReader], target: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    item = stores[1][2]
    with torch.no_grad():
        states = model(item.input_ids[None].long(), output_hidden_states=True).hidden_states
    for place, tap in enumerate(TAPS):
        errors = [float((item.taps[:, place].float() - states[k][0]).norm()) for k in (tap - 1, tap, tap + 1)]
        assert 20 * errors[1] < min(errors[0], errors[2])


def test_the_store_says_who_computed_it_and_is_not_continued_by_another(
    stores: tuple[HarvestReader, HarvestReader], target: Path, tmp_path: Path
) -> None:
    own, served = stores
    assert (own.manifest.computed_by, served.manifest.computed_by) == ("transformers", "vllm")
    assert read_manifest(served.path).complete
    config = load_config(served.path.parents[3] / "vllm.yaml", ["harvest.backend=transformers"])
    with pytest.raises(DraftsmithError, match="vllm"):
        harvest(config, "train")
