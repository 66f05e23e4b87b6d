"""Promises of `draftsmith inspect`: the table is the one worked out by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.configs.schema import load_config
from draftsmith.data.conversations import Conversation, write_conversations
from draftsmith.train.inspect import inspect, rows


def conversation(**changes: Any) -> Conversation:
    """`u u A B C E u`, of which A B C E were generated."""
    values: dict[str, Any] = {
        "id": "x", "category": "c", "input_ids": [10, 11, 20, 21, 22, 2, 12], "spans": [(2, 6)], "finish": ["stop"],
        "messages": [{"role": "user", "content": "uu"}, {"role": "assistant", "content": "ABC"}],
        "greedy": True, "target": "t",
    }  # fmt: skip
    return Conversation.model_validate(values | changes)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    (tmp_path / "c.json").write_text(json.dumps({"name": "r", "runs": str(tmp_path), "target": {"path": "t"}}))
    return load_config(tmp_path / "c.json")


def test_the_next_token_table_is_the_worked_example(config: Any) -> None:
    table = [
        (row["feature_position"], row["input"], row["label"], row["supervised"]) for row in rows(config, conversation())
    ]
    assert table == [
        (0, 11, 20, False), (1, 20, 21, True), (2, 21, 22, True), (3, 22, 2, True), (4, 2, 12, False),
    ]  # fmt: skip


def test_prompt_of_five_and_answer_of_three_trains_the_second_answer_token(config: Any) -> None:
    one = conversation(input_ids=[1, 2, 3, 4, 5, 60, 61, 62], spans=[(5, 8)])
    assert [row["label"] for row in rows(config, one) if row["supervised"]] == [61, 62]


def test_a_cut_turn_does_not_train_its_end(config: Any) -> None:
    """x6 = E was put there by the template, because the turn had been cut after C."""
    one = conversation(spans=[(2, 5), (6, 7)], finish=["length", "stop"], messages=[
        {"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")
    ])  # fmt: skip
    assert [row["label"] for row in rows(config, one) if row["supervised"]] == [21, 22]


def test_json_has_tokens_table_and_counts(config: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    write_conversations(config.conversations("train"), [conversation(id="a"), conversation()])
    tokenizer = SimpleNamespace(decode=lambda ids: f"<{ids[0]}>", all_special_ids=[2])
    monkeypatch.setattr(sys.modules["draftsmith.train.inspect"], "load_tokenizer", lambda section: tokenizer)
    monkeypatch.setattr(sys.modules["draftsmith.train.inspect"], "read_target", lambda path: None)
    inspect(config, "train", "x", as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["id"] == "x" and shown["spans"] == [[2, 6]]
    assert [token["generated"] for token in shown["tokens"]] == [False, False, True, True, True, True, False]
    assert shown["counts"] == {"sequences": 2, "tokens": 14, "generated": 8, "supervised": 6, "turns": 2, "cut": 0}
    inspect(config, "train")
    printed = capsys.readouterr().out
    assert printed.startswith("a: user, assistant (generated)") and "x[t+2]" in printed
