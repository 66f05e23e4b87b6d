"""A program that is gone afterwards, with everything it started, however the caller ends.

The program runs in a session of its own with its output in a file. At the end its processes are asked to end, then
killed: those of its session, their descendants, and what they orphaned (on Linux orphans come to this process).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

GRACE_SECONDS = 10.0
"""Between asking processes to end and killing them."""

TAIL_LINES = 15


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` while the block runs; its output replaces `log`. Raises OSError where it does not start."""
    _adopt_orphans()
    before = set(_children(os.getpid()))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, _signals_end_the_block():
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=None if environment is None else dict(environment),
        )  # fmt: skip
        try:
            yield process
        finally:
            _end(process, before)


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """What a program said last, or that it said nothing."""
    said = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return "\n    ".join(said[-lines:]) if said else "it said nothing"


@contextlib.contextmanager
def _signals_end_the_block() -> Iterator[None]:
    """SIGTERM and SIGHUP become an ordinary exit, as Ctrl-C is one already; only the main thread may arrange that."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    kept = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            kept[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes], before: set[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        limit = time.monotonic() + GRACE_SECONDS
        asked: set[int] = set()
        while time.monotonic() < limit:
            process.poll()
            left = _members(process.pid, before)
            if not left:
                return
            for member in left - asked:  # those that appear meanwhile, too
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member, number)
            asked |= left
            time.sleep(0.05)


def _members(session: int, before: set[int]) -> set[int]:
    """Living processes of the session, orphans that came to this process, and the descendants of both."""
    table = _table()
    here = os.getpid()
    found = {pid for pid, (_, its_session, _) in table.items() if its_session == session}
    found |= {pid for pid, (parent, _, _) in table.items() if parent == here and pid not in before}
    while more := {pid for pid, (parent, _, _) in table.items() if parent in found} - found:
        found |= more
    for pid in [pid for pid in found if table[pid][2] == "Z"]:
        found.discard(pid)
        if table[pid][0] == here and pid != session:  # `process` reaps itself
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return found


def _children(parent: int) -> list[int]:
    return [pid for pid, (its_parent, _, _) in _table().items() if its_parent == parent]


def _table() -> dict[int, tuple[int, int, str]]:
    """pid -> parent, session, state, of every process; from /proc, or from ps where there is none."""
    table = {}
    proc = Path("/proc")
    if not (proc / "self" / "stat").is_file():
        shown = subprocess.run(
            ["ps", "-axo", "pid=,ppid=,sess=,stat="], capture_output=True, text=True, check=True
        ).stdout
        for line in shown.splitlines():
            pid, parent, session, state = line.split()[:4]
            table[int(pid)] = (int(parent), int(session, 16), state[0])
        return table
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            table[int(entry.name)] = (int(fields[1]), int(fields[3]), fields[0])
    return table


def _adopt_orphans() -> None:
    """Linux: processes orphaned below this one become its children (PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)
