"""Prompts: what the target is asked. The built-in sets, jsonl files of users, and the wall between training and held-out.

A row of a file may be draftsmith's own (`{"id", "category", "turns", "system"}`), OpenAI messages
(`{"messages": [{"role", "content"}, ...]}`) or plain (`{"prompt": "..."}`). Assistant turns of messages are left out:
the target answers itself. A bad row is skipped and counted by reason; it never stops a run.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from draftsmith.configs.console import warn
from draftsmith.configs.errors import DraftsmithError

FOLDER = Path(__file__).parent / "prompts"
BUILTIN = {"builtin:train": FOLDER / "train.jsonl", "builtin:heldout": FOLDER / "heldout.jsonl"}


class Prompt(BaseModel):
    """One or more user turns, to be answered in order."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str = Field(min_length=1)
    category: str = "general"
    turns: tuple[str, ...] = Field(min_length=1)
    system: str | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """The user turns, normalised: equal keys mean equal questions."""
        return tuple(normalise(turn) for turn in self.turns)


class _BadRowError(Exception):
    """Why a row is skipped."""


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """Prompts of a built-in set or a jsonl file; a repeated question or a bad row is skipped, counted and reported.

    Args:
        source: `builtin:train`, `builtin:heldout` or the path of a jsonl file.
        limit: keep this many, at even distances through the file, so that their mix is the file's.

    Raises:
        DraftsmithError: no such file, or no usable row in it.
    """
    path = BUILTIN.get(source, Path(source))
    if not path.is_file():
        raise DraftsmithError(
            "the prompts do not exist", where=path, expected=f"a jsonl file, or one of {', '.join(BUILTIN)}"
        )
    prompts: list[Prompt] = []
    ids: set[str] = set()
    keys: set[tuple[str | None, tuple[str, ...]]] = set()
    skipped: Counter[str] = Counter()
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                prompt = _read_row(line, f"{path.stem}-{number:06d}")
            except _BadRowError as reason:
                skipped[str(reason)] += 1
                continue
            key = (prompt.system, prompt.key)
            if prompt.id in ids or key in keys:
                skipped["repeated id" if prompt.id in ids else "repeated question"] += 1
                continue
            ids.add(prompt.id)
            keys.add(key)
            prompts.append(prompt)
    if skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
        warn(f"{sum(skipped.values()):,} of {len(prompts) + sum(skipped.values()):,} rows of {path} skipped: {reasons}")
    if not prompts:
        raise DraftsmithError("the file holds no usable prompt", where=path, found=dict(skipped) or "an empty file")
    return prompts if limit is None else even_sample(prompts, limit)


def even_sample(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """`limit` prompts at even distances through the file, so that few have the file's own mix; all if there are fewer."""
    if limit >= len(prompts):
        return list(prompts)
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def drop_overlap(train: Iterable[Prompt], heldout: Iterable[Prompt]) -> list[Prompt]:
    """Training prompts without those of which any user turn opens a held-out conversation; says how many it dropped."""
    held = {prompt.key[0] for prompt in heldout}
    kept, dropped = [], 0
    for prompt in train:
        if held.isdisjoint(prompt.key):
            kept.append(prompt)
        else:
            dropped += 1
    if dropped:
        warn(f"{dropped:,} training prompts also stand in the held-out set and were dropped")
    return kept


def normalise(text: str) -> str:
    """Text for comparison: Unicode NFKC, lower case, letters and digits only, one space between words."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(sign if sign.isalnum() else " " for sign in folded).split())


def _read_row(line: bytes, fallback_id: str) -> Prompt:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise _BadRowError("not JSON") from None
    if not isinstance(row, dict):
        raise _BadRowError("not an object")
    system = row.get("system")
    if "turns" in row:
        turns = row["turns"]
    elif "messages" in row:
        turns, system = _read_messages(row["messages"])
    elif "prompt" in row:
        turns = [row["prompt"]]
    else:
        raise _BadRowError("without turns, messages or prompt")
    if not isinstance(turns, list) or not turns:
        raise _BadRowError("without a user turn")
    if not all(isinstance(turn, str) for turn in turns) or not isinstance(system, str | None):
        raise _BadRowError("with content that is no text")
    if not all(turn.strip() for turn in turns):
        raise _BadRowError("with an empty user turn")
    identity, category = row.get("id", fallback_id), row.get("category", "general")
    if not isinstance(identity, str | int) or isinstance(identity, bool) or not isinstance(category, str):
        raise _BadRowError("with a bad id or category")
    return Prompt(id=str(identity) or fallback_id, category=category, turns=tuple(turns), system=system)


def _read_messages(messages: Any) -> tuple[list[Any], Any]:
    """User turns and system text of OpenAI messages."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _BadRowError("with malformed messages")
    roles = [message.get("role") for message in messages]
    if unknown := set(map(str, roles)) - {"system", "user", "assistant"}:
        raise _BadRowError(f"with role {sorted(unknown)[0]}")
    if "system" in roles[1:]:
        raise _BadRowError("with a system message that is not the first")
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if spoken[:1] == ["assistant"]:
        raise _BadRowError("that begins with the assistant")
    turns = [message.get("content") for message in messages if message["role"] == "user"]
    return turns, messages[0].get("content") if roles[:1] == ["system"] else None
