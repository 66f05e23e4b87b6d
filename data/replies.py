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


LOOSE = 4
"""A text's own tokens may be more than those that were generated, as of bytes that are no UTF-8; not so many times more."""


class BadReplyError(Exception):
    """An answer that cannot be used; its text is the reason."""


class EmptyReplyError(BadReplyError):
    """Nothing was written, and no id says that the target ended its turn: asked again, it may say the same."""


@dataclass(frozen=True)
class Reply:
    """One generated turn: its ids (end-of-turn token included), their summed log-probability if known, its end."""

    ids: list[int]
    logprob: float | None
    finish: Finish


def read_reply(
    answer: Any, prompt: Rendered, chat: ChatFormat, *, limit: int, vocab_size: int, chat_endpoint: bool
) -> Reply:
    """Check an answer of the openai client against the prompt that was sent.

    Args:
        limit: the tokens that were asked for, max_tokens.
        vocab_size: the target's; ids from there on are none.

    Raises:
        EmptyReplyError: an answer of no token.
        BadReplyError: no single answer, no known end, ids that are none or too many, another text than that
            of the ids, a log-probability that is not finite, or the server saw another prompt.
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
    if saw and saw != prompt.ids:
        raise BadReplyError(
            f"the server saw another prompt ({len(saw) if isinstance(saw, list) else 'no'} tokens, expected {len(prompt.ids)}): its tokenizer, its chat "
            "template or its template kwargs are not those of target.path"
        )
    ids = extra.get("token_ids") or extra.get("response_token_ids")
    if ids:
        ids = _checked(ids, finish, chat, limit, vocab_size)
        if not chat_endpoint:  # which hands out what its parsers have left of the text
            _refuse_other_text(choice.text, ids, chat)
    else:
        ids = _from_text(choice, prompt, finish, chat, chat_endpoint=chat_endpoint)
        if len(ids) > LOOSE * limit + len(chat.end_ids):
            raise BadReplyError("with far more text than max_tokens allows")
    return Reply(ids, _logprob(choice, len(ids)), finish)


def _checked(ids: Any, finish: Finish, chat: ChatFormat, limit: int, vocab_size: int) -> list[int]:
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise BadReplyError("with token ids that are none")
    if max(ids) >= vocab_size:
        raise BadReplyError(f"with token ids outside the target's vocabulary of {vocab_size}")
    stops = [index for index, one in enumerate(ids) if one in chat.stop_ids]
    if stops and stops[0] < len(ids) - 1:
        raise BadReplyError("with tokens behind the end of the turn")
    if len(ids) > limit:
        raise BadReplyError("with more tokens than max_tokens allows")
    if finish == "stop" and not stops:
        return [*ids, *chat.end_ids]  # a server that keeps the end token to itself
    return ids


def _refuse_other_text(text: Any, ids: list[int], chat: ChatFormat) -> None:
    """Ids must be those of the text beside them, where that can be told.

    Servers leave special tokens in the text or out, and the end of the turn, and treat spaces in ways of their own; a
    character of which bytes are missing they hold back or show as U+FFFD, and such answers are not compared.
    """
    if not isinstance(text, str) or not text:
        return
    said = {_ink(text), _ink(chat.without_end(text))}
    meant = {_ink(chat.written(ids)), _ink(chat.answer_text(ids))}
    if not said & meant and not any("\ufffd" in one for one in said | meant):
        raise BadReplyError("with token ids that are not those of its text")


def _ink(text: str) -> str:
    return "".join(text.split())


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
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadReplyError("with text that is no valid Unicode") from None
    if not chat.without_end(text):
        raise EmptyReplyError("with an empty answer")
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
