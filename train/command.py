"""A training run as a command: what it says, and with which exit code, when something else than its last step ends it."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from draftsmith.configs.schema import RunConfig
from draftsmith.train.folders import checkpoints

SIGNAL_AT_PARENTS_DEATH = 1
"""PR_SET_PDEATHSIG."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as shells count it."""

GRACE_SECONDS = 10.0
"""A process that is interrupted in a collective, which returns to Python when its peers do, is waited for so long."""

PEER_LOST = (
    "this process ends because another process of the run has died, or its launcher; its error, if it wrote one, stands further up, "
    "and a process that was killed leaves none (out of memory?). The same command goes on from the last checkpoint."
)


def run(config: RunConfig, *, launched: bool) -> None:
    """Train; on Ctrl-C say what stands and leave with exit code 130, when another process has died say so.

    Args:
        launched: a launcher may have started this process, which then answers its SIGTERM too.

    Raises:
        DraftsmithError: as `train`.
    """
    signals = Signals(config.training, launched=launched)
    try:
        from draftsmith.train.trainer import train

        train(config)
    except BaseException as error:
        if signals.interrupted:  # a peer that left first makes a collective fail: that is no fault of its own
            signals.leave()
        if launched and is_peer_lost(error):
            end(f"{error}\n{PEER_LOST}", status=1)
        raise


class Signals:
    """Answers to SIGINT and SIGTERM.

    SIGINT is a KeyboardInterrupt, once: what is half written is cleared away, a second Ctrl-C does not disturb that. A
    thread watches both, since the main one may sit in a collective that never returns to Python. Linux sends SIGTERM
    when a launcher is killed, whose processes would else train on and hold their devices.
    """

    def __init__(self, folder: Path, *, launched: bool) -> None:
        self.folder, self.interrupted, self._said = folder, False, threading.Lock()
        self._reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, self._interrupt)
        if launched:
            if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
                ctypes.CDLL(None).prctl(SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=self._watch, daemon=True).start()

    def _interrupt(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.interrupted = True
        raise KeyboardInterrupt

    def _watch(self) -> None:
        deadline: float | None = None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._reading], [], [], left)
            received = os.read(self._reading, 64) if ready else b""
            if signal.SIGINT in received and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is None and signal.SIGTERM in received:
                end(f"SIGTERM: {PEER_LOST}")
            if deadline is not None and (not ready or signal.SIGTERM in received):
                self._say()
                os._exit(INTERRUPTED)

    def leave(self) -> NoReturn:
        """Say what stands, and end: at once where other processes are, whose collectives would be waited for."""
        self._say()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            os._exit(INTERRUPTED)
        sys.exit(INTERRUPTED)

    def _say(self) -> None:
        """One line, once, by the first process."""
        if not self._said.acquire(blocking=False) or os.environ.get("RANK", "0") != "0":
            return
        found = checkpoints(self.folder)
        stands = f"{found[-1]} stands, and the same command goes on from it" if found else (
            f"there is no checkpoint in {self.folder} yet, and the same command starts from the beginning"
        )  # fmt: skip
        sys.stderr.write(f"interrupted: {stands}\n")
        sys.stderr.flush()


def is_peer_lost(error: BaseException) -> bool:
    """Whether a collective failed because its other end is gone."""
    if not isinstance(error, RuntimeError):
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error).lower()


def end(message: str, status: int = 143) -> NoReturn:
    """Write a line and leave without waiting for threads or collectives."""
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"error process {rank}: {message}\n")
    sys.stderr.flush()
    os._exit(status)
