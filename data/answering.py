"""Batches of open conversations answered by the target, turn by turn, in this process or in several side by side."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.configs.target import read_target
from draftsmith.data.chat import ChatFormat
from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.prompt_sets import Prompt
from draftsmith.data.target_model import configured_stop_ids, load_target, load_tokenizer, target_mark

if TYPE_CHECKING:
    from draftsmith.data.decode import Sampler
    from draftsmith.data.target_model import LoadedTarget

_worker: Answerer | None = None
"""What a worker process answers with."""


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
    """The answered batches in order, from this process or from `synthesize.workers` others.

    Raises:
        DraftsmithError: a worker died.
    """
    workers = min(config.synthesize.workers, len(batches))
    if workers == 1:
        answerer = make_answerer(config, dtype)
        yield from (answerer.answer(batch) for batch in batches)
        return
    import torch

    shared = max(1, torch.get_num_threads() // workers)
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(config, dtype, shared, os.getpid()),
    )
    try:
        yield from pool.map(_answer_in_worker, batches)
    except BrokenProcessPool:
        raise DraftsmithError(
            "a worker died while answering; finished batches are kept",
            where="synthesize.workers",
            found=workers,
            mend="run the same command again; fewer workers or a smaller synthesize.batch_size if memory is short",
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _start_worker(config: RunConfig, dtype: str, threads: int, parent: int) -> None:
    """Load the target in a worker, which ends with the process that started it."""
    global _worker  # noqa: PLW0603 - a pool's initializer has no other way to hand something to its tasks
    import torch

    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    _worker = make_answerer(config, dtype)


def _answer_in_worker(batch: Sequence[Thread]) -> list[Conversation]:
    assert _worker is not None
    return _worker.answer(batch)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


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
