"""A conversation while it is being written, turn by turn, whoever answers it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from draftsmith.configs.schema import SynthesizeSection
from draftsmith.data.chat import ChatFormat, Rendered, TemplateRefusalError
from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.ids import part_id
from draftsmith.data.prompt_rows import Prompt

Finish = Literal["stop", "length"]


@dataclass
class Part:
    """One token sequence of a conversation: what was seen and written, and where the target wrote."""

    seen: Rendered
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish: list[Finish] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    logprob: float | None = 0.0
    messages: int = 0
    """Messages of the conversation that this part holds."""


@dataclass
class Thread:
    """A prompt and what has been said so far. `opening` is the first turn's prompt."""

    prompt: Prompt
    opening: Rendered
    messages: list[dict[str, Any]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    answered: int = 0

    @property
    def ids(self) -> list[int]:
        """The sequence being written; after `ask`, the prompt that the target is to answer."""
        return self.parts[-1].seen.ids

    def ask(self, turn: int, chat: ChatFormat, section: SynthesizeSection, context_length: int) -> bool:
        """Put the next turn; False when there is none, when its prompt would be too long, or the template refuses it."""
        if turn != self.answered or turn >= len(self.prompt.turns):
            return False
        if turn == 0:
            self.messages = self.prompt.opening()
            self.parts = [Part(self.opening)]
            return True
        messages = [*self.messages, *self.prompt.asked(turn)]
        seen = self.parts[-1].seen
        try:
            rendered, continues = chat.following(
                seen, messages, self.prompt.tools, rewrite=section.history == "template"
            )
        except TemplateRefusalError:
            return False
        if len(rendered.ids) > min(section.max_prompt_tokens, context_length - 1):
            return False
        self.messages = messages
        if continues:
            self.parts[-1].seen = rendered
        else:
            self.parts.append(Part(rendered))
        return True

    def take(self, ids: list[int], logprob: float | None, finish: Finish, chat: ChatFormat) -> None:
        """Add the answer to the turn asked last: its ids, end-of-turn token included if the target wrote it."""
        part = self.parts[-1]
        start, message = len(part.seen.ids), chat.answer(part.seen, ids)
        part.seen = Rendered(part.seen.text + chat.written(ids), [*part.seen.ids, *ids])
        part.spans.append((start, start + len(ids)))
        part.finish.append(finish)
        part.places.append(len(self.messages))
        part.logprob = None if part.logprob is None or logprob is None else part.logprob + logprob
        self.messages.append(message)
        part.messages = len(self.messages)
        self.answered += 1

    def close(self, *, temperature: float, mark: str) -> list[Conversation]:
        """The conversation's parts. A prompt that was put and not answered is left off. `temperature` 0: greedy."""
        parts = [part for part in self.parts if part.spans]
        return [
            Conversation(
                id=part_id(self.prompt.id, number + 1),
                category=self.prompt.category,
                messages=tuple(Message.model_validate(message) for message in self.messages[: part.messages]),
                tools=self.prompt.tools,
                input_ids=tuple(part.seen.ids[: part.spans[-1][1]]),
                spans=tuple(part.spans),
                finish=tuple(part.finish),
                answers=None if self._all_answers(part) else tuple(part.places),
                mean_logprob=None
                if part.logprob is None
                else part.logprob / sum(end - start for start, end in part.spans),
                greedy=temperature == 0.0,
                temperature=temperature or 1.0,
                target=mark,
                prompt=self.prompt.id if len(parts) > 1 else None,
                parts=len(parts),
            )
            for number, part in enumerate(parts)
        ]

    def _all_answers(self, part: Part) -> bool:
        return part.places == [index for index in range(part.messages) if self.messages[index]["role"] == "assistant"]


def seed_of(seed: int, conversation: str, turn: int) -> int:
    """Seed of one turn's random numbers, whichever batch it is answered in or whenever it is asked again."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{conversation}\n{turn}".encode()).digest()[:8], "big") >> 1
