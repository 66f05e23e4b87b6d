"""The held-out prompts as requests to an engine: one for each assistant turn, with the answer that was harvested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.conversations import read_conversations
from draftsmith.data.target_model import chat_format


@dataclass(frozen=True)
class Request:
    """One turn to be answered.

    Attributes:
        conversation: id of the conversation. start, end: the turn's tokens in it.
        input_ids: everything before the turn.
        answer: the target's own tokens, end-of-turn token included.
        max_new_tokens: as at generation.
    """

    id: str
    conversation: str
    start: int
    end: int
    input_ids: tuple[int, ...]
    answer: tuple[int, ...]
    max_new_tokens: int


def heldout_requests(config: RunConfig, limit: int | None = None) -> list[Request]:
    """The requests of a run's held-out conversations in file order, of the first `limit` conversations."""
    found = []
    for number, conversation in enumerate(read_conversations(config.conversations("heldout"))):
        if limit is not None and number >= limit:
            break
        found += [
            Request(
                f"{conversation.id}/{turn}", conversation.id, start, end, conversation.input_ids[:start],
                conversation.input_ids[start:end], config.synthesize.max_new_tokens,
            )
            for turn, (start, end) in enumerate(conversation.spans)
        ]  # fmt: skip
    if not found:
        raise DraftsmithError(
            "there is no held-out conversation to serve", where=config.conversations("heldout"),
            mend="draftsmith synthesize CONFIG --split heldout",
        )  # fmt: skip
    return found


def prompts_document(config: RunConfig, requests: list[Request]) -> dict[str, Any]:
    """The prompts file of the serve scripts."""
    prompts = [
        {"id": one.id, "input_ids": list(one.input_ids), "max_new_tokens": one.max_new_tokens} for one in requests
    ]
    return {"prompts": prompts, "stop_token_ids": sorted(chat_format(config).stop_ids)}
