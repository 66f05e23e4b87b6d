"""A real vLLM server answers, and the conversations are those of transformers, token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.configs.schema import RunConfig, load_config
from draftsmith.data.conversations import read_conversations
from draftsmith.data.synthesize import synthesize
from tests.engines.vllm_server import vllm_server

pytestmark = pytest.mark.engine
PROMPTS = [
    {"id": "a", "prompt": "What is the capital of France?"},
    {"id": "b", "turns": ["Say hello.", "Now in German.", "And in one word?"]},
    {"id": "c", "conversations": [{"from": "human", "value": "Name a colour."}, {"from": "gpt", "value": "Red"}]},
    {"id": "d", "prompt": "What is 2 + 2?", "system": "You are brief."},
]


@pytest.fixture(scope="module")
def server(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of one vLLM server for all tests of this file."""
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    with vllm_server(target_folder, log, "--served-model-name", "smollm2") as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def configure(server: str, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunConfig]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))

    def make(name: str, **section: Any) -> RunConfig:
        values = {
            "name": name, "runs": str(folder), "target": {"path": str(target_folder), "dtype": "float32"},
            "prompts": {"train": str(folder / "p.jsonl")},
            "synthesize": {"backend": "openai", "servers": [server], "max_new_tokens": 20, **section},
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(values))
        return load_config(folder / f"{name}.yaml")

    return make


@pytest.fixture(scope="module")
def own(configure: Callable[..., RunConfig]) -> list[Any]:
    """What this process's transformers answers."""
    return list(read_conversations(synthesize(configure("own", backend="transformers"), "train")))


@pytest.mark.parametrize(
    "section",
    [{}, {"endpoint": "chat"}, {"token_ids": False}],
    ids=["ids in, ids out", "messages in, ids out", "ids in, text out"],
)
def test_greedy_conversations_are_those_of_transformers(
    configure: Callable[..., RunConfig], own: list[Any], section: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id.replace(" ", "-").replace(",", "")
    served = list(read_conversations(synthesize(configure(name, **section), "train")))
    assert [one.id for one in served] == ["a", "b", "c", "d"]
    for ours, theirs in zip(own, served, strict=True):
        assert theirs.input_ids == ours.input_ids and theirs.spans == ours.spans and theirs.finish == ours.finish
        assert theirs.messages == ours.messages
        assert theirs.mean_logprob == pytest.approx(ours.mean_logprob, abs=1e-4)
    assert {reason for one in served for reason in one.finish} == {"stop", "length"}


def test_a_sampled_run_asked_again_gives_the_same_conversations(configure: Callable[..., RunConfig]) -> None:
    first = synthesize(configure("once", temperature=0.8, concurrency=1), "train").read_bytes()
    assert synthesize(configure("again", temperature=0.8, concurrency=1), "train").read_bytes() == first
    assert synthesize(configure("other", temperature=0.8, concurrency=1, seed=5), "train").read_bytes() != first
