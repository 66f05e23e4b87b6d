"""Run work in a forked process group that is gone afterwards, whatever the work did. Standard library only.

Forked, because importing an engine takes longer than starting it: the caller imports it once, every child has it.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

LOG_TAIL_LINES = 25
GRACE_SECONDS = 5  # between asking processes to end and killing them

T = TypeVar("T")


class ChildError(Exception):
    """The work failed, died or took too long; the message says which and ends with what it printed last."""


def run_in_child(work: Callable[[], T], log: Path, deadline: float, label: str) -> T:
    """Return what `work` returns (it must pickle); its output, and its children's, is appended to `log`.

    deadline is a time.monotonic(); `label` names the work in errors ("the engine with the drafter"). Raises ChildError.
    """
    _adopt_orphans()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child_main, args=(work, log, sender))
    try:
        child.start()
        with contextlib.suppress(OSError):  # here and in the child: whichever comes first
            os.setpgid(child.pid, child.pid)
        sender.close()
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            raise ChildError(f"{label} ran into the time limit; its output: {log}\n{_tail(log)}")
        succeeded, payload = receiver.recv()
    except EOFError:
        _wait_while(child.is_alive)
        raise ChildError(f"{label} died, exit code {child.exitcode}; its output: {log}\n{_tail(log)}") from None
    finally:
        if child.pid is not None:
            _end_group(child)
    if not succeeded:
        raise ChildError(f"{label} failed; its output: {log}\n{payload}")
    return payload


def _child_main(work: Callable[[], object], log: Path, sender) -> None:
    os.setpgid(0, 0)
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_DFL)
    end_with_parent()
    with output_to(log):
        try:
            sender.send((True, work()))
        except BaseException:
            traceback.print_exc()
            sender.send((False, traceback.format_exc()))


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Append to `log` whatever this process and its children write to standard output and standard error."""
    kept = [(stream, os.dup(stream)) for stream in (1, 2)]
    with log.open("ab") as handle:
        for stream, _ in kept:
            os.dup2(handle.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, original in kept:
            os.dup2(original, stream)
            os.close(original)


def end_on_signals() -> None:
    """Turn Ctrl-C and SIGTERM into an ordinary exit, on the way of which children are ended."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda number, frame: sys.exit(128 + number))


def _end_group(child: multiprocessing.Process) -> None:
    """Give the child time to end unless something failed; ask its process group to, kill what is left; reap it all."""
    if sys.exc_info()[0] is None:
        _wait_while(child.is_alive)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _group_lives(child):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            _wait_while(lambda: _group_lives(child))


def _wait_while(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + GRACE_SECONDS
    while condition() and time.monotonic() < limit:
        time.sleep(0.02)


def _group_lives(child: multiprocessing.Process) -> bool:
    """Reap ended members of the child's group (its orphans are ours); is any member left?"""
    child.is_alive()  # reaps the child itself
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-child.pid, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _adopt_orphans() -> None:
    """Linux: processes orphaned by a dying engine become children of this one, which can then reap them."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def end_with_parent() -> None:
    """Linux: the calling process is killed when its parent ends, however that happens."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
