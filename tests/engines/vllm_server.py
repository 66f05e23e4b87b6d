"""A real vLLM server for as long as a test needs it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def vllm_server(target: Path, log: Path, *options: str) -> Iterator[str]:
    """Yield the root URL of a server that is healthy; nothing of it is left afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [REPOSITORY / "scripts" / "serve_http_vllm.sh", target, str(port), *options],
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        limit = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < limit, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
