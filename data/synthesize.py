"""The target answers every user turn of every prompt: prompts -> conversations, one jsonl file a split.

Prompts stream through temporary files: chosen, then checked against the chat template, then asked; none of them all is
ever in memory. What is asked in which batch is a function of prompts and configuration alone. Finished conversations are
appended to the file; a killed run goes on with the unfinished ones, and the finished file, put into the order of the
prompts, has the same bytes as an unbroken run's, as far as whoever answers gives the same answer twice.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from draftsmith import __version__
from draftsmith.configs.console import Meter, closing, console, meter, warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json, write_json
from draftsmith.configs.schema import RunConfig, Split, SynthesizeSection
from draftsmith.configs.target import Target, read_target
from draftsmith.data.answering import answers
from draftsmith.data.chat import ChatFormat, TemplateRefusalError
from draftsmith.data.conversations import Conversation, ConversationFile, ConversationLog, read_conversations
from draftsmith.data.prompt_rows import Prompt
from draftsmith.data.prompt_sets import Entry, select_prompts
from draftsmith.data.recorded import Tally, lay_aside, missing_from
from draftsmith.data.rejects import Rejects
from draftsmith.data.remote import answer_remotely, say_servers
from draftsmith.data.target_model import chat_format, split_dtype, target_mark
from draftsmith.data.threads import Thread

WINDOW = 4096
"""Prompts that are sorted by length together, and so held in memory at once."""

FREE = {"batch_size", "workers", "heldout_dtype", "max_prompt_tokens", "servers", "concurrency", "timeout", "retries",
        "patience", "api_key_env", "cut", "answers"}  # fmt: skip
"""Settings that may change between two runs into the same file: they change no answer that is there."""


def synthesize(config: RunConfig, split: Split, *, batch_size: int | None = None, dtype: str | None = None) -> Path:
    """Write `config.conversations(split)` and, beside it, a summary and what was left out; returns the jsonl's path.

    Args:
        batch_size: conversations answered at once; none: `synthesize.batch_size`.
        dtype: the target's dtype; none: `target.dtype` for training, `synthesize.heldout_dtype` for held-out.

    Raises:
        DraftsmithError: no target, no usable prompts or too many bad ones, the file there was made with other settings,
            another target or other prompts, or some prompts stayed unanswered.
    """
    target = read_target(config.target.path)
    dtype = split_dtype(config, split, target) if dtype is None else dtype
    path, summary_path = config.conversations(split), summary_file(config, split)
    rejects = Rejects(
        config.prompts.heldout if split == "heldout" else config.prompts.train, strict=config.prompts.strict
    )
    with _spool() as chosen, _spool() as usable:
        digest = digest_of(chosen.write(select_prompts(config, split, rejects)))[0]
        chat = chat_format(config)
        settings = {
            "target": target_mark(target),
            "dtype": dtype if config.synthesize.backend == "transformers" else "server",
            "template": chat.template_hash,
            **config.synthesize.model_dump(mode="json", exclude=FREE),
        }
        _refuse_other_settings(path, summary_path, dropped_file(config, split), settings)
        if path.is_file():
            summary, lost = read_json(summary_path, what="the summary of the conversations"), ""
            if (
                summary.get("complete")
                and summary.get("prompts") == digest
                and summary.get("cut_is", "keep") == config.synthesize.cut
                and not (lost := missing_from(path, summary))
            ):
                closing(f"nothing: {path} is complete already ({summary['conversations']:,} conversations)")
                return path
            if lost:
                warn(f"{path} is not what its summary counted ({lost}): what is missing is asked again")
        longest = min(config.synthesize.max_prompt_tokens, target.context_length - 1)
        total = sum(1 for _ in usable.write(_fitting(chosen, chat, longest, rejects)))
        if not total:
            raise DraftsmithError("no prompt is usable", where=f"prompts.{split}", found=rejects.counts())
        rejects.refuse_too_many(config.prompts.max_rejected, rejects_file(config, split))
        work = _Work(config, split, target, chat, dtype, usable, total, batch_size or config.synthesize.batch_size)
        _check_recorded(path, work)
        write_json(summary_path, {"settings": settings, "prompts": digest, "complete": False})
        rejects.write(rejects_file(config, split))
        with ConversationLog(path) as log:
            refused = work.answer_rest(log)
            _reject(refused, work, rejects, rejects_file(config, split))
            work.refuse_empty(log, path, refused)
            kept = [one.id for one in work.prompts() if one.id not in refused and not work.is_dropped(log, one.id)]
            fallen = lay_aside(log, kept, dropped_file(config, split))
            log.rewrite(kept)
        facts = work.facts(rejects, len(refused))
    write_json(
        summary_path,
        {
            "settings": settings, "prompts": digest, "complete": True, "cut_is": config.synthesize.cut, **facts,
            "tool_version": __version__,
        },
    )  # fmt: skip
    if fallen:
        aside = dropped_file(config, split)
        warn(
            f"{fallen:,} conversations that were there fall out under these settings and prompts; they lie in {aside}. "
            f"To have them back: cat {aside} >> {path}, then synthesize with settings that want them"
        )
    _say(config, split, facts, rejects)
    return path


def summary_file(config: RunConfig, split: Split) -> Path:
    """Settings, completeness and counts of a split's conversations."""
    return config.conversations(split).with_suffix(".summary.json")


