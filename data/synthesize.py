"""The target answers every user turn of every prompt: prompts -> conversations, one jsonl file a split.

The plan of batches is a function of prompts and configuration alone. A batch is appended to the file when it is
finished; a killed run goes on with the unfinished batches, and the finished file, put into the order of the prompts,
has the same bytes as an unbroken run's.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftsmith import __version__
from draftsmith.configs.console import closing, console, meter, warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json, sha256_json, write_json
from draftsmith.configs.schema import RunConfig, Split
from draftsmith.configs.target import read_target
from draftsmith.data.chat import ChatFormat
from draftsmith.data.conversations import (
    Conversation,
    ConversationLog,
    Message,
    read_conversations,
    write_conversations,
)
from draftsmith.data.prompt_sets import Prompt, drop_overlap, load_prompts
from draftsmith.data.target_model import configured_stop_ids, load_target, load_tokenizer, split_dtype, target_mark

if TYPE_CHECKING:
    from draftsmith.data.decode import Sampler
    from draftsmith.data.target_model import LoadedTarget


@dataclass
class _Thread:
    """A conversation while it is being written."""

    prompt: Prompt
    first_ids: list[int]
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish: list[Literal["stop", "length"]] = field(default_factory=list)
    logprob: float = 0.0


def synthesize(config: RunConfig, split: Split, *, batch_size: int | None = None, dtype: str | None = None) -> Path:
    """Write `config.conversations(split)` and, beside it, a summary; returns the jsonl's path.

    Args:
        batch_size: conversations answered at once; none: `synthesize.batch_size`.
        dtype: the target's dtype; none: `target.dtype` for training, `synthesize.heldout_dtype` for held-out.

    Raises:
        DraftsmithError: no target, no usable prompts, or the file there was made with other settings, another target or
            other prompts.
    """
    target = read_target(config.target.path)
    dtype = split_dtype(config, split, target) if dtype is None else dtype
    path, summary_path = config.conversations(split), summary_file(config, split)
    prompts = select_prompts(config, split)
    settings = {
        "target": target_mark(target),
        "dtype": dtype,
        **config.synthesize.model_dump(exclude={"batch_size", "heldout_dtype", "max_prompt_tokens"}),
    }
    _refuse_other_settings(path, summary_path, settings)
    digest = prompts_hash(prompts)
    if path.is_file():
        summary = read_json(summary_path, what="the summary of the conversations")
        if summary["complete"] and summary["prompts"] == digest:
            closing(f"nothing: {path} is complete already ({summary['conversations']:,} conversations)")
            return path

    from draftsmith.data.decode import Sampler

    chat = ChatFormat(load_tokenizer(config.target), configured_stop_ids(config.target.path))
    threads, rejected = _open_threads(
        prompts, chat, min(config.synthesize.max_prompt_tokens, target.context_length - 1)
    )
    if not threads:
        raise DraftsmithError("no prompt is usable", where=f"prompts.{split}", found=dict(rejected))
    plan = plan_batches(threads, batch_size or config.synthesize.batch_size)
    write_json(summary_path, {"settings": settings, "prompts": digest, "complete": False})
    sampler = Sampler(config.synthesize.temperature, config.synthesize.top_p)
    with ConversationLog(path) as log:
        _refuse_other_prompts(log.recorded, threads, path)
        left = [batch for batch in plan if any(thread.prompt.id not in log.recorded for thread in batch)]
        if left:
            console.print(
                f"{config.target.path.name} answers {sum(map(len, left)):,} of {len(threads):,} {split} prompts "
                f"in {dtype}, {max(map(len, left))} at once"
            )
            loaded = load_target(config.target, dtype)
            answerer = _Answerer(loaded, chat, sampler, config, target.context_length, settings["target"])
            _run(answerer, left, log, len(threads))
        conversations = [log.recorded[thread.prompt.id] for thread in threads]
    write_conversations(path, conversations)
    facts = _facts(conversations, rejected)
    write_json(
        summary_path,
        {"settings": settings, "prompts": digest, "complete": True, **facts, "tool_version": __version__},
    )
    if facts["cut"]:
        warn(f"{facts['cut']:,} turns reached max_new_tokens and were cut; their end-of-turn token is never supervised")
    if rejected:
        warn("prompts rejected: " + ", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items())))
    closing(
        f"{path}: {len(conversations):,} conversations, {facts['generated_tokens']:,} generated tokens, "
        f"mean log-probability {facts['mean_logprob']:.3f}",
        None if split == "heldout" else "draftsmith vocab CONFIG, draftsmith harvest CONFIG",
    )
    return path


def summary_file(config: RunConfig, split: Split) -> Path:
    """Settings, completeness and counts of a split's conversations."""
    return config.conversations(split).with_suffix(".summary.json")


def finished_conversations(config: RunConfig, split: Split) -> list[Conversation]:
    """Every conversation of a split, checked to be complete and to come from the configured target.

    Raises:
        DraftsmithError: missing or unfinished file, or another target.
    """
    path, summary_path = config.conversations(split), summary_file(config, split)
    mend = "draftsmith synthesize CONFIG"
    if not path.is_file():
        raise DraftsmithError(f"the {split} conversations are missing", where=path, mend=mend)
    if summary_path.is_file() and not read_json(summary_path, what="the summary")["complete"]:
        raise DraftsmithError(f"the {split} conversations are unfinished", where=path, mend=mend)
    conversations = list(read_conversations(path))
    if not conversations:
        raise DraftsmithError(f"the {split} conversations are empty", where=path, mend=f"rm {path}; {mend}")
    mark = target_mark(read_target(config.target.path))
    for conversation in conversations:
        if conversation.target != mark:
            raise DraftsmithError(
                f"conversation {conversation.id} was written by another target",
                where=path,
                found=conversation.target,
                expected=f"{mark} (the fingerprint of {config.target.path})",
                mend=f"point target.path at that target, or: rm {path} {summary_path}; {mend}",
            )
    return conversations


