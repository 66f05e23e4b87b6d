"""Servers that already run: their counters are read as they count, and broken ones are named in time."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from draftsmith.accept.remote import serve_remotely
from draftsmith.configs.errors import DraftsmithError

PROMPTS = {
    "prompts": [{"id": name, "input_ids": [1, n], "max_new_tokens": 8} for n, name in enumerate("abc")],
    "stop_token_ids": [2],
}
HISTOGRAMS = {0: [1, 0, 1, 0], 1: [0, 2, 0, 0], 2: [0, 0, 0, 0]}
"""By the prompt's last token; the third request ended with the prefill's token."""


class Handler(BaseHTTPRequestHandler):
    """SGLang's and vLLM's routes, with a fault chosen by the server's `fault`."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        server = self.server
        if self.path == "/health":
            return self.say({}, 503 if server.fault == "unhealthy" else 200)
        if self.path == "/server_info":
            content = {"version": "0.5.23", "speculative_num_steps": 3}
            return self.say({"listed": [content], "depth in words": content | {"speculative_num_steps": "3"}}.get(
                self.server.fault, content
            ))  # fmt: skip
        if self.path == "/v1/models":
            return self.say({"data": [{"id": "m"}]})
        if self.path == "/version":
            return self.say({"version": "0.32.0"})
        if self.path == "/metrics":
            return self.say(self.metrics(), text=True)
        return self.say({}, 404)

    def metrics(self):
        if self.server.fault == "no number":
            return "vllm:spec_decode_num_drafts_total NaN\n"
        if self.server.fault == "silent":
            return "vllm:num_requests 1\n"
        drafts, positions = self.server.drafts, self.server.positions
        lines = [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {float(100 + drafts)}']
        lines += [f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {float(50 + sum(positions))}']
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {float(30 + count)}'
            for i, count in enumerate(positions)
        ]
        return "# HELP x\n" + "\n".join(lines) + "\n"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        if self.server.fault == "dies" and len(self.server.asked) > 1:
            self.close_connection = True
            return self.connection.close()
        if self.server.fault == "cut":
            return self.say({"output_ids": [7]}, promised=500)
        if self.server.fault == "stuck":
            self.server.release.wait(20)
        if self.server.fault == "slow":
            time.sleep(0.8)
        last = (asked.get("input_ids") or asked["prompt"])[-1]
        histogram = HISTOGRAMS.get(last, HISTOGRAMS[0])
        with self.server.lock:
            self.server.drafts += sum(histogram)
            for i in range(3):
                self.server.positions[i] += sum(histogram[i + 1 :])
        tokens = [7] * (1 + sum(count * (i + 1) for i, count in enumerate(histogram)))
        if self.server.fault == "mute":
            tokens = []
        if self.path == "/v1/completions":
            return self.say({"choices": [{"token_ids": tokens}]})
        if self.server.fault == "deep":
            histogram = [*histogram, 1, 0]
        if self.server.fault == "counts in words":
            histogram = [str(count) for count in histogram]
        meta = {"completion_tokens": len(tokens)}
        half = self.server.fault == "half" and len(self.server.asked) > 1
        if self.server.fault != "silent" and not half and len(tokens) > 1:
            meta |= {"spec_verify_ct": sum(map(int, histogram)), "spec_correct_drafts_histogram": histogram}
        return self.say({"output_ids": tokens, "meta_info": meta})

    def say(self, content, status=200, *, text=False, promised=None):
        data = content.encode() if text else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(promised or len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = promised is not None


@pytest.fixture
def start():
    running = []

    def make(fault=None):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.fault, server.asked, server.lock, server.release = fault, [], threading.Lock(), threading.Event()
        server.drafts, server.positions = 0, [0, 0, 0]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return server, f"http://127.0.0.1:{server.server_port}"

    yield make
    for server in running:
        server.shutdown()
        server.server_close()


def ask(engine, url, plain=None, **changes):
    options = {"steps": 3, "start_limit": 1.0, "limit": 5.0, "concurrency": 2} | changes
    return serve_remotely(engine, url, plain, PROMPTS, **options)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_counters_are_those_of_these_requests_alone(start, engine):
    server, url = start()
    _, plain = start()
    result = ask(engine, url + "/v1", plain)
    # 4 verify steps: 0, 2, 1 and 1 drafts accepted
    assert result["steps"] == 3 and result["spec"]["verify_steps"] == 4
    assert result["spec"]["accept_length"] == 2.0
    assert result["spec"]["accept_per_position"] == [3 / 4, 1 / 4, 0]
    assert result["identical"] is True and [o["id"] for o in result["base"]["outputs"]] == ["a", "b", "c"]
    asked = server.asked[0]
    assert asked.get("temperature", asked.get("sampling_params", {}).get("temperature")) == 0
    assert result["version"] == {"sglang": "0.5.23", "vllm": "0.32.0"}[engine]


def test_without_a_plain_server_nothing_is_compared(start):
    _, url = start()
    result = ask("sglang", url)
    assert result["base"] is None and result["identical"] is None


@pytest.mark.parametrize(
    ("fault", "engine", "words"),
    [
        ("unhealthy", "sglang", "was not healthy within 1 seconds"),
        ("dies", "vllm", "was lost, or answers otherwise"),
        ("silent", "sglang", "reported no counters"),
        ("silent", "vllm", "reported no counters"),
        ("cut", "sglang", "was lost, or answers otherwise"),
        ("cut", "vllm", "was lost, or answers otherwise"),
        ("listed", "sglang", "by no JSON object"),
        ("depth in words", "sglang", "no depth of its chains"),
        ("deep", "sglang", "more accepted drafts than a chain has"),
        ("counts in words", "sglang", "was lost, or answers otherwise"),
        ("mute", "sglang", "answered nothing at all with the drafter"),
        ("mute", "vllm", "answered nothing at all with the drafter"),
        ("half", "sglang", "counters of some requests only"),
        ("no number", "vllm", "has no metrics: vllm:spec_decode_num_drafts is NaN"),
    ],
)
def test_a_broken_server_is_named_in_time(start, fault, engine, words):
    _, url = start(fault)
    began = time.monotonic()
    with pytest.raises(DraftsmithError, match=words):
        ask(engine, url)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("fault", ["slow", "stuck"])
def test_the_time_limit_is_one_for_all_requests(start, engine, fault):
    """Each answer alone comes in time (slow) or never (stuck); together they take longer than is allowed."""
    server, url = start(fault)
    began = time.monotonic()
    with pytest.raises(DraftsmithError, match=r"did not finish within 1\.5 seconds") as error:
        ask(engine, url, limit=1.5, concurrency=1)
    assert time.monotonic() - began < 3
    assert "--timeout SECONDS" in str(error.value)
    server.release.set()


def test_nobody_at_the_address(start):
    with pytest.raises(DraftsmithError, match="was not healthy"):
        ask("sglang", "http://127.0.0.1:9", start_limit=0.3)


def test_a_port_that_speaks_no_http():
    """A greeting of another protocol is no status line."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet():
            with contextlib.suppress(OSError):
                while True:
                    with listening.accept()[0] as caller:
                        caller.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(DraftsmithError, match="was not healthy") as error:
            ask("sglang", f"http://127.0.0.1:{listening.getsockname()[1]}", start_limit=0.3)
    assert "SSH-2.0" in str(error.value) or "reset" in str(error.value)


def test_a_plain_server_that_answers_nothing_is_named(start):
    _, url = start()
    _, plain = start("mute")
    with pytest.raises(DraftsmithError, match="answered nothing at all without the drafter"):
        ask("sglang", url, plain)


def test_the_requests_without_counters_are_listed(start):
    _, url = start("half")
    with pytest.raises(DraftsmithError, match="none for 1 of 3 requests: b"):
        ask("sglang", url, concurrency=1)
