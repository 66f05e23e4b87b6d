"""The target answers every user turn of every prompt: prompts -> conversations, one jsonl file a split.

The plan of batches is a function of prompts and configuration alone. A batch is appended to the file when it is
finished; a killed run goes on with the unfinished batches, and the finished file, put into the order of the prompts,
has the same bytes as an unbroken run's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftsmith import __version__
from draftsmith.configs.console import closing, console, meter, warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json, sha256_json, write_json
from draftsmith.configs.schema import RunConfig, Split
from draftsmith.configs.target import read_target
from draftsmith.data.answering import Thread, answers, system_message
from draftsmith.data.chat import ChatFormat
from draftsmith.data.conversations import (
    Conversation,
    ConversationLog,
    read_conversations,
    write_conversations,
)
from draftsmith.data.prompt_sets import Prompt, drop_overlap, load_prompts
from draftsmith.data.target_model import configured_stop_ids, load_tokenizer, split_dtype, target_mark


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
        **config.synthesize.model_dump(exclude={"batch_size", "workers", "heldout_dtype", "max_prompt_tokens"}),
    }
    _refuse_other_settings(path, summary_path, settings)
    digest = prompts_hash(prompts)
    if path.is_file():
        summary = read_json(summary_path, what="the summary of the conversations")
        if summary.get("complete") and summary.get("prompts") == digest:
            closing(f"nothing: {path} is complete already ({summary['conversations']:,} conversations)")
            return path

    chat = ChatFormat(load_tokenizer(config.target), configured_stop_ids(config.target.path))
    threads, rejected = _open_threads(
        prompts, chat, min(config.synthesize.max_prompt_tokens, target.context_length - 1)
    )
    if not threads:
        raise DraftsmithError("no prompt is usable", where=f"prompts.{split}", found=dict(rejected))
    plan = plan_batches(threads, batch_size or config.synthesize.batch_size)
    write_json(summary_path, {"settings": settings, "prompts": digest, "complete": False})
    with ConversationLog(path) as log:
        _refuse_other_prompts(log.recorded, threads, path)
        left = [batch for batch in plan if any(thread.prompt.id not in log.recorded for thread in batch)]
        if left:
            console.print(
                f"{config.target.path.name} answers {sum(map(len, left)):,} of {len(threads):,} {split} prompts "
                f"in {dtype}, {max(map(len, left))} at once"
            )
            _run(answers(config, dtype, left), left, log, len(threads))
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
    if summary_path.is_file() and not read_json(summary_path, what="the summary").get("complete"):
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


def plan_batches(threads: Sequence[Thread], batch_size: int) -> list[list[Thread]]:
    """Batches of conversations with equally many turns and prompts of about equal length, longest first."""
    order = sorted(threads, key=lambda one: (-len(one.prompt.turns), -len(one.first_ids), one.prompt.id))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def _run(
    finished_batches: Iterator[list[Conversation]],
    batches: Sequence[Sequence[Thread]],
    log: ConversationLog,
    total: int,
) -> None:
    started, tokens = time.monotonic(), 0
    with meter("synthesize", total, "conversations", done=total - sum(map(len, batches))) as progress:
        for finished in finished_batches:
            log.append(finished)
            tokens += sum(conversation.generated_tokens for conversation in finished)
            rate = tokens / (time.monotonic() - started)
            progress.advance(len(finished), note=f"{rate:,.0f} tokens/s")


def _open_threads(prompts: Sequence[Prompt], chat: ChatFormat, longest: int) -> tuple[list[Thread], Counter[str]]:
    """Prompts rendered to ids; those over `longest` tokens are left out and counted."""
    threads, rejected = [], Counter[str]()
    for prompt in prompts:
        ids = chat.prompt_ids([*system_message(prompt), {"role": "user", "content": prompt.turns[0]}])
        if len(ids) > longest:
            rejected[f"longer than {longest} tokens"] += 1
        else:
            threads.append(Thread(prompt, ids))
    return threads, rejected


def _refuse_other_settings(path: Path, summary_path: Path, settings: dict[str, Any]) -> None:
    if not path.is_file():
        return
    found = read_json(
        summary_path, what="the summary of the conversations", mend=f"rm {path}, or put its summary back"
    ).get("settings")
    found = found if isinstance(found, dict) else {}
    for key, value in settings.items():
        if found.get(key) != value:
            raise DraftsmithError(
                f"the conversations there were made with another {key}",
                where=path,
                found=found.get(key),
                expected=value,
                mend=f"give the run another name, or: rm {path} {summary_path}",
            )


def _refuse_other_prompts(recorded: dict[str, Conversation], threads: Sequence[Thread], path: Path) -> None:
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
