"""Prompts: what the target is asked. The built-in sets, users' files, and the wall between training and held-out.

Everything streams: of a row that is read nothing stays in memory but eight bytes of its hash. A bad row is skipped,
counted by reason and listed (`data/rejects.py`); it stops a run only when `prompts.strict` says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from draftsmith.configs.console import warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig, Split
from draftsmith.data.ids import answer_id, bases, is_given
from draftsmith.data.prompt_files import read_rows, source_name
from draftsmith.data.prompt_rows import BadRowError, Prompt, read_row
from draftsmith.data.rejects import Rejects


@dataclass(frozen=True)
class Entry:
    """A prompt and the line or row that it stands on."""

    line: int
    prompt: Prompt


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """Every prompt of a source in memory, for small sets; `stream_prompts` says what is read and refused."""
    rejects = Rejects(source)
    prompts = [entry.prompt for entry in stream_prompts(source, rejects, limit)]
    rejects.report()
    return prompts


def stream_prompts(source: str, rejects: Rejects, limit: int | None = None) -> Iterator[Entry]:
    """Prompts of a source in its order; a repeated question, a repeated id or a bad row is skipped and counted.

    Args:
        source: `builtin:train`, `builtin:heldout`, a file or folder, or `hf:NAME[#SUBSET][:SPLIT]`.
        rejects: takes what is left out.
        limit: keep this many, at even distances through the file, so that their mix is the file's. The source is then
            read twice.

    Raises:
        DraftsmithError: no such source, no usable row in it, or a bad row where `rejects` is strict.
    """
    if limit is None:
        yield from _usable(source, rejects)
        return
    count = sum(1 for _ in _usable(source, rejects))
    wanted = {index * count // limit for index in range(limit)} if limit < count else range(count)
    for index, entry in enumerate(_usable(source, Rejects(source))):
        if index in wanted:
            yield entry


def select_prompts(config: RunConfig, split: Split, rejects: Rejects | None = None) -> Iterator[Entry]:
    """The split's prompts, one at a time; those of training that also stand in held-out are dropped and counted.

    A training prompt comes `synthesize.answers` times, each time under an id of its own.

    Args:
        rejects: takes what is left out; none: the file's bad rows are counted and forgotten.

    Raises:
        DraftsmithError: as `stream_prompts`, or a row's id is the name that another row's further answer or part gets.
    """
    section = config.prompts
    source, limit = (
        (section.heldout, section.heldout_limit) if split == "heldout" else (section.train, section.train_limit)
    )
    rejects = Rejects(source, strict=section.strict) if rejects is None else rejects
    names = _Names(source, limit, 1 if split == "heldout" else config.synthesize.answers)
    if split == "heldout":
        yield from names.watch(stream_prompts(source, rejects, limit))
        return
    heldout = stream_prompts(section.heldout, Rejects(section.heldout), section.heldout_limit)
    held = openings(entry.prompt for entry in heldout)
    dropped = 0
    for entry in names.watch(stream_prompts(source, rejects, limit)):
        if overlaps(entry.prompt, held):
            dropped += 1
        else:
            yield entry
            for number in range(2, config.synthesize.answers + 1):
                again = entry.prompt.model_copy(update={"id": answer_id(entry.prompt.id, number)})
                yield Entry(entry.line, again)
    if dropped:
        warn(f"{dropped:,} training prompts also stand in the held-out set and were dropped")


class _Names:
    """Refuses ids such as `x~2` or `q#2` where `x` is asked twice or `q` has two turns.

    Such an id says by its form whose name it may take, so only those are remembered; the source is read again if any are.
    """

    def __init__(self, source: str, limit: int | None, answers: int) -> None:
        self._source, self._limit, self._answers = source, limit, answers
        self._claims: dict[str, list[tuple[str, int]]] = {}
        """Id that stands before the ending -> ids with endings, and their rows."""

    def watch(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Pass the entries on.

        Raises:
            DraftsmithError: at the end, if two rows' conversations would have one id.
        """
        for entry in entries:
            for base in bases(entry.prompt.id):
                self._claims.setdefault(base, []).append((entry.prompt.id, entry.line))
            yield entry
        if not self._claims:
            return
        for entry in stream_prompts(self._source, Rejects(self._source), self._limit):
            for name, line in self._claims.get(entry.prompt.id, ()):
                if is_given(name, entry.prompt.id, answers=self._answers, parts=len(entry.prompt.turns)):
                    raise DraftsmithError(
                        "two rows' conversations would have the same id",
                        where=self._source,
                        found=f"row {line} has the id {name}, which a further answer or part of row {entry.line}, "
                        f"{entry.prompt.id}, is named",
                        mend="give one of the rows another id",
                    )


def openings(heldout: Iterable[Prompt]) -> set[int]:
    """Marks of the questions that open held-out conversations."""
    return {_mark(prompt.key[0]) for prompt in heldout}


def overlaps(prompt: Prompt, held: Collection[int]) -> bool:
    """Whether any user turn of `prompt` opens a held-out conversation."""
    return any(_mark(key) in held for key in prompt.key)


def _usable(source: str, rejects: Rejects) -> Iterator[Entry]:
    stem = source_name(source)
    ids: set[int] = set()
    questions: set[int] = set()
    for row in read_rows(source):
        rejects.rows += 1
        try:
            if row.fault is not None:
                raise BadRowError(row.fault)
            prompt = read_row(row.value, f"{stem}-{row.number:06d}")
        except BadRowError as reason:
            rejects.add(row.number, str(reason))
            continue
        identity, question = _mark(prompt.id), _question(prompt)
        if identity in ids or question in questions:
            reason_ = "repeated id" if identity in ids else "repeated question"
            rejects.add(row.number, reason_, prompt.id, repeated=True)
            continue
        ids.add(identity)
        questions.add(question)
        yield Entry(row.number, prompt)
    if not ids:
        raise DraftsmithError(
            "the file holds no usable prompt", where=source, found=rejects.counts() or "an empty file"
        )


def _question(prompt: Prompt) -> int:
    """Mark of everything that the target is asked; equal up to case and punctuation of what the user says."""
    given = [None if isinstance(turn, str) else turn[1:] for turn in prompt.turns]
    rest = [prompt.system, prompt.tools, given] if prompt.tools or any(given) else [prompt.system]
    return _mark(json.dumps([*prompt.key, *rest], sort_keys=True))


def _mark(text: str) -> int:
    """64 bits of a hash: two of a million prompts share one with a chance of one in thirty million."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
