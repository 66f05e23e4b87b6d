"""The target answers on servers that speak OpenAI's API (SGLang, vLLM), many conversations at once.

Prompts go out as token ids (`/v1/completions`), so that the server sees what the local chat template says, or as messages
(`/v1/chat/completions`). Generated ids come back from vLLM and SGLang alike (`return_token_ids`); from other servers only
text does, and the ids follow from the tokenizer. A server that fails is set aside and tried again later; a request is
asked again with the same seed. What was finished is on disk; what is in flight when the process ends is asked again.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from draftsmith.configs.console import console
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.chat import ChatFormat
from draftsmith.data.conversations import Conversation
from draftsmith.data.replies import BadReplyError, EmptyReplyError, Reply, read_reply
from draftsmith.data.servers import Pool, Server, ServerRefusalError
from draftsmith.data.threads import Thread, seed_of

if TYPE_CHECKING:
    from draftsmith.configs.target import Target

Deliver = Callable[[list[Conversation]], None]
HOPELESS = 16
"""Conversations that fail before the first success, after which the run stops."""


class Unanswered(Counter[str]):
    """Conversations without an answer, by reason, which asking again may answer."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}
        """Prompt id -> why no server will ever answer it, in the server's words; these are not counted."""


def answer_remotely(
    config: RunConfig,
    chat: ChatFormat,
    target: Target,
    mark: str,
    threads: Iterator[Thread],
    deliver: Deliver,
    *,
    begun: bool,
) -> Unanswered:
    """Answer conversations on `synthesize.servers`; `deliver` gets the finished ones, in no fixed order.

    `begun`: earlier runs were answered, so that prompts which are refused now may be the only ones left.

    Returns:
        Reasons of the conversations that stay unanswered, and prompts that a server refuses for good.

    Raises:
        DraftsmithError: no server can be reached for `synthesize.patience` seconds, none accepts the key or knows the
            model, or nothing at all can be answered.
    """
    return asyncio.run(_Run(config, chat, target, mark, threads, deliver, begun).everything())


