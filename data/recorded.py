"""What a conversations file holds, against what its summary says and what the prompts ask today."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.data.conversations import Conversation, read_conversations


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