def select_prompts(config: RunConfig, split: Split) -> list[Prompt]:
    """The split's prompts; those of training that also stand in held-out are dropped."""
    heldout = load_prompts(config.prompts.heldout, config.prompts.heldout_limit)
    if split == "heldout":
        return heldout
    return drop_overlap(load_prompts(config.prompts.train, config.prompts.train_limit), heldout)


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the prompts' content and order."""
    return sha256_json([prompt.model_dump() for prompt in prompts])


def plan_batches(threads: Sequence[_Thread], batch_size: int) -> list[list[_Thread]]:
    """Batches of conversations with equally many turns and prompts of about equal length, longest first."""
    order = sorted(threads, key=lambda one: (-len(one.prompt.turns), -len(one.first_ids), one.prompt.id))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


@dataclass(frozen=True)
class _Answerer:
    target: LoadedTarget
    chat: ChatFormat
    sampler: Sampler
    config: RunConfig
    context_length: int
    mark: str

    def answer(self, batch: Sequence[_Thread]) -> list[Conversation]:
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

    def _ask(self, thread: _Thread, turn: int) -> bool:
        """Put the next user turn; False when there is none, or when its prompt would be too long."""
        if turn != len(thread.spans) or turn >= len(thread.prompt.turns):
            return False
        question = {"role": "user", "content": thread.prompt.turns[turn]}
        if turn == 0:
            thread.messages = [*_system(thread.prompt), question]
            thread.ids = list(thread.first_ids)
            return True
        ids = self.chat.next_prompt_ids(thread.ids, [*thread.messages, question])
        if len(ids) > min(self.config.synthesize.max_prompt_tokens, self.context_length - 1):
            return False
        thread.messages.append(question)
        thread.ids = ids
        return True

    def _close(self, thread: _Thread) -> Conversation:
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


def _run(answerer: _Answerer, batches: Sequence[Sequence[_Thread]], log: ConversationLog, total: int) -> None:
    started, tokens = time.monotonic(), 0
    with meter("synthesize", total, "conversations", done=total - sum(map(len, batches))) as progress:
        for batch in batches:
            finished = answerer.answer(batch)
            log.append(finished)
            tokens += sum(conversation.generated_tokens for conversation in finished)
            rate = tokens / (time.monotonic() - started)
            progress.advance(len(batch), note=f"{rate:,.0f} tokens/s")


def _open_threads(prompts: Sequence[Prompt], chat: ChatFormat, longest: int) -> tuple[list[_Thread], Counter[str]]:
    """Prompts rendered to ids; those over `longest` tokens are left out and counted."""
    threads, rejected = [], Counter[str]()
    for prompt in prompts:
        ids = chat.prompt_ids([*_system(prompt), {"role": "user", "content": prompt.turns[0]}])
        if len(ids) > longest:
            rejected[f"longer than {longest} tokens"] += 1
        else:
            threads.append(_Thread(prompt, ids))
    return threads, rejected


def _system(prompt: Prompt) -> list[dict[str, str]]:
    return [] if prompt.system is None else [{"role": "system", "content": prompt.system}]


def _seed(seed: int, conversation: str, turn: int) -> int:
    """Seed of one turn's random numbers, whichever batch it is answered in."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{conversation}\n{turn}".encode()).digest()[:8], "big") >> 1


def _refuse_other_settings(path: Path, summary_path: Path, settings: dict[str, Any]) -> None:
    if not path.is_file():
        return
    found = read_json(
        summary_path, what="the summary of the conversations", mend=f"rm {path}, or put its summary back"
    )["settings"]
    for key, value in settings.items():
        if found.get(key) != value:
            raise DraftsmithError(
                f"the conversations there were made with another {key}",
                where=path,
                found=found.get(key),
                expected=value,
                mend=f"give the run another name, or: rm {path} {summary_path}",
            )


def _refuse_other_prompts(recorded: dict[str, Conversation], threads: Sequence[_Thread], path: Path) -> None:
    """A recorded conversation must have been asked what the prompt of its id asks today."""
    for thread in threads:
        conversation = recorded.get(thread.prompt.id)
        if conversation is None:
            continue
        asked = tuple(message.content for message in conversation.messages if message.role == "user")
        if asked != thread.prompt.turns[: len(asked)] or conversation.input_ids[: len(thread.first_ids)] != tuple(
            thread.first_ids
        ):
            raise DraftsmithError(
                f"conversation {conversation.id} was asked something else than the prompt of that id asks now",
                where=path,
                found=asked[0][:80] if asked else None,
                expected=thread.prompt.turns[0][:80],
                mend=f"rm {path}; draftsmith synthesize CONFIG",
            )


def _facts(conversations: Sequence[Conversation], rejected: Counter[str]) -> dict[str, Any]:
    tokens = sum(conversation.generated_tokens for conversation in conversations)
    return {
        "conversations": len(conversations),
        "turns": sum(len(one.spans) for one in conversations),
        "tokens": sum(len(one.input_ids) for one in conversations),
        "generated_tokens": tokens,
        "mean_logprob": sum(one.mean_logprob * one.generated_tokens for one in conversations) / tokens,
        "cut": sum(one.finish.count("length") for one in conversations),
        "rejected": dict(rejected),
    }
