"""Batches of open conversations answered by the target, turn by turn, in this process or in several side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftsmith.configs.schema import RunConfig
from draftsmith.configs.target import read_target
from draftsmith.data.chat import ChatFormat
from draftsmith.data.conversations import Conversation
from draftsmith.data.target_model import chat_format, load_target, target_mark
from draftsmith.data.threads import Thread, seed_of
from draftsmith.data.workers import side_by_side

if TYPE_CHECKING:
    from draftsmith.data.decode import Sampler
    from draftsmith.data.target_model import LoadedTarget


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
            asked = [thread for thread in batch if thread.ask(turn, self.chat, section, self.context_length)]
            if not asked:
                break
            answers = answer_batch(
                self.target,
                [thread.ids for thread in asked],
                self.chat.stop_ids,
                [min(section.max_new_tokens, self.context_length - len(thread.ids)) for thread in asked],
                self.sampler,
                [seed_of(section.seed, thread.prompt.id, turn) for thread in asked],
            )
            for thread, answer in zip(asked, answers, strict=True):
                thread.take(answer.ids, answer.logprob, answer.finish, self.chat)
        temperature = self.sampler.temperature
        return [part for thread in batch for part in thread.close(temperature=temperature, mark=self.mark)]


def answers(config: RunConfig, dtype: str, batches: Iterable[Sequence[Thread]]) -> Iterator[list[Conversation]]:
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
        chat_format(config),
        Sampler(config.synthesize.temperature, config.synthesize.top_p),
        config,
        facts.context_length,
        target_mark(facts),
    )