def finished_conversations(
    config: RunConfig, split: Split, each: Callable[[Conversation], None] | None = None
) -> ConversationFile:
    """Every conversation of a split, checked to be complete and to come from the configured target.

    Args:
        each: called with every conversation as it is checked, so that one reading of the file is enough.

    Raises:
        DraftsmithError: missing, unfinished or shortened file, or another target.
    """
    path, summary_path = config.conversations(split), summary_file(config, split)
    mend = "draftsmith synthesize CONFIG"
    if not path.is_file():
        raise DraftsmithError(f"the {split} conversations are missing", where=path, mend=mend)
    summary = read_json(summary_path, what="the summary") if summary_path.is_file() else None
    if summary is not None and not summary.get("complete"):
        raise DraftsmithError(f"the {split} conversations are unfinished", where=path, mend=mend)
    mark, counts = target_mark(read_target(config.target.path)), Tally()

    def check(conversation: Conversation) -> None:
        counts.add(conversation)
        if conversation.target != mark:
            raise DraftsmithError(
                f"conversation {conversation.id} was written by another target",
                where=path,
                found=conversation.target,
                expected=f"{mark} (the fingerprint of {config.target.path})",
                mend=f"point target.path at that target, or: rm {path} {summary_path}; {mend}",
            )
        if each is not None:
            each(conversation)

    conversations = ConversationFile(path, check)
    if summary is not None and (lost := counts.differences(summary)):
        raise DraftsmithError(
            f"the {split} conversations are not those that were finished",
            where=path,
            found=lost,
            expected=f"what {summary_path.name} counted",
            mend=f"{mend} (asks what is missing again)",
        )
    if not len(conversations):
        raise DraftsmithError(f"the {split} conversations are empty", where=path, mend=f"rm {path}; {mend}")
    return conversations


def rejects_file(config: RunConfig, split: Split) -> Path:
    """Rows that were left out, with line number and reason."""
    return config.conversations(split).with_suffix(".rejects.jsonl")


def dropped_file(config: RunConfig, split: Split) -> Path:
    """Conversations that were answered and that settings or prompts no longer want; no run deletes answers."""
    return config.conversations(split).with_suffix(".dropped.jsonl")


def digest_of(entries: Iterable[Entry]) -> tuple[str, int, int]:
    """SHA-256 of the prompts' content and order, and how many prompts and turns there are."""
    digest, count, turns = hashlib.sha256(), 0, 0
    for entry in entries:
        digest.update(entry.prompt.model_dump_json().encode() + b"\n")
        count += 1
        turns += len(entry.prompt.turns)
    return digest.hexdigest(), count, turns


def plan_batches(threads: Sequence[Thread], batch_size: int) -> list[list[Thread]]:
    """Batches of conversations with equally many turns and prompts of about equal length, longest first."""
    order = sorted(threads, key=lambda one: (-len(one.prompt.turns), -len(one.opening.ids), one.prompt.id))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


