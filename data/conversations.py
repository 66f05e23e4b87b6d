"""Conversations that the target answered: one JSON line each, appended as they are finished.

A killed process can tear only the last line; the log drops a torn line when it is opened again, and readers pass over it.
"""

from __future__ import annotations

import fcntl
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import atomic_file, fsync_path

if TYPE_CHECKING:
    import torch


class Message(BaseModel):
    """One turn's text, and what belongs to a tool call or its result."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[dict[str, JsonValue], ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class Conversation(BaseModel):
    """A conversation as the target saw and wrote it: one token sequence.

    Where the chat template rewrites earlier answers (it strips their reasoning), a later turn was generated after other
    tokens than the ones that the target wrote. Such a conversation has several parts, one sequence each, every turn
    standing behind the history that it was generated from; earlier answers in a later part are history, not generated.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str = Field(min_length=1)
    category: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, JsonValue], ...] | None = None
    input_ids: tuple[int, ...] = Field(min_length=1, description="every token, templates included")
    spans: tuple[tuple[int, int], ...] = Field(
        min_length=1, description="[start, end) of each generated turn, end-of-turn token included"
    )
    finish: tuple[Literal["stop", "length"], ...] = Field(description="how each generated turn ended")
    answers: tuple[int, ...] | None = Field(
        default=None, description="index in `messages` of each span's answer; none: every assistant message in order"
    )
    mean_logprob: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="mean log-probability of the generated tokens, in nats, at temperature 1 or (some servers) at that of sampling",
    )
    temperature: float = Field(
        default=1.0, gt=0.0, allow_inf_nan=False, description="of sampling; without meaning for greedy answers"
    )
    greedy: bool
    target: str = Field(description="hash of the target's fingerprint")
    prompt: str | None = Field(default=None, description="id of the prompt, where the conversation has several parts")
    parts: int = Field(default=1, ge=1, description="sequences of that prompt, which stand on consecutive lines")

    @model_validator(mode="after")
    def _consistent(self) -> Conversation:
        places = self.answer_places
        if not len(self.spans) == len(self.finish) == len(places):
            raise ValueError(
                f"{len(self.spans)} spans, {len(self.finish)} finish reasons, {len(places)} assistant turns"
            )
        if any(not 0 <= place < len(self.messages) or self.messages[place].role != "assistant" for place in places):
            raise ValueError(f"answers {places} do not name assistant messages")
        past = 0
        for start, end in self.spans:
            if not past <= start < end <= len(self.input_ids):
                raise ValueError(f"span [{start}, {end}) is empty, overlaps or leaves the {len(self.input_ids)} tokens")
            past = end
        return self

    @property
    def answer_places(self) -> tuple[int, ...]:
        """Index in `messages` of the answer that each span holds."""
        if self.answers is not None:
            return self.answers
        return tuple(index for index, message in enumerate(self.messages) if message.role == "assistant")

    @property
    def prompt_id(self) -> str:
        """The prompt that was answered; parts of one conversation share it."""
        return self.id if self.prompt is None else self.prompt

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

    A context manager that one process at a time may enter. On entry a torn last line is cut off, and with it a last
    conversation of which some parts are missing; `recorded` then holds the place of what earlier runs finished, by
    prompt. Conversations themselves stay on disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.recorded: dict[str, tuple[int, int]] = {}
        """Prompt id -> first byte and length of its lines."""

    def __enter__(self) -> ConversationLog:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = self._path.open("a+b")
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._recall()
        except BaseException as error:
            self._handle.close()
            if isinstance(error, BlockingIOError):
                raise DraftsmithError("another process writes these conversations", where=self._path) from None
            raise
        fsync_path(self._path.parent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()

    def append(self, conversations: Iterable[Conversation]) -> None:
        """Write those whose prompt is not recorded yet, parts of one conversation together, and flush them to disk."""
        groups: dict[str, bytes] = {}
        for conversation in conversations:
            if conversation.prompt_id not in self.recorded:
                groups[conversation.prompt_id] = groups.get(conversation.prompt_id, b"") + _line(conversation).encode()
        place = self._handle.seek(0, os.SEEK_END)
        self._handle.write(b"".join(groups.values()))
        self._handle.flush()
        os.fsync(self._handle.fileno())
        for prompt, lines in groups.items():
            self.recorded[prompt] = (place, len(lines))
            place += len(lines)

    def read(self, prompt: str) -> list[Conversation]:
        """The recorded parts of a prompt's conversation."""
        return [Conversation.model_validate_json(line) for line in self.lines(prompt).splitlines()]

    def rewrite(self, prompts: Iterable[str]) -> None:
        """Put the file into the order of `prompts`, atomically; what is not named is left out."""
        with atomic_file(self._path) as temporary, temporary.open("wb") as handle:
            for prompt in prompts:
                handle.write(self.lines(prompt))

    def lines(self, prompt: str) -> bytes:
        """A prompt's recorded lines as they stand in the file."""
        start, length = self.recorded[prompt]
        self._handle.seek(start)
        return self._handle.read(length)

    def _recall(self) -> None:
        place = whole = 0
        unfinished: list[Conversation] = []
        for conversation, length in _read_lines(self._path):
            place += length
            unfinished.append(conversation)
            if len(unfinished) == conversation.parts:
                self.recorded[conversation.prompt_id] = (whole, place - whole)
                whole, unfinished = place, []
        if whole < self._path.stat().st_size:
            os.truncate(self._path, whole)


class ConversationFile:
    """A finished file as a sequence: places and lengths are in memory, a conversation is read when it is asked for.

    Attributes:
        lengths: int64 (n,), tokens of each conversation.

    Raises (when opened):
        DraftsmithError: see `read_conversations`, and whatever `check` raises for a conversation.
    """

    def __init__(self, path: Path, check: Callable[[Conversation], None] | None = None) -> None:
        self.path = path
        places, lengths = array("q", [0]), array("q")
        for conversation, size in _read_lines(path):
            if check is not None:
                check(conversation)
            places.append(places[-1] + size)
            lengths.append(len(conversation.input_ids))
        self._places, self.lengths = np.array(places), np.array(lengths, dtype=np.int64)
        self._handle = path.open("rb")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Conversation:
        index = range(len(self))[index]
        first, last = int(self._places[index]), int(self._places[index + 1])
        return Conversation.model_validate_json(os.pread(self._handle.fileno(), last - first, first))

    def __iter__(self) -> Iterator[Conversation]:
        return (self[index] for index in range(len(self)))


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Every whole line of a conversations file, one at a time; a torn last line is passed over.

    Raises:
        DraftsmithError: no such file, a line that is no conversation, or an id that occurs twice.
    """
    return (conversation for conversation, _ in _read_lines(path))


def _read_lines(path: Path) -> Iterator[tuple[Conversation, int]]:
    """Conversations and the bytes of their lines."""
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
            yield conversation, len(line)


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write a whole file at once, atomically."""
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        handle.writelines(map(_line, conversations))


def _line(conversation: Conversation) -> str:
    record = conversation.model_dump(exclude_none=True, exclude={"parts"} if conversation.parts == 1 else None)
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
