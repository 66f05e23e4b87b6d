"""Rows and prompts that a run leaves out: counted by reason, kept with line number and reason, never a silent loss."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import IO

from draftsmith.configs.console import warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import atomic_file

IN_MEMORY = 1 << 20
"""Bytes of rejects that wait in memory before they go to a temporary file."""


class Rejects:
    """What was left out of one source.

    Args:
        source: the prompts' source, for messages.
        strict: the first bad row stops the run.
    """

    def __init__(self, source: str, *, strict: bool = False) -> None:
        self.source, self._strict = source, strict
        self.reasons: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()
        """Rows that say what another row says already: left out, but no fault of the file."""
        self.rows = 0
        """Rows looked at, good and bad."""
        self._lines: IO[str] = tempfile.SpooledTemporaryFile(IN_MEMORY, "w+", encoding="utf-8")  # noqa: SIM115

    def add(self, line: int, reason: str, identity: str | None = None, *, repeated: bool = False) -> None:
        """Leave out the row on `line`.

        Raises:
            DraftsmithError: `strict`, and the row is bad rather than repeated.
        """
        (self.repeated if repeated else self.reasons)[reason] += 1
        entry = {"line": line, "reason": reason} | ({} if identity is None else {"id": identity})
        self._lines.write(json.dumps(entry, ensure_ascii=False) + "\n")
        if self._strict and not repeated:
            raise DraftsmithError(
                "a row is no usable prompt",
                where=f"{self.source}, line {line}",
                found=reason,
                mend="mend the row, or set prompts.strict=false to skip and count such rows",
            )

    def __len__(self) -> int:
        return self.reasons.total()

    def counts(self) -> dict[str, int]:
        """Rows left out by reason, the most frequent first."""
        return dict((self.reasons + self.repeated).most_common())

    def summary(self) -> str:
        """One line: how many of how many, and why."""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.counts().items()))
        return f"{sum(self.counts().values()):,} of {self.rows:,} rows of {self.source} skipped: {reasons}"

    def report(self) -> None:
        """Warn if anything was left out."""
        if self.counts():
            warn(self.summary())

    def refuse_too_many(self, share: float, file: Path) -> None:
        """Stop when more than `share` of the rows are bad.

        Raises:
            DraftsmithError: with the counts; `file` then lists the rows.
        """
        if len(self) > share * self.rows:
            self.write(file)
            raise DraftsmithError(
                f"{len(self) / self.rows:.0%} of the prompts are unusable",
                where=self.source,
                found=self.summary(),
                expected=f"at most {share:.0%} (prompts.max_rejected)",
                mend=f"look at {file}; raise prompts.max_rejected if these rows may go",
            )

    def write(self, file: Path) -> None:
        """Write `file`, one JSON line a row left out, or remove an earlier one if nothing was."""
        if not self.counts():
            file.unlink(missing_ok=True)
            return
        self._lines.seek(0)
        with atomic_file(file) as temporary, temporary.open("w", encoding="utf-8") as handle:
            shutil.copyfileobj(self._lines, handle)
        self._lines.seek(0, 2)