class _Spool:
    """Prompts with their line numbers in a temporary file."""

    def __init__(self, handle: IO[str]) -> None:
        self._handle = handle

    def write(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Write entries as they pass."""
        for entry in entries:
            self._handle.write(f"{entry.line}\t{entry.prompt.model_dump_json()}\n")
            yield entry

    def __iter__(self) -> Iterator[Entry]:
        """Read from the beginning; several readers do not disturb each other."""
        self._handle.flush()
        with Path(self._handle.name).open(encoding="utf-8", newline="\n") as reader:
            for text in reader:
                line, _, prompt = text.partition("\t")
                yield Entry(int(line), Prompt.model_validate_json(prompt))


@contextmanager
def _spool() -> Iterator[_Spool]:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="\n", prefix="draftsmith-") as handle:
        yield _Spool(handle)


def _fitting(entries: Iterable[Entry], chat: ChatFormat, longest: int, rejects: Rejects) -> Iterator[Entry]:
    """Prompts that the template renders and that are not over `longest` tokens."""
    for entry in entries:
        try:
            tokens = len(chat.prompt_ids(entry.prompt.opening(), entry.prompt.tools))
        except TemplateRefusalError as reason:
            rejects.add(entry.line, f"refused by the chat template: {reason}", entry.prompt.id)
            continue
        if tokens > longest:
            rejects.add(entry.line, f"longer than {longest} tokens", entry.prompt.id)
        else:
            yield entry


@dataclass(frozen=True)
class _Work:
    """One split's prompts and how they are answered."""

    config: RunConfig
    split: Split
    target: Target
    chat: ChatFormat
    dtype: str
    usable: _Spool
    total: int
    batch_size: int

    def prompts(self) -> Iterator[Prompt]:
        """Every usable prompt in order."""
        return (entry.prompt for entry in self.usable)

    def answer_rest(self, log: ConversationLog) -> dict[str, str]:
        """Answer what is not recorded yet.

        Returns:
            Prompts that a server refuses for good, and why.

        Raises:
            DraftsmithError: servers left some prompts unanswered; the rest is recorded.
        """
        left = sum(prompt.id not in log.recorded for prompt in self.prompts())
        if not left:
            return {}
        remote = self.config.synthesize.backend == "openai"
        with meter("synthesize", self.total, "conversations", done=self.total - left) as progress:
            pace = _Pace(log, progress)
            if not remote:
                console.print(
                    f"{self.config.target.path.name} answers {left:,} of {self.total:,} {self.split} prompts "
                    f"in {self.dtype}, {min(self.batch_size, left)} at once"
                )
                for finished in answers(self.config, self.dtype, self._batches(log)):
                    pace.deliver(finished)
                return {}
            say_servers(self.config, left, self.total, self.split)
            rest = (self._open(prompt) for prompt in self.prompts() if prompt.id not in log.recorded)
            unanswered = answer_remotely(
                self.config,
                self.chat,
                self.target,
                target_mark(self.target),
                rest,
                pace.deliver,
                begun=bool(log.recorded),
            )
        if unanswered:
            raise DraftsmithError(
                f"{unanswered.total():,} of {left:,} prompts stayed unanswered; the others are kept",
                where=", ".join(self.config.synthesize.servers),
                found="; ".join(f"{count:,} {reason}" for reason, count in unanswered.most_common(5))
                + "".join(f"; {prompt} {reason}" for prompt, reason in list(unanswered.refused.items())[:3]),
                mend="run the same command again: it asks only these",
            )
        return unanswered.refused

    def is_dropped(self, log: ConversationLog, prompt: str) -> bool:
        """Whether `synthesize.cut` leaves the conversation out."""
        return self.config.synthesize.cut == "drop" and any("length" in part.finish for part in log.read(prompt))

    def refuse_empty(self, log: ConversationLog, path: Path, refused: Collection[str] = ()) -> None:
        """Stop where everything is answered and nothing of it would be left in the file.

        Raises:
            DraftsmithError: `synthesize.cut` leaves every conversation out.
        """
        asked = (prompt.id for prompt in self.prompts() if prompt.id not in refused)
        if all(prompt in log.recorded and self.is_dropped(log, prompt) for prompt in asked):
            raise DraftsmithError(
                "every conversation has a turn that was cut, and synthesize.cut=drop leaves none; the file stays as it is",
                where=path,
                mend="synthesize.cut=keep, or a larger synthesize.max_new_tokens and another name",
            )

    def facts(self, rejects: Rejects, refused: int) -> dict[str, Any]:
        """Counts of the finished file, for the summary."""
        tally = Tally()
        finish: Counter[str] = Counter()
        logprob, known = 0.0, 0
        for one in read_conversations(self.config.conversations(self.split)):
            tally.add(one)
            finish.update(one.finish)
            if one.mean_logprob is not None:
                logprob += one.mean_logprob * one.generated_tokens
                known += one.generated_tokens
        counts = tally.counts()
        kept = [prompt for prompt in self.prompts() if prompt.id in tally.prompts]
        return {
            **counts,
            "mean_logprob": logprob / known if known else None,
            "finish": dict(finish),
            "cut": finish["length"],
            "dropped": self.total - refused - len(tally.prompts),
            "turns_not_asked": sum(len(prompt.turns) for prompt in kept) - counts["turns"],
            "rejected": rejects.counts(),
        }

    def _batches(self, log: ConversationLog) -> Iterator[list[Thread]]:
        prompts = self.prompts()
        while window := [self._open(prompt) for prompt in itertools.islice(prompts, WINDOW)]:
            for batch in plan_batches(window, self.batch_size):
                if any(thread.prompt.id not in log.recorded for thread in batch):
                    yield batch

    def _open(self, prompt: Prompt) -> Thread:
        return Thread(prompt, self.chat.render(prompt.opening(), prompt.tools))


class _Pace:
    """Records finished conversations and says how fast they come."""

    def __init__(self, log: ConversationLog, progress: Meter) -> None:
        self._log, self._progress = log, progress
        self._started, self._tokens = time.monotonic(), 0

    def deliver(self, finished: list[Conversation]) -> None:
        before = len(self._log.recorded)
        self._log.append(finished)
        self._tokens += sum(conversation.generated_tokens for conversation in finished)
        rate = self._tokens / (time.monotonic() - self._started)
        self._progress.advance(len(self._log.recorded) - before, note=f"{rate:,.0f} tokens/s")


def _say(config: RunConfig, split: Split, facts: dict[str, Any], rejects: Rejects) -> None:
    if facts["cut"]:
        warn(f"{facts['cut']:,} turns reached max_new_tokens and were cut; their end-of-turn token is never supervised")
    if facts["dropped"]:
        warn(f"{facts['dropped']:,} conversations with a cut turn were dropped (synthesize.cut)")
    if facts["turns_not_asked"]:
        warn(f"{facts['turns_not_asked']:,} later turns were not asked: their prompts had grown too long")
    if rejects.counts():
        rejects.report()
        warn(f"which rows and why: {rejects_file(config, split)}")
    mean = "" if facts["mean_logprob"] is None else f", mean log-probability {facts['mean_logprob']:.3f}"
    closing(
        f"{config.conversations(split)}: {facts['conversations']:,} conversations, "
        f"{facts['generated_tokens']:,} generated tokens{mean}",
        None if split == "heldout" else "draftsmith vocab CONFIG, draftsmith harvest CONFIG",
    )


def _check_recorded(path: Path, work: _Work) -> None:
    """What is recorded must have been asked what the prompt of its id asks today, and some of it must stay."""
    if not path.is_file():
        return
    with ConversationLog(path) as log:
        for prompt in work.prompts():
            if prompt.id in log.recorded:
                _refuse_other_prompt(log.read(prompt.id)[0], prompt, work.chat, path)
        work.refuse_empty(log, path)


def _reject(refused: Mapping[str, str], work: _Work, rejects: Rejects, file: Path) -> None:
    """List the prompts that a server refuses.

    Raises:
        DraftsmithError: they are all prompts, or with the bad rows too many.
    """
    if not refused:
        return
    if len(refused) == work.total:
        raise DraftsmithError(
            "the servers refuse every prompt",
            where=", ".join(work.config.synthesize.servers),
            found=dict(Counter(refused.values()).most_common(3)),
            mend="look at the servers' logs; synthesize.token_ids=false for a server that refuses the field",
        )
    lines: set[int] = set()
    for entry in work.usable:
        if entry.prompt.id in refused:
            again = entry.line in lines  # of a row that is asked several times the first copy is the fault
            rejects.add(entry.line, refused[entry.prompt.id], entry.prompt.id, repeated=again)
            lines.add(entry.line)
    rejects.refuse_too_many(work.config.prompts.max_rejected, file)
    rejects.write(file)


def _refuse_other_settings(path: Path, summary_path: Path, aside: Path, settings: dict[str, Any]) -> None:
    if not path.is_file():
        return
    files = " ".join(str(file) for file in (path, summary_path, aside) if file.is_file())
    found = read_json(
        summary_path, what="the summary of the conversations", mend=f"rm {path}, or put its summary back"
    ).get("settings")
    found = found if isinstance(found, dict) else {}
    known = {name: field.default for name, field in SynthesizeSection.model_fields.items()}
    for key, value in settings.items():
        then = found.get(key, known.get(key, value if key == "template" else None))  # older versions wrote fewer
        if then != value:
            raise DraftsmithError(
                f"the conversations there were made with another {key}",
                where=path,
                found=then,
                expected=value,
                mend=f"give the run another name, or: rm {files}",
            )


def _refuse_other_prompt(conversation: Conversation, prompt: Prompt, chat: ChatFormat, path: Path) -> None:
    asked = tuple(message.content for message in conversation.messages if message.role == "user")
    first = chat.prompt_ids(prompt.opening(), prompt.tools)
    if asked != prompt.questions[: len(asked)] or list(conversation.input_ids[: len(first)]) != first:
        raise DraftsmithError(
            f"conversation {conversation.id} was asked something else than the prompt of that id asks now",
            where=path,
            found=asked[0][:80] if asked else None,
            expected=prompt.questions[0][:80],
            mend=f"rm {path}; draftsmith synthesize CONFIG",
        )
