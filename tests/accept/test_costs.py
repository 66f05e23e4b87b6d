"""Costs from logs and from running servers, and what a forecast makes of whole rounds."""

from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from draftsmith.accept.costs import costs_from_logs, read_log, sweep
from draftsmith.accept.forecast import forecast, make_rounds, read_costs
from draftsmith.accept.forecast_command import forecast_command, side_by_side
from draftsmith.configs.errors import DraftsmithError

# The form of the lines as the engines' sources write them (SGLang 0.5.23, vLLM 0.32.0).
SGLANG_DRAFTED = (
    "[2026-11-29 21:07:00] Decode batch, #running-req: {n}, #token: 300, token usage: 0.01, accept len: {length}, "
    "accept rate: {rate}, cuda graph: True, gen throughput (token/s): {speed}, #queue-req: 0\n"
)
SGLANG_PLAIN = (
    "[2026-11-29 21:07:00] Decode batch, #running-req: {n}, #token: 300, token usage: 0.01, cuda graph: True, "
    "gen throughput (token/s): {speed}, #queue-req: 0\n"
)
VLLM_STATS = (
    "INFO 11-29 21:07:00 [loggers.py:259] Engine 000: Avg prompt throughput: 12.0 tokens/s, Avg generation throughput: "
    "{speed} tokens/s, Running: {n} reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%\n"
)
VLLM_DRAFTS = (
    "INFO 11-29 21:07:00 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.00, Accepted throughput: 30.00 "
    "tokens/s, Drafted throughput: 90.00 tokens/s, Accepted: 300 tokens, Drafted: 900 tokens, Per-position acceptance "
    "rate: 0.600, 0.300, 0.100, Avg Draft acceptance rate: 33.3%\n"
)


def test_an_sglang_log_tells_rounds_and_plain_steps(tmp_path):
    """60 tokens/s at accept length 1.8: a round of 30 ms. 83.33 tokens/s plain: 12 ms. Two at once: twice the tokens."""
    drafted, plain = tmp_path / "spec.log", tmp_path / "plain.log"
    drafted.write_text(
        "server_args=...\n"
        + SGLANG_DRAFTED.format(n=1, length="1.80", rate="0.27", speed="60.00") * 3
        + SGLANG_DRAFTED.format(n=1, length="1.80", rate="0.27", speed="1.00")  # an idle gap: the median leaves it out
        + SGLANG_DRAFTED.format(n=2, length="1.80", rate="0.27", speed="90.00")
        + SGLANG_DRAFTED.format(n=0, length="0.00", rate="0.00", speed="0.00")
    )
    plain.write_text(SGLANG_PLAIN.format(n=1, speed="83.33") + SGLANG_PLAIN.format(n=2, speed="166.67"))
    one, two = costs_from_logs([drafted, plain])
    assert (one.batch, two.batch) == (1, 2)
    assert one.rounds == {3: pytest.approx(30.0)} and one.decode == pytest.approx(12.0, rel=1e-3)
    assert two.rounds == {3: pytest.approx(40.0)} and two.decode == pytest.approx(12.0, rel=1e-3)
    entry = forecast([0.5, 0.2, 0.1], one)
    assert [depth.steps for depth in entry.depths] == [3]  # no other depth was measured, none is invented
    assert entry.depths[0].speedup == pytest.approx(1.8 * 12 / 30, rel=1e-3) and "do not deploy" in entry.verdict


def test_one_server_has_one_depth_however_its_figures_are_rounded(tmp_path, capsys):
    """7 drafts, acceptance as it comes, each figure rounded to two decimals as the engine prints it."""
    accepted = [1.30, 1.34, 0.97, 0.52, 2.08, 1.12, 0.25]
    rows = [SGLANG_DRAFTED.format(n=1, length=f"{1 + a:.2f}", rate=f"{a / 7:.2f}", speed="50.00") for a in accepted]
    alone = {round(float(f"{a:.2f}") / float(f"{a / 7:.2f}")) for a in accepted}
    assert len(alone) > 1  # line by line they look like several depths
    file = tmp_path / "spec.log"
    file.write_text("".join(rows))
    (costs,) = costs_from_logs([file], decode_ms=12.0)
    assert list(costs.rounds) == [7]
    assert [depth.steps for depth in forecast([0.5, 0.2, 0.1], costs).depths] == [7]

    other = SGLANG_DRAFTED.format(n=1, length="1.80", rate="0.27", speed="60.00")  # of 3 drafts
    file.write_text("".join(rows) + other)
    with pytest.raises(DraftsmithError, match="several depths") as caught:
        costs_from_logs([file], decode_ms=12.0)
    assert caught.value.where == file
    three = VLLM_STATS.format(n=1, speed=80.0) + VLLM_DRAFTS
    file.write_text(three + three.replace("0.600, 0.300, 0.100", "0.600, 0.300"))
    with pytest.raises(DraftsmithError, match="several depths"):
        costs_from_logs([file], decode_ms=12.0)

    capsys.readouterr()
    vague = SGLANG_DRAFTED.format(n=1, length="1.21", rate="0.03", speed="50.00")  # 0.205/0.035 to 0.215/0.025: 6 to 8
    assert [line.depth for line in read_log(vague)] == [7]
    assert "6 to 8 drafts" in " ".join(capsys.readouterr().err.split())
    assert [line.depth for line in read_log("ServerArgs(speculative_num_steps=6, x=1)\n" + vague)] == [6]
    assert "drafts" not in capsys.readouterr().err


