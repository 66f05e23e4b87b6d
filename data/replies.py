"""What a server's answer says: generated ids, log-probability and how it ended; anything doubtful is a bad reply."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from draftsmith.data.chat import ChatFormat, Rendered
from draftsmith.data.threads import Finish

ENDS: dict[str, Finish] = {
    "stop": "stop",
    "eos": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "length": "length",
}
"""finish_reason of servers; others (abort, content_filter) are no answer."""


class BadReplyError(Exception):
    """An answer that cannot be used; its text is the reason."""


@dataclass(frozen=True)
class Reply:
    """One generated turn: its ids (end-of-turn token included), their summed log-probability if known, its end."""

    ids: list[int]
    logprob: float | None
    finish: Finish


def read_reply(answer: Any, prompt: Rendered, chat: ChatFormat, *, chat_endpoint: bool) -> Reply:
    """Check an answer of the openai client against the prompt that was sent.

    Raises:
        BadReplyError: no single answer, no known end, ids that are none, a log-probability that is not finite, or the server saw
            another prompt.
    """
    choices = getattr(answer, "choices", None)
    if not isinstance(choices, list) or len(choices) != 1:
        raise BadReplyError("with an answer that holds no single choice")
    choice = choices[0]
    extra: dict[str, Any] = getattr(choice, "model_extra", None) or {}
    finish = ENDS.get(str(choice.finish_reason))
    if finish is None:
        raise BadReplyError(f"with finish_reason {choice.finish_reason}")
    saw = extra.get("prompt_token_ids") or (getattr(answer, "model_extra", None) or {}).get("prompt_token_ids")
    if saw and list(saw) != prompt.ids:
        raise BadReplyError(
            f"the server saw another prompt ({len(saw)} tokens, expected {len(prompt.ids)}): its tokenizer, its chat "
            "template or its template kwargs are not those of target.path"
        )
    ids = extra.get("token_ids") or extra.get("response_token_ids")
    ids = _checked(ids, finish, chat) if ids else _from_text(choice, prompt, finish, chat, chat_endpoint=chat_endpoint)
    if not ids:
        raise BadReplyError("with an empty answer")
    return Reply(ids, _logprob(choice, len(ids)), finish)


def _checked(ids: Any, finish: Finish, chat: ChatFormat) -> list[int]:
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise BadReplyError("with token ids that are none")
    stops = [index for index, one in enumerate(ids) if one in chat.stop_ids]
    if stops and stops[0] < len(ids) - 1:
        raise BadReplyError("with tokens behind the end of the turn")
    if finish == "stop" and not stops:
        return [*ids, *chat.end_ids]  # a server that keeps the end token to itself
    return ids


def _from_text(choice: Any, prompt: Rendered, finish: Finish, chat: ChatFormat, *, chat_endpoint: bool) -> list[int]:
    if not chat_endpoint:
        text = choice.text
    else:
        message = choice.message
        extra = message.model_extra or {}
        if message.tool_calls or extra.get("reasoning_content") or extra.get("reasoning"):
            raise BadReplyError(
                "with an answer that the server took apart (tool calls, reasoning) and no token ids: set "
                "synthesize.endpoint=completions"
            )
        text = message.content
    if not isinstance(text, str):
        raise BadReplyError("with an answer that is no text")
    return chat.tokens_of(prompt, chat.without_end(text), ended=finish == "stop")


def _logprob(choice: Any, count: int) -> float | None:
    """Sum over the answer's tokens; None unless the server gives every one of them.

    Raises:
        BadReplyError: one of them is not a finite number, and a sum with it would say nothing.
    """
    given = choice.logprobs
    values = getattr(given, "token_logprobs", None)
    if values is None:
        values = [getattr(entry, "logprob", None) for entry in getattr(given, "content", None) or []]
    if len(values) != count or not all(isinstance(value, float | int) for value in values):
        return None
    total = float(sum(values))
    if not math.isfinite(total):
        raise BadReplyError(f"with log-probabilities that sum up to {total}")
    return total
