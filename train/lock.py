"""One run a folder: a lock that the operating system takes back when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftsmith.configs.errors import DraftsmithError

PATIENCE = 10.0
"""Seconds to wait for a holder that is just dying: a killed launch leaves processes for a moment."""


@contextmanager
def run_lock(folder: Path, *, patience: float | None = None) -> Iterator[None]:
    """Hold `folder/run.lock` while a run writes there.

    Raises:
        DraftsmithError: another living process holds it; its host and process id are named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.lock"
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + (PATIENCE if patience is None else patience)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
                    raise DraftsmithError(
                        "another run writes into this folder",
                        where=folder,
                        found=holder or "a locked run.lock",
                        expected="one run a folder",
                        mend="wait for it or end it; or give this run another `name`",
                    ) from None
                time.sleep(0.2)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)