def test_a_vllm_log_tells_the_same(tmp_path):
    text = VLLM_STATS.format(n=2, speed=80.0) + VLLM_DRAFTS + VLLM_STATS.format(n=1, speed=50.0)
    assert [(line.running, line.depth, line.milliseconds) for line in read_log(text)] == [
        (2, 3, pytest.approx(1000 * 2 * 2.0 / 80)),
        (1, 0, pytest.approx(20.0)),
    ]
    (tmp_path / "v.log").write_text(VLLM_STATS.format(n=1, speed=80.0) + VLLM_DRAFTS)
    (costs,) = costs_from_logs([tmp_path / "v.log"], decode_ms=20.0)
    assert costs.rounds == {3: pytest.approx(25.0)} and costs.decode == 20.0


def test_logs_that_cannot_be_paired_or_read_are_refused(tmp_path):
    (tmp_path / "plain.log").write_text(SGLANG_PLAIN.format(n=1, speed="83.33"))
    (tmp_path / "empty.log").write_text("nothing here\n")
    with pytest.raises(DraftsmithError, match="both with and without"):
        costs_from_logs([tmp_path / "plain.log"])
    with pytest.raises(DraftsmithError, match="no line that tells"):
        costs_from_logs([tmp_path / "empty.log"])
    with pytest.raises(DraftsmithError, match="cannot be read"):
        costs_from_logs([tmp_path / "none.log"])


def test_rounds_of_two_depths_give_the_others_by_the_line_through_them(tmp_path):
    costs = make_rounds(1, 12.0, {2: 20.0, 4: 30.0})
    entry = forecast([0.7, 0.5, 0.3, 0.2], costs, 4)
    assert [depth.round_ms for depth in entry.depths] == [15.0, 20.0, 25.0, 30.0]
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"1": {"decode_ms": 12, "round_ms": {"2": 20, "4": 30}}}))
    assert read_costs(file) == [costs]


def test_two_and_three_drafts_stand_side_by_side(capsys):
    table = side_by_side([forecast([0.7, 0.5, 0.3], make_rounds(1, 12.0, {2: 20.0, 3: 26.0}))])
    cells = [next(iter(column.cells)) for column in table.columns]
    # 2.2 tokens in 20 ms, 2.5 in 26 ms, against 12 ms a token
    assert cells[1:5] == ["2.20", "20.0", "110.0", "1.32x"]
    assert cells[5:9] == ["2.50", "26.0", "96.2", "1.15x"]
    forecast_command("0.7,0.5,0.3", decode_ms=12, draft_ms=1, verify_ms="2:20,4:30", costs=None, most=8, png=None, as_json=False)  # fmt: skip
    assert "side by side" in capsys.readouterr().out


class Clock(BaseHTTPRequestHandler):
    """A server whose prefill takes 0.1 s and whose every round takes `round` seconds and gives two tokens."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.say({"version": "1", "speculative_num_steps": self.server.depth or None})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        new = asked["sampling_params"]["max_new_tokens"]
        assert asked["sampling_params"]["ignore_eos"] is True
        rounds = (new - 1 + 1) // 2 if self.server.depth else new - 1
        time.sleep(0.1 + rounds * self.server.round)
        meta = {"spec_verify_ct": rounds, "spec_correct_drafts_histogram": [0, rounds]} if self.server.depth else {}
        self.say({"output_ids": [5] * new, "meta_info": meta})

    def say(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def clocks():
    servers = []
    for depth, seconds in ((3, 0.03), (0, 0.01)):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Clock)
        server.depth, server.round = depth, seconds
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
    yield [f"http://127.0.0.1:{server.server_port}" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_sweep_measures_rounds_without_the_prefill(clocks):
    drafted, plain = clocks
    one, two = sweep("sglang", [drafted], plain, None, [1, 2])
    for costs in (one, two):
        assert costs.rounds[3] == pytest.approx(30, rel=0.4) and costs.decode == pytest.approx(10, rel=0.4)
    with pytest.raises(DraftsmithError, match="does not say how many tokens"):
        sweep("sglang", [plain], None, None, [1])


def test_a_server_that_is_not_there_is_not_mended_with_an_option_that_forecast_lacks(monkeypatch):
    monkeypatch.setattr("draftsmith.accept.costs.HEALTHY_WITHIN", 0.3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening
        with pytest.raises(DraftsmithError, match="not healthy") as caught:
            sweep("sglang", [f"http://127.0.0.1:{free.getsockname()[1]}"], None, 12.0, [1])
    assert "--start-timeout" not in str(caught.value) and "/health" in caught.value.mend
