"""Conversations that the target answered: one JSON line each, appended as they are finished.

A killed process can tear only the last line; the log drops a torn line when it is opened again, and readers pass over it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import atomic_file, fsync_path

if TYPE_CHECKING:
    import torch


class Message(BaseModel):
    """One turn's text."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    role: Literal["system", "user", "assistant"]
    content: str


class Conversation(BaseModel):
    """A conversation as the target saw and wrote it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str = Field(min_length=1)
    category: str
    messages: tuple[Message, ...]
    input_ids: tuple[int, ...] = Field(min_length=1, description="every token, templates included")
    spans: tuple[tuple[int, int], ...] = Field(
        min_length=1, description="[start, end) of each generated turn, end-of-turn token included"
    )
    finish: tuple[Literal["stop", "length"], ...] = Field(description="how each generated turn ended")
    mean_logprob: float = Field(description="mean log-probability of the generated tokens, temperature 1, in nats")
    greedy: bool
    target: str = Field(description="hash of the target's fingerprint")

    @model_validator(mode="after")
    def _consistent(self) -> Conversation:
        answers = sum(message.role == "assistant" for message in self.messages)
        if not len(self.spans) == len(self.finish) == answers:
            raise ValueError(f"{len(self.spans)} spans, {len(self.finish)} finish reasons, {answers} assistant turns")
        past = 0
        for start, end in self.spans:
            if not past <= start < end <= len(self.input_ids):
                raise ValueError(f"span [{start}, {end}) is empty, overlaps or leaves the {len(self.input_ids)} tokens")
            past = end
        return self

    def generated_mask(self) -> torch.Tensor:
        """bool (T,): True where the target wrote the token."""
        import torch

        mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for start, end in self.spans:
            mask[start:end] = True
        return mask

    @property
    def generated_tokens(self) -> int:
        """Tokens that the target wrote."""
        return sum(end - start for start, end in self.spans)


class ConversationLog:
    """Append-only writer that survives being killed; what `append` returned from is on disk.

    A context manager. On entry a torn last line is cut off and `recorded` holds what earlier runs finished, by id.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.recorded: dict[str, Conversation] = {}

    def __enter__(self) -> ConversationLog:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self.recorded = {conversation.id: conversation for conversation in read_conversations(self._path)}
            whole = _whole_bytes(self._path)
            if whole < self._path.stat().st_size:
                os.truncate(self._path, whole)
        self._handle = self._path.open("a", encoding="utf-8")
        fsync_path(self._path.parent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()

    def append(self, conversations: Iterable[Conversation]) -> None:
        """Write those whose id is not recorded yet, and flush them to disk."""
        fresh = [conversation for conversation in conversations if conversation.id not in self.recorded]
        self._handle.write("".join(map(_line, fresh)))
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self.recorded |= {conversation.id: conversation for conversation in fresh}


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Every whole line of a conversations file; a torn last line is passed over.

    Raises:
        DraftsmithError: no such file, a line that is no conversation, or an id that occurs twice.
    """
    if not path.is_file():
        raise DraftsmithError("the conversations are missing", where=path, mend="draftsmith synthesize CONFIG")
    seen: set[str] = set()
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                conversation = Conversation.model_validate_json(line)
            except ValidationError as error:
                fault = error.errors()[0]
                raise DraftsmithError(
                    f"line {number} is no conversation: {'.'.join(map(str, fault['loc']))} {fault['msg']}",
                    where=path,
                    mend="delete the line, or the file, and run: draftsmith synthesize CONFIG",
                ) from None
            if conversation.id in seen:
                raise DraftsmithError(
                    f"line {number} repeats a conversation", where=path, found=conversation.id, mend="delete the line"
                )
            seen.add(conversation.id)
            yield conversation


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write a whole file at once, atomically."""
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        handle.writelines(map(_line, conversations))


def _line(conversation: Conversation) -> str:
    return json.dumps(conversation.model_dump(), ensure_ascii=False) + "\n"


def _whole_bytes(path: Path) -> int:
    """Length of the file up to its last newline."""
    content = path.read_bytes()
    return content.rfind(b"\n") + 1
