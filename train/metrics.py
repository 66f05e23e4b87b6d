"""metrics.jsonl: one JSON object a line, the truth about a run's curves; trackers are fed from the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import atomic_file

CLOCKED = ("tokens_per_second", "waiting", "mfu", "peak_memory", "seconds")
"""Fields that depend on the clock and the machine; all others are the same for the same run."""


def append_metrics(file: Path, row: dict[str, Any]) -> None:
    """Add one line."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")
    except OSError as error:
        raise DraftsmithError(
            f"the metrics cannot be written: {error.strerror}", where=file,
            mend="free some space; the same command goes on from the last checkpoint",
        ) from None  # fmt: skip


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """All whole lines up to the first that is no row."""
    if not file.is_file():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows


def truncate_metrics(file: Path, step: int) -> None:
    """Forget rows after `step`, which a resumed run will write again."""
    if file.is_file():
        kept = [row for row in read_metrics(file) if row["step"] <= step]
        with atomic_file(file) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
