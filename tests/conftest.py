"""What all rooms' tests share: the real small target, made when it is missing."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def target_folder() -> Path:
    """SmolLM2-135M-Instruct: $DRAFTSMITH_TARGET, or .cache/smollm2-135m, made by the first process that misses it."""
    folder = Path(os.environ.get("DRAFTSMITH_TARGET", REPOSITORY / ".cache" / "smollm2-135m"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").is_file():
            maker = REPOSITORY / "scripts" / "make_smollm2.py"
            subprocess.run([sys.executable, str(maker), str(folder)], check=True)
    return folder
