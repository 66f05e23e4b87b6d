"""A tiny target, a configuration that uses it, and conversations written by hand."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftsmith.configs.schema import RunConfig, load_config
from draftsmith.configs.target import read_target
from draftsmith.data.conversations import Conversation, write_conversations
from draftsmith.data.target_model import target_mark

_spec = importlib.util.spec_from_file_location("tiny_target", Path(__file__).parents[1] / "tiny_target.py")
assert _spec is not None and _spec.loader is not None
tiny_target = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_target)

QUESTIONS = [
    ["the quick brown fox"],
    ["ask 7 the fox", "and answer questions"],
    ["what is a river?"],
    ["numbers and words", "in short", "sentences about gardens"],
    ["hello"],
    ["cooking music history physics and gardens in short and long sentences about numbers words colours rivers"],
    ["ask 35 the fox"],
    ["ask 133 the fox"],
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny target (float32, untied)."""
    return tiny_target.make_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def make_config(tiny: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A configuration in the test's own folder; keyword arguments `section__key` override."""

    def make(**changes: Any) -> RunConfig:
        prompts = tmp_path / "prompts.jsonl"
        rows = [{"id": f"p{n}", "category": f"c{n % 3}", "turns": turns} for n, turns in enumerate(QUESTIONS)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {
            "name": "test",
            "runs": str(tmp_path / "runs"),
            "target": {"path": str(tiny)},
            "prompts": {"train": str(prompts)},
            "synthesize": {"batch_size": 3, "max_new_tokens": 24},
            "harvest": {"batch_tokens": 256, "shard_tokens": 200},
            "vocab": {"size": 64},
        }
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps(values))
        return load_config(file, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()])

    return make


@pytest.fixture
def put_conversations(tiny: Path) -> Callable[..., list[Conversation]]:
    """Write conversations with the given ids and spans as the run's training split."""

    def put(
        config: RunConfig, parts: Sequence[tuple[list[int], list[tuple[int, int]]]], target: Path = tiny
    ) -> list[Conversation]:
        mark = target_mark(read_target(target))
        conversations = [
            Conversation(
                id=f"c{number}",
                category="test",
                messages=tuple({"role": "assistant", "content": "x"} for _ in spans),
                input_ids=tuple(ids),
                spans=tuple(spans),
                finish=("stop",) * len(spans),
                mean_logprob=-1.0,
                greedy=False,
                target=mark,
            )
            for number, (ids, spans) in enumerate(parts)
        ]
        write_conversations(config.conversations("train"), conversations)
        return conversations

    return put
