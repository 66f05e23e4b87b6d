"""Names in a training folder, for those who list checkpoints without reading them."""

from __future__ import annotations

from pathlib import Path

PREFIX = "checkpoint-"
DESCRIPTION = "trainer.json"


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. A folder without its final name was never finished and is not listed."""
    return sorted(p for p in folder.glob(f"{PREFIX}[0-9]*") if (p / DESCRIPTION).is_file())
