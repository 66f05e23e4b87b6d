"""A server with OpenAI's completions API on a thread or in a process of its own, that answers by arithmetic and fails on order.

What it answers is a function of the prompt's ids and the seed alone, so that every run must end with the same
conversations whatever went wrong on the way.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STOP = 2
FAULTS = ("drop", "delay", "429", "500", "503", "truncated", "duplicate", "other prompt", "empty", "no JSON")


def reply_ids(prompt: list[int], seed: int, limit: int) -> tuple[list[int], str]:
    """Generated ids and finish reason: letters of the byte-level vocabulary, ended by STOP or by the limit."""
    digest = hashlib.sha256(json.dumps([prompt, seed]).encode()).digest()
    ids = [40 + byte % 50 for byte in digest[: 3 + digest[0] % 12]]
    return ([*ids, STOP], "stop") if len(ids) < limit else (ids[:limit], "length")


def text_of(ids: list[int]) -> str:
    """What such ids stand for in the tiny target's vocabulary, whose first token after three special ones is `!`."""
    return "".join(chr(one + 30) for one in ids if one != STOP)


class FaultyServer(ThreadingHTTPServer):
    """Listens from construction on; `faults` are drawn for a share of the requests."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        *,
        port: int = 0,
        faults: tuple[str, ...] = (),
        share: float = 0.0,
        delay: float = 0.0,
        latency: float = 0.0,
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.faults, self.share, self.delay, self.latency = faults, share, delay, latency
        self.random = random.Random(1)
        self.requests: list[dict[str, Any]] = []
        self.answered: list[dict[str, Any]] = []
        self.most_at_once = self._at_once = 0
        self.lock = threading.Lock()
        self.headers_seen: list[str | None] = []
        self.token_ids = True
        self.change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
        """Changes every choice before it is sent; also gets the request."""
        self.refuses: Callable[[dict[str, Any]], bool] | None = None
        """Which requests are answered with HTTP 400."""
        self.models = json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
        self.models_asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def start(self) -> FaultyServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop listening; connections in flight are dropped."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""

    def enter(self, body: dict[str, Any]) -> str | None:
        with self.lock:
            self.requests.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            return self.random.choice(self.faults) if self.faults and self.random.random() < self.share else None

    def leave(self) -> None:
        with self.lock:
            self._at_once -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.models_asked += 1
        self._send(200, self.server.models.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.headers_seen.append(self.headers.get("Authorization"))
        fault = self.server.enter(body)
        try:
            self._answer(body, fault)
        finally:
            self.server.leave()

    def _answer(self, body: dict[str, Any], fault: str | None) -> None:
        time.sleep(self.server.latency)
        if fault == "drop":
            self.close_connection = True
            self.connection.close()
            return
        if fault == "delay":
            time.sleep(self.server.delay)
        if fault in ("429", "500", "503"):
            self._send(int(fault), b'{"error": {"message": "busy"}}')
            return
        if self.server.refuses is not None and self.server.refuses(body):
            self._send(400, b'{"error": {"message": "such prompts are not for me"}}')
            return
        ids, finish = reply_ids(body["prompt"], body["seed"], body["max_tokens"])
        choice: dict[str, Any] = {
            "index": 0, "finish_reason": finish, "text": text_of(ids),
            "logprobs": {"token_logprobs": [-0.5] * len(ids), "tokens": [], "text_offset": [], "top_logprobs": None},
        }  # fmt: skip
        if self.server.token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
        if fault == "other prompt":
            choice["prompt_token_ids"] = [1, *body["prompt"]]
        if self.server.change is not None:
            self.server.change(choice, body)
        choices = {"duplicate": [choice, choice], "empty": []}.get(fault or "", [choice])
        text = json.dumps({"id": "x", "object": "text_completion", "created": 0, "model": "tiny", "choices": choices})
        if fault == "truncated":
            text = text[: len(text) // 2]
        if fault == "no JSON":
            text = "<html>upstream error</html>"
        self._send(200, text.encode())
        if fault is None:
            self.server.answered.append(body)

    def _send(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