class _Run:
    def __init__(
        self,
        config: RunConfig,
        chat: ChatFormat,
        target: Target,
        mark: str,
        threads: Iterator[Thread],
        deliver: Deliver,
        begun: bool,
    ) -> None:
        self._begun = begun
        self._config, self._chat, self._mark = config, chat, mark
        self._vocab_size = target.vocab_size
        self._context, self._threads, self._deliver = target.context_length, threads, deliver
        self._unanswered = Unanswered()
        self._finished: asyncio.Queue[list[Conversation] | None] = asyncio.Queue()
        self._successes = 0
        self._jitter = random.Random()

    async def everything(self) -> Unanswered:
        section = self._config.synthesize
        key = os.environ.get(section.api_key_env) or "none"
        pool = Pool(section.servers, key, section.timeout, section.patience)
        try:
            self._pool = pool
            self._model = section.model or await pool.first_model()
            writer = asyncio.create_task(self._write())
            workers = [asyncio.create_task(self._work()) for _ in range(section.concurrency)]
            try:
                await _all_or_first_fault([writer, *workers], len(workers), self._finished)
            finally:
                for task in (writer, *workers):
                    task.cancel()
                await asyncio.gather(writer, *workers, return_exceptions=True)
        finally:
            await pool.close()
        return self._unanswered

    async def _write(self) -> None:
        """Deliver what is finished, all that waits at once, so that one flush to disk serves many."""
        while True:
            batch = [await self._finished.get()]
            while not self._finished.empty():
                batch.append(self._finished.get_nowait())
            self._deliver([part for parts in batch if parts is not None for part in parts])
            if None in batch:
                return

    async def _work(self) -> None:
        for thread in self._threads:
            parts = await self._answer(thread)
            if parts:
                self._successes += 1
                self._finished.put_nowait(parts)
            elif not self._successes and self._failures() >= HOPELESS:
                raise DraftsmithError(
                    "the servers answer nothing that can be used",
                    where=", ".join(self._config.synthesize.servers),
                    found=dict(self._unanswered + Counter(self._unanswered.refused.values())),
                    mend="look at the servers' logs; synthesize.token_ids=false for a server that refuses the field",
                )

    def _failures(self) -> int:
        return self._unanswered.total() + (0 if self._begun else len(self._unanswered.refused))

    async def _answer(self, thread: Thread) -> list[Conversation]:
        """Every turn of one conversation; nothing if a turn could not be answered."""
        section = self._config.synthesize
        for turn in range(len(thread.prompt.turns)):
            if not thread.ask(turn, self._chat, section, self._context):
                break
            try:
                reply = await self._ask(thread, turn)
            except (ServerRefusalError, EmptyReplyError) as reason:
                self._unanswered.refused[thread.prompt.id] = str(reason)
                return []
            except BadReplyError as reason:
                self._unanswered[str(reason)] += 1
                return []
            thread.take(reply.ids, reply.logprob, reply.finish, self._chat)
        return thread.close(temperature=section.temperature, mark=self._mark)

    async def _ask(self, thread: Thread, turn: int) -> Reply:
        section, fault = self._config.synthesize, BadReplyError("never asked")
        for attempt in range(section.retries + 1):
            if attempt:
                await asyncio.sleep(min(30.0, 0.25 * 2**attempt) * (0.5 + self._jitter.random() / 2))
            server = await self._pool.take()
            try:
                answer = await self._pool.call(server, self._request(server, thread, turn))
            except BadReplyError as error:
                fault = error
                continue
            try:
                return self._read(answer, thread)
            except BadReplyError as error:
                fault = type(error)(f"{error} (from {server.url})")
                if isinstance(error, EmptyReplyError) and attempt:
                    break  # under the same seed it stays empty
        raise fault

    def _limit(self, thread: Thread) -> int:
        """max_tokens of the turn asked last."""
        return min(self._config.synthesize.max_new_tokens, self._context - len(thread.ids))

    def _read(self, answer: Any, thread: Thread) -> Reply:
        return read_reply(
            answer, thread.parts[-1].seen, self._chat, limit=self._limit(thread),
            vocab_size=self._vocab_size, chat_endpoint=self._config.synthesize.endpoint == "chat",
        )  # fmt: skip

    def _request(self, server: Server, thread: Thread, turn: int) -> Any:
        section = self._config.synthesize
        extra: dict[str, Any] = {}
        if section.token_ids:
            extra = {"return_token_ids": True, "stop_token_ids": list(self._chat.stop_ids)}
        arguments: dict[str, Any] = {
            "model": self._model,
            "max_tokens": self._limit(thread),
            "temperature": section.temperature,
            "top_p": section.top_p,
            "seed": seed_of(section.seed, thread.prompt.id, turn) & 0x7FFFFFFF,
        }
        if section.endpoint == "completions":
            extra |= {"skip_special_tokens": False} if section.token_ids else {}
            return lambda: server.client.completions.create(
                prompt=thread.ids, logprobs=0, extra_body=extra, **arguments
            )
        if thread.prompt.tools:
            arguments["tools"] = [dict(tool) for tool in thread.prompt.tools]
        if section.template_kwargs:
            extra["chat_template_kwargs"] = section.template_kwargs
        return lambda: server.client.chat.completions.create(
            messages=[_as_sent(message) for message in thread.messages], logprobs=True, extra_body=extra, **arguments
        )


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the API wants it: arguments of tool calls as JSON text."""
    import json

    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


async def _all_or_first_fault(tasks: list[asyncio.Task[None]], workers: int, finished: asyncio.Queue[Any]) -> None:
    """Wait for the workers, then let the writer end; the first fault of any of them ends the waiting."""
    open_workers = set(tasks[1:])
    while open_workers:
        done, _ = await asyncio.wait({tasks[0], *open_workers}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        open_workers -= done
    finished.put_nowait(None)
    await tasks[0]


def say_servers(config: RunConfig, count: int, total: int, split: str) -> None:
    """One line before the work begins."""
    section = config.synthesize
    console.print(
        f"{len(section.servers)} servers answer {count:,} of {total:,} {split} prompts, {section.concurrency} at once",
        highlight=False,
    )
