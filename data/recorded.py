"""What a conversations file holds, against what its summary says and what the prompts ask today."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draftsmith.configs.files import atomic_file
from draftsmith.data.conversations import Conversation, ConversationLog, read_conversations


class Tally:
    """Counts of a file's conversations, under the names that its summary has for them."""

    def __init__(self) -> None:
        self.prompts: set[str] = set()
        self._counts: Counter[str] = Counter()

    def add(self, one: Conversation) -> None:
        """Count one sequence."""
        self.prompts.add(one.prompt_id)
        self._counts.update(
            sequences=1, turns=len(one.spans), tokens=len(one.input_ids), generated_tokens=one.generated_tokens
        )

    def counts(self) -> dict[str, int]:
        """Conversations, sequences, turns and tokens."""
        names = ("sequences", "turns", "tokens", "generated_tokens")
        return {"conversations": len(self.prompts), **{name: self._counts[name] for name in names}}

    def differences(self, summary: Mapping[str, Any]) -> str:
        """In words where the summary counted otherwise; empty if it did not. Older summaries hold fewer counts."""
        there = self.counts()
        return ", ".join(
            f"{count:,} {name.replace('_', ' ')} of {summary[name]}"
            for name, count in there.items()
            if name in summary and summary[name] != count
        )


def missing_from(path: Path, summary: Mapping[str, Any]) -> str:
    """In words how the whole lines of a file differ from what its summary counted; empty if they do not.

    Raises:
        DraftsmithError: as `read_conversations`.
    """
    if "conversations" not in summary:
        return "no counts"
    tally = Tally()
    for one in read_conversations(path):
        tally.add(one)
    return tally.differences(summary)


def lay_aside(log: ConversationLog, kept: Iterable[str], file: Path) -> int:
    """Put what is recorded and not kept into `file`, beside what lies there; what is kept again leaves it.

    The file holds each prompt once and none that the log keeps, so that it can be appended to the log's file.

    Returns:
        How many conversations were put there.
    """
    wanted = set(kept)
    fallen = [prompt for prompt in log.recorded if prompt not in wanted]
    if not fallen and not file.is_file():
        return 0
    with ConversationLog(file) as aside:
        stay = [prompt for prompt in aside.recorded if prompt not in log.recorded]
        with atomic_file(file) as temporary, temporary.open("wb") as handle:
            for prompt in stay:
                handle.write(aside.lines(prompt))
            for prompt in fallen:
                handle.write(log.lines(prompt))
    if not stay and not fallen:
        file.unlink()
    return len(fallen)
