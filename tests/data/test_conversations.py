"""Promises of the conversations file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.conversations import Conversation, ConversationLog, read_conversations


def make(identity: str, **changes: Any) -> Conversation:
    values: dict[str, Any] = {
        "id": identity,
        "category": "chat",
        "messages": [{"role": "user", "content": "é\u2028ü"}, {"role": "assistant", "content": "ok"}],
        "input_ids": [5, 6, 7, 8, 9],
        "spans": [(2, 5)],
        "finish": ["stop"],
        "mean_logprob": -0.5,
        "greedy": True,
        "target": "abc",
    }
    return Conversation.model_validate(values | changes)


def test_generated_mask_marks_the_spans() -> None:
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    conversation = make("a", messages=messages, spans=[(1, 2), (3, 5)], finish=["stop", "length"])
    assert conversation.generated_mask().tolist() == [False, True, False, True, True]
    assert conversation.generated_tokens == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"spans": [(3, 3)]},
        {"spans": [(2, 6)]},
        {"spans": [(2, 3), (4, 5)]},
        {"finish": []},
        {"input_ids": []},
        {"unknown": 1},
    ],
)
def test_a_record_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make("a", **changes)


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "train.jsonl"
    with ConversationLog(path) as log:
        log.append([make("a"), make("b")])
        log.append([make("b", mean_logprob=-9.0), make("c")])
    assert [one.id for one in read_conversations(path)] == ["a", "b", "c"]
    assert list(read_conversations(path))[1] == make("b")


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_last_line_is_dropped_on_resume(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "train.jsonl"
    with ConversationLog(path) as log:
        log.append([make("a"), make("b")])
    path.write_bytes(path.read_bytes()[:-cut])
    assert [one.id for one in read_conversations(path)] == ["a"]
    with ConversationLog(path) as log:
        assert list(log.recorded) == ["a"]
        log.append([make("b"), make("c")])
    assert [one.id for one in read_conversations(path)] == ["a", "b", "c"]


def test_a_bad_line_in_the_middle_stops_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with ConversationLog(path) as log:
        log.append([make("a"), make("b")])
    lines = [line + "\n" for line in path.read_text().split("\n")[:-1]]
    path.write_text(lines[0] + lines[1].replace('"greedy": true', '"greedy": "perhaps"'))
    with pytest.raises(DraftsmithError, match=r"line 2 is no conversation: greedy"):
        list(read_conversations(path))
    path.write_text(lines[0] * 2)
    with pytest.raises(DraftsmithError, match="line 2 repeats"):
        list(read_conversations(path))


def test_a_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="draftsmith synthesize"):
        list(read_conversations(tmp_path / "train.jsonl"))
