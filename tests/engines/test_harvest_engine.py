"""Harvest from a target that an engine holds, beside the harvest of transformers: the same rows of the same tokens.

One engine start each: vLLM with a Llama whose longest text it computes in pieces, and with Kimi-K2.5 in miniature, which it
runs through its own class with latent attention and experts; SGLang with that Llama, every text whole.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
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
from draftsmith.data.target_model import load_target, target_mark
from tests.kimi_mini import make_kimi_mini
from tests.tiny_target import make_tiny_target

pytestmark = pytest.mark.engine
LENGTHS = (700, 3, 41, 41, 300, 120, 15, 15)
"""The first 20 tokens are the same everywhere, so that the last two texts are equal."""
CASES = {"llama in vllm": make_tiny_target, "kimi in vllm": make_kimi_mini, "llama in sglang": make_tiny_target}
TAPS = {"llama": (2, 4, 5), "kimi": (2, 30, 58)}
HARVEST: dict[str, dict[str, Any]] = {
    "llama": {"batch_tokens": 256},
    "kimi": {"batch_tokens": 1024, "engine_options": {"limit_mm_per_prompt": {"image": 0, "vision_chunk": 0}}},
}
"""vLLM on a CPU computes texts whole where attention is latent."""


def configure(folder: Path, target: Path, kind: str, backend: str) -> RunConfig:
    values = {
        "name": backend, "runs": str(folder / "runs"), "target": {"path": str(target)},
        "prompts": {"train": str(folder / "none.jsonl")},
        "harvest": {"shard_tokens": 600, "backend": backend, **HARVEST[kind]},
    }  # fmt: skip
    (folder / f"{backend}.yaml").write_text(json.dumps(values))
    config = load_config(folder / f"{backend}.yaml")
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, 390, (20,), generator=generator).tolist()  # what a prefix cache would answer from
    mark, conversations = target_mark(read_target(target)), []
    for number, length in enumerate(LENGTHS):
        ids = (shared + torch.randint(3, 390, (length,), generator=generator).tolist())[:length]
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
                target=mark,
            )
        )
    write_conversations(config.conversations("train"), conversations)
    return config


@pytest.fixture(scope="module")
def harvested(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of each case the store of transformers, and that of one start of the engine; the engines start side by side."""
    found: dict[str, dict[str, Any]] = {}
    for case, make in CASES.items():
        kind, _, engine = case.split()
        folder = tmp_path_factory.mktemp(f"{kind}-{engine}")
        target = make(folder / "target")
        config = configure(folder, target, kind, engine)
        own = HarvestReader(harvest(configure(folder, target, kind, "transformers"), "train"))
        found[case] = {"kind": kind, "engine": engine, "target": target, "config": config, "transformers": own}
    with ThreadPoolExecutor(len(found)) as pool:
        stores = list(pool.map(lambda one: harvest(one["config"], "train"), found.values()))
    for one, store in zip(found.values(), stores, strict=True):
        one["served"] = HarvestReader(store)
    return found


@pytest.fixture(params=list(CASES))
def stores(request: pytest.FixtureRequest, harvested: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return harvested[request.param]


def test_every_row_is_the_one_that_transformers_computes(stores: dict[str, Any]) -> None:
    own, served = stores["transformers"], stores["served"]
    assert served.ids == own.ids and served.manifest.taps == TAPS[stores["kind"]]
    rows = apart = equal = same = 0
    for ours, theirs in zip(own, served, strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.generated, theirs.generated)
        assert ours.taps.shape == theirs.taps.shape and len(ours.taps) == len(ours.input_ids)
        one, other = (torch.cat([item.taps, item.final[:, None]], dim=1) for item in (ours, theirs))
        # float32 on both sides, stored as bfloat16: rounding may fall to the other side, by 0.4 % of a value
        errors = (other.float() - one.float()).norm(dim=-1) / one.float().norm(dim=-1)
        rows, apart = rows + len(errors), apart + int((errors > 0.01).any(dim=1).sum())
        equal, same = equal + int((one == other).sum()), same + one.numel()
        assert float((ours.argmax == theirs.argmax).float().mean()) > 0.98
    print(f"{apart} of {rows} rows apart, {equal / same:.2%} of the values the same bits")
    assert equal / same > 0.98
    # where two experts are rated alike to the last bits, the other one may be chosen; nothing else is left to chance
    assert apart <= (0.005 * rows if stores["kind"] == "kimi" else 0), f"{apart} of {rows} rows"


def test_the_tap_is_told_apart_from_its_neighbours(stores: dict[str, Any]) -> None:
    config = stores["config"]
    target, item = load_target(config.target, "float32"), stores["served"][2]
    with torch.no_grad():
        states = target.model(input_ids=item.input_ids[None].long(), output_hidden_states=True).hidden_states
    for place, tap in enumerate(TAPS[stores["kind"]]):
        errors = [float((item.taps[:, place].float() - states[k][0]).norm()) for k in (tap - 1, tap, tap + 1)]
        assert 5 * errors[1] < min(errors[0], errors[2])


def test_the_store_says_who_computed_it_and_is_not_continued_by_another(stores: dict[str, Any]) -> None:
    own, served = stores["transformers"], stores["served"]
    assert (own.manifest.computed_by, served.manifest.computed_by) == ("transformers", stores["engine"])
    assert read_manifest(served.path).complete
    file = stores["target"].parent / f"{stores['engine']}.yaml"
    with pytest.raises(DraftsmithError, match="another harvest.backend|another computed_by"):  # noqa: RUF043
        harvest(load_config(file, ["harvest.backend=transformers"]), "train")
