"""A python that has imported torch, accelerate and DeepSpeed already: each start of it is a fork of one process.

`python -m accelerate.commands.launch ... -m draftsmith.train` starts three interpreters, which spend thirty seconds of
processor time on imports before a tiny run begins. `warm_python` gives an executable in the place of `sys.executable`
that knows `-m MODULE ARGUMENTS`: it hands its arguments, environment, folder and open files to a server, which forks; the
fork runs the module as `__main__`, and the executable ends as the fork does. Signals are passed on, and when the
executable is killed, so is the fork. The launcher starts its ranks with the same executable.

Only the start differs from a real one, so that a test of what a killed *launcher* leaves behind needs the real python: the
parent of a fork is the server. Every back end is also launched with the real one by some test.
"""

from __future__ import annotations

import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "accelerate.commands.launch", "matplotlib.pyplot", "torch._dynamo", "torch.distributed.run", "transformers",
    "draftsmith.train.trainer",
)  # fmt: skip
"""What launcher and trainer would import; DeepSpeed comes with accelerate."""

CLIENT = """#!{python} -ISs
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
order = json.dumps([__file__, sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
socket.send_fds(server, [len(order).to_bytes(8, "big")], [0, 1, 2])
server.sendall(order)
answer = server.recv(1)
if not answer:
    os._exit(70)
if answer[0] >= 128:
    signal.signal(answer[0] - 128, signal.SIG_DFL) if answer[0] != 128 + signal.SIGKILL else None
    os.kill(os.getpid(), answer[0] - 128)
os._exit(answer[0])
"""


@contextmanager
def warm_python(folder: Path) -> Iterator[Path]:
    """An executable in `folder`, which must be a short path; server and forks end with the context."""
    python, address = folder / "python", folder / "server"
    python.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    python.chmod(0o755)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(
        [sys.executable, __file__, str(address)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT,
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield python
        server.stdin.close()


def serve(address: str) -> None:
    """Fork for every caller until standard input ends. Returns in a fork, ready to run its module."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    callers: dict[socket.socket, int] = {}
    watch = selectors.DefaultSelector()
    for source in (listening, sys.stdin, woken):
        watch.register(source, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in watch.select():
            source = key.fileobj
            if source is sys.stdin:
                for process in callers.values():
                    os.kill(process, signal.SIGKILL)
                os._exit(0)
            elif source is listening:
                caller, _ = listening.accept()
                begun = _fork(caller)
                if begun == 0:
                    watch.close()
                    for other in (listening, *callers):
                        other.close()
                    os.close(woken)
                    os.close(wake)
                    return
                callers[caller] = begun
                watch.register(caller, selectors.EVENT_READ)
            elif source == woken:
                os.read(woken, 4096)
                _tell(callers, watch)
            elif source in callers:
                assert isinstance(source, socket.socket)
                for number in _received(source):
                    os.kill(callers[source], number)


def _received(caller: socket.socket) -> bytes:
    """The signals that a caller passes on; SIGKILL where the caller itself has been killed."""
    try:
        return caller.recv(64) or bytes([signal.SIGKILL])
    except ConnectionResetError:
        return bytes([signal.SIGKILL])


def _tell(callers: dict[socket.socket, int], watch: selectors.BaseSelector) -> None:
    """Every caller whose fork has ended how it ended."""
    for caller, process in list(callers.items()):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            watch.unregister(caller)
            del callers[caller]
            with suppress(OSError):  # killed meanwhile
                caller.send(bytes([code if code >= 0 else 128 - code]))
            caller.close()


def _fork(caller: socket.socket) -> int:
    """The fork's process id; in the fork 0, with the caller's arguments, environment, folder and files."""
    size, files, _, _ = socket.recv_fds(caller, 8, 3)
    order = b""
    while len(order) < int.from_bytes(size, "big"):
        order += caller.recv(1 << 20)
    process = os.fork()
    if process == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for place, file in enumerate(files):
            os.dup2(file, place)
        sys.executable, sys.argv, environment, folder = json.loads(order)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        caller.close()
    for file in files:
        os.close(file)
    return process


def main() -> None:
    import torch

    for module in IMPORTED:
        import_module(module)
    torch.set_num_threads(1)
    serve(sys.argv[1])
    arguments = [argument for argument in sys.argv if argument != "-u"]
    assert arguments[0] == "-m", arguments
    sys.path[0] = ""
    sys.argv = arguments[1:]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
