"""One row of a prompt file -> a prompt: user turns to be answered in order, whatever form the row has.

Forms: draftsmith's own (`turns`), OpenAI `messages`, ShareGPT (`conversations` of from/value), and plain `prompt`, with or
without an answer column beside it. The target answers every turn itself, so assistant messages of a row are left out.
One kind stays: a tool call whose result follows it, because a result without its call makes no sense. Call and result
then belong to the turn's prompt, are never supervised, and the target answers after the result. A call that no result
follows is left out like any other answer.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of OpenAI messages."""

SPEAKERS = {
    "system": "system",
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant", "function_call": "call",
    "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""Names that ShareGPT files give to speakers, and their roles; `call` is a tool call written as JSON text."""

KEPT = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
"""Fields of a message that a chat template may read."""

TELLING = frozenset("#*/%&@\\")
"""Signs that Unicode calls punctuation and that make another question: C# and C, 7/3 and 7*3."""

Turn = str | tuple[dict[str, JsonValue], ...]
"""A user's text, or the messages put before the target's answer: the user's, then tool calls and their results."""


class Prompt(BaseModel):
    """One or more user turns, to be answered in order."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str = Field(min_length=1)
    category: str = "general"
    turns: tuple[Turn, ...] = Field(min_length=1)
    system: str | None = None
    tools: tuple[dict[str, JsonValue], ...] | None = Field(default=None, description="as the chat template gets them")

    @property
    def questions(self) -> tuple[str, ...]:
        """What the user says in each turn."""
        return tuple(turn if isinstance(turn, str) else str(turn[0]["content"]) for turn in self.turns)

    @property
    def key(self) -> tuple[str, ...]:
        """The user turns, normalised: equal keys mean equal questions."""
        return tuple(map(normalise, self.questions))

    def asked(self, turn: int) -> list[dict[str, Any]]:
        """The messages of a turn, the user's first."""
        given = self.turns[turn]
        return [{"role": "user", "content": given}] if isinstance(given, str) else [dict(message) for message in given]

    def opening(self) -> list[dict[str, Any]]:
        """The system message, if there is one, and the first turn."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.asked(0)]


class BadRowError(Exception):
    """Why a row is skipped, in words that go on after `rows` or `a row`."""


def normalise(text: str) -> str:
    """Text for comparison: Unicode NFKC, lower case, one space for every run of spaces and of signs that only punctuate.

    What changes a question stays: combining marks (a vowel in Thai or Hindi), symbols, `#` and the like, and any sign between
    two digits (7-3, 7.3).
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    around = f" {folded} "
    kept = [
        sign
        if sign.isalnum() or unicodedata.category(sign)[0] in "MS" or sign in TELLING or (before + after).isdecimal()
        else " "
        for before, sign, after in zip(around[:-2], folded, around[2:], strict=True)
    ]
    return " ".join("".join(kept).split())


def read_row(row: Any, fallback_id: str) -> Prompt:
    """The prompt of one row.

    Args:
        row: a decoded JSON value, or a row of a table as a dict.
        fallback_id: the prompt's id where the row has none.

    Raises:
        BadRowError: the row is no prompt; its text is the reason.
    """
    try:
        prompt = _read(row, fallback_id)
        json.dumps(prompt.model_dump(), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRowError("with text that is no valid Unicode") from None
    except RecursionError:
        raise BadRowError("nested too deeply") from None
    except ValidationError as error:
        surrogate = any(part["type"] == "string_unicode" for part in error.errors(include_url=False))
        raise BadRowError(
            "with text that is no valid Unicode" if surrogate else "with values that JSON does not know"
        ) from None
    return prompt


def _read(row: Any, fallback_id: str) -> Prompt:
    if not isinstance(row, Mapping):
        raise BadRowError("not an object")
    system, turns = row.get("system"), _turns_of(row)
    if turns is None:
        system, turns = _read_messages(_messages_of(row), system)
    if not turns:
        raise BadRowError("without a user turn")
    questions = [turn if isinstance(turn, str) else turn[0]["content"] for turn in turns]
    if not all(isinstance(text, str) for text in questions) or not isinstance(system, str | None):
        raise BadRowError("with content that is no text")
    if not all(text.strip() for text in questions):
        raise BadRowError("with an empty user turn")
    identity, category = row.get("id"), row.get("category")
    identity = fallback_id if identity is None else identity
    category = "general" if category is None else category
    if not isinstance(identity, str | int) or isinstance(identity, bool) or not isinstance(category, str):
        raise BadRowError("with a bad id or category")
    return Prompt(
        id=str(identity) or fallback_id,
        category=category,
        turns=tuple(turns),
        system=system or None,
        tools=_read_tools(row.get("tools")),
    )


def _turns_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Turns of draftsmith's own form and of plain prompts; None where the row holds messages."""
    if row.get("turns") is not None:
        turns = row["turns"]
        if not isinstance(turns, list):
            raise BadRowError("without a user turn")
        return [turn if isinstance(turn, str) else _read_turn(turn) for turn in turns]
    if row.get("messages") is None and row.get("conversations") is None and isinstance(row.get("prompt"), str):
        return [row["prompt"]]
    return None


def _read_turn(turn: Any) -> tuple[dict[str, Any], ...]:
    """A turn given as messages, in draftsmith's own form."""
    if not isinstance(turn, list | tuple):
        raise BadRowError("with content that is no text")
    system, turns = _read_messages(list(turn), None)
    if system is not None:
        raise BadRowError("with a system message inside a turn")
    if len(turns) != 1:
        raise BadRowError("with a turn that does not hold exactly one user message")
    read = turns[0]
    return ({"role": "user", "content": read},) if isinstance(read, str) else read


def _messages_of(row: Mapping[str, Any]) -> Any:
    if row.get("messages") is not None:
        return row["messages"]
    if row.get("conversations") is not None:
        return _read_share_gpt(row["conversations"])
    if isinstance(row.get("prompt"), list):
        return row["prompt"]
    if "prompt" in row:
        raise BadRowError("with content that is no text")
    raise BadRowError("without turns, messages, conversations or prompt")


def _read_messages(messages: Any, system: Any) -> tuple[Any, list[Any]]:
    """System text and turns of OpenAI messages; `system` is the row's own, which a system message replaces."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise BadRowError("with malformed messages")
    if not all(isinstance(message, Mapping) for message in messages):
        raise BadRowError("with malformed messages")
    roles = [ROLES.get(str(message.get("role"))) for message in messages]
    for role, message in zip(roles, messages, strict=True):
        if role is None:
            raise BadRowError(f"with role {str(message.get('role'))[:40]}")
    if "system" in roles[1:]:
        raise BadRowError("with a system message that is not the first")
    if roles[:1] == ["system"]:
        system = messages[0].get("content")
        if not isinstance(system, str):
            raise BadRowError("with content that is no text")
        roles, messages = roles[1:], messages[1:]
    if roles[:1] == ["assistant"]:
        raise BadRowError("that begins with the assistant")
    turns: list[list[dict[str, Any]]] = []
    for index, (role, message) in enumerate(zip(roles, messages, strict=True)):
        if role == "user":
            turns.append([_clean(message)])
        elif role == "tool":
            if not turns or turns[-1][-1]["role"] == "user" or roles[index - 1] not in ("assistant", "tool"):
                raise BadRowError("with a tool result that no call asked for")
            turns[-1].append(_clean(message))
        elif message.get("tool_calls") and roles[index + 1 : index + 2] == ["tool"]:
            turns[-1].append(_clean(message))
    return system, [turn[0]["content"] if len(turn) == 1 and len(turn[0]) == 2 else tuple(turn) for turn in turns]


def _clean(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message's known fields; arguments of tool calls become objects, as servers render them."""
    read = {key: message[key] for key in KEPT if message.get(key) is not None}
    if "tool_calls" in read:
        if read["role"] != "assistant":
            raise BadRowError("with a tool call that is not the assistant's")
        read["tool_calls"] = _read_calls(read["tool_calls"])
        read.setdefault("content", "")
    if not isinstance(read.get("content"), str):
        raise BadRowError("with content that is no text")
    for key in ("tool_call_id", "name", "reasoning_content"):
        if not isinstance(read.get(key, ""), str):
            raise BadRowError(f"with a {key} that is no text")
    return read


def _read_calls(calls: Any) -> list[dict[str, Any]]:
    calls = _decoded(calls, "with malformed tool calls")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRowError("with malformed tool calls")
    read = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRowError("with malformed tool calls")
        arguments = _decoded(function.get("arguments") or {}, "with tool arguments that are no JSON")
        if not isinstance(arguments, Mapping):
            raise BadRowError("with malformed tool calls")
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        read.append(
            {**identity, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
        )
    return read


def _read_tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    tools = _decoded(tools, "with malformed tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError("with malformed tools")
    return tuple(tools)


def _read_share_gpt(conversations: Any) -> list[dict[str, Any]]:
    """ShareGPT's from/value as OpenAI messages."""
    conversations = _decoded(conversations, "with malformed messages")
    if not isinstance(conversations, list) or not all(isinstance(entry, Mapping) for entry in conversations):
        raise BadRowError("with malformed messages")
    if all("role" in entry and "from" not in entry for entry in conversations):
        return [dict(entry) for entry in conversations]
    messages: list[dict[str, Any]] = []
    for entry in conversations:
        role, value = SPEAKERS.get(str(entry.get("from"))), entry.get("value")
        if role is None:
            raise BadRowError(f"with role {str(entry.get('from'))[:40]}")
        if role == "call":
            calls = _decoded(value, "with tool arguments that are no JSON")
            messages.append({"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]})
        else:
            messages.append({"role": role, "content": value})
    return messages


def _decoded(value: Any, reason: str) -> Any:
    """A value that some files keep as JSON text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value, parse_constant=_no_constant)
    except ValueError:
        raise BadRowError(reason) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
