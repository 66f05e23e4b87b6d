"""Batches of open conversations answered by the target, turn by turn, in this process or in several side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from draftsmith.configs.schema import RunConfig
from draftsmith.configs.target import read_target
from draftsmith.data.chat import ChatFormat
from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.prompt_sets import Prompt
from draftsmith.data.target_model import configured_stop_ids, load_target, load_tokenizer, target_mark
from draftsmith.data.workers import side_by_side

if TYPE_CHECKING:
    from draftsmith.data.decode import Sampler
    from draftsmith.data.target_model import LoadedTarget


@dataclass
class Thread:
    """A conversation while it is being written."""

    prompt: Prompt
    first_ids: list[int]
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish: list[Literal["stop", "length"]] = field(default_factory=list)
    logprob: float = 0.0


@dataclass(frozen=True)
class Answerer:
    target: LoadedTarget
    chat: ChatFormat
    sampler: Sampler
    config: RunConfig
    context_length: int
    mark: str

    def answer(self, batch: Sequence[Thread]) -> list[Conversation]:
        """Answer every turn of a batch of conversations, turn by turn."""
        from draftsmith.data.decode import answer_batch

        section = self.config.synthesize
        for turn in range(max(len(thread.prompt.turns) for thread in batch)):
            asked = [thread for thread in batch if self._ask(thread, turn)]
            if not asked:
                break
            answers = answer_batch(
                self.target,
                [thread.ids for thread in asked],
                self.chat.stop_ids,
                [min(section.max_new_tokens, self.context_length - len(thread.ids)) for thread in asked],
                self.sampler,
                [_seed(section.seed, thread.prompt.id, turn) for thread in asked],
            )
            for thread, answer in zip(asked, answers, strict=True):
                thread.spans.append((len(thread.ids), len(thread.ids) + len(answer.ids)))
                thread.ids += answer.ids
                thread.finish.append(answer.finish)
                thread.logprob += answer.logprob
                thread.messages.append({"role": "assistant", "content": self.chat.answer_text(answer.ids)})
        return [self._close(thread) for thread in batch]

    def _ask(self, thread: Thread, turn: int) -> bool:
        """Put the next user turn; False when there is none, or when its prompt would be too long."""
        if turn != len(thread.spans) or turn >= len(thread.prompt.turns):
            return False
        question = {"role": "user", "content": thread.prompt.turns[turn]}
        if turn == 0:
            thread.messages = [*system_message(thread.prompt), question]
            thread.ids = list(thread.first_ids)
            return True
        ids = self.chat.next_prompt_ids(thread.ids, [*thread.messages, question])
        if len(ids) > min(self.config.synthesize.max_prompt_tokens, self.context_length - 1):
            return False
        thread.messages.append(question)
        thread.ids = ids
        return True

    def _close(self, thread: Thread) -> Conversation:
        generated = sum(end - start for start, end in thread.spans)
        return Conversation(
            id=thread.prompt.id,
            category=thread.prompt.category,
            messages=tuple(Message.model_validate(message) for message in thread.messages),
            input_ids=tuple(thread.ids),
            spans=tuple(thread.spans),
            finish=tuple(thread.finish),
            mean_logprob=thread.logprob / generated,
            greedy=self.sampler.temperature == 0.0,
            target=self.mark,
        )


def answers(config: RunConfig, dtype: str, batches: Sequence[Sequence[Thread]]) -> Iterator[list[Conversation]]:
    """The answered batches in order, from this process or from `synthesize.workers` others."""
    yield from side_by_side(_prepare, (config, dtype), batches, config.synthesize.workers, setting="synthesize.workers")


def _prepare(config: RunConfig, dtype: str) -> Callable[[Sequence[Thread]], list[Conversation]]:
    return make_answerer(config, dtype).answer


def make_answerer(config: RunConfig, dtype: str) -> Answerer:
    """Load the target and what turns its tokens into conversations."""
    from draftsmith.data.decode import Sampler

    facts = read_target(config.target.path)
    return Answerer(
        load_target(config.target, dtype),
        ChatFormat(load_tokenizer(config.target), configured_stop_ids(config.target.path)),
        Sampler(config.synthesize.temperature, config.synthesize.top_p),
        config,
        facts.context_length,
        target_mark(facts),
    )


def system_message(prompt: Prompt) -> list[dict[str, str]]:
    return [] if prompt.system is None else [{"role": "system", "content": prompt.system}]


def _seed(seed: int, conversation: str, turn: int) -> int:
    """Seed of one turn's random numbers, whichever batch it is answered in."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{conversation}\n{turn}".encode()).digest()[:8], "big") >> 1
