"""What a round costs, from engines' logs or from a short sweep over running servers.

An engine tells tokens a second and tokens a round, not the parts of a round: with n running requests and L tokens a round
the round takes 1000 n L / (tokens a second) milliseconds, and a plain decode step 1000 n / (tokens a second).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from draftsmith.accept.forecast import Costs, make_rounds
from draftsmith.configs.console import console, warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.engine_loader import Engine

if TYPE_CHECKING:
    from draftsmith.accept.remote import Server

SGLANG = re.compile(
    r"#running-req: (\d+),.*?(?:accept len: ([\d.]+), accept rate: ([\d.]+),.*?)?gen throughput \(token/s\): ([\d.]+)"
)
SGLANG_STEPS = re.compile(r"speculative_num_steps=(\d+)")
VLLM = re.compile(r"Avg generation throughput: ([\d.]+) tokens/s, Running: (\d+) reqs")
VLLM_DRAFTS = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: ([\d.]+),.*Per-position acceptance rate: ([\d., ]+?), Avg"
)

UNTOLD, MOST_DRAFTS = -1, 64
"""The depth of a line that does not tell it; the deepest that is thought of."""

HEALTHY_WITHIN = 10.0
"""Seconds for a server to say that it is healthy: a forecast waits for none to start."""

UNHEALTHY = "start it, and forecast once it answers /health; or check the URL"

SHORT, LONG = 16, 80
"""New tokens of the two passes of a sweep; their difference has no prefill in it."""


@dataclass(frozen=True)
class Line:
    """One report of an engine. depth 0: without a drafter, accept_length 1."""

    running: int
    tokens_per_second: float
    depth: int
    accept_length: float

    @property
    def milliseconds(self) -> float:
        """Of one round, or of one decode step."""
        return 1000 * self.running * self.accept_length / self.tokens_per_second


def costs_from_logs(files: Sequence[Path], decode_ms: float | None = None) -> list[Costs]:
    """Costs by batch size, from the logs of engines with the drafter and without.

    Args:
        decode_ms: a plain decode step at batch size 1, where no log is of an engine without the drafter.

    Raises:
        DraftsmithError: a log without such lines or of several depths, or no batch size that was run both with and without the drafter.
    """
    rounds: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        try:
            text = file.read_text(errors="replace")
        except OSError as error:
            raise DraftsmithError(f"the log cannot be read: {error}", where=file) from None
        lines = read_log(text, file)
        if not lines:
            raise DraftsmithError(
                "the log has no line that tells an engine's throughput", where=file,
                expected="SGLang's `Decode batch ... gen throughput`, or vLLM's `Avg generation throughput`",
                mend="let the engine log its statistics while requests run (vLLM: without --disable-log-stats)",
            )  # fmt: skip
        for line in lines:
            rounds[line.running][line.depth].append(line.milliseconds)
    if decode_ms is not None:
        rounds[1].setdefault(0, [decode_ms])
    return _paired({batch: {d: median(v) for d, v in found.items()} for batch, found in rounds.items()}, "logs")


def read_log(text: str, where: object = "log") -> list[Line]:
    """The reports of an SGLang or vLLM log; those without running requests or tokens are left out.

    A log is of one server, so its lines with drafts have one depth. vLLM tells it; SGLang tells accepted drafts a round
    and the share of drafts accepted, both rounded, so that one line alone fits several depths.

    Raises:
        DraftsmithError: no depth fits all lines.
    """
    reports: list[Line] = []
    rounded: list[tuple[str, str]] = []
    reported: tuple[int, float] | None = None
    for row in text.splitlines():
        if found := SGLANG.search(row):
            running, length, rate, speed = int(found[1]), found[2], found[3], float(found[4])
            if not running or not speed:
                continue
            if length is None:
                reports.append(Line(running, speed, 0, 1.0))
            elif float(rate) > 0:
                reports.append(Line(running, speed, UNTOLD, float(length)))
                rounded.append((length, rate))
        elif found := VLLM.search(row):
            if reported is not None:
                reports.append(Line(*reported, 0, 1.0))
            reported = (int(found[2]), float(found[1])) if int(found[2]) and float(found[1]) else None
        elif (found := VLLM_DRAFTS.search(row)) and reported is not None:
            reports.append(Line(*reported, len(found[2].split(",")), float(found[1])))
            reported = None
    if reported is not None:
        reports.append(Line(*reported, 0, 1.0))
    if rounded:
        depth = _depth(rounded, SGLANG_STEPS.findall(text), where)
        reports = [replace(line, depth=depth) if line.depth == UNTOLD else line for line in reports]
    told = sorted({line.depth for line in reports} - {0})
    if len(told) > 1:
        raise _several(where, f"rounds of {', '.join(map(str, told))} drafts")
    return reports


def _depth(rounded: Sequence[tuple[str, str]], stated: Sequence[str], where: object) -> int:
    """The one depth that fits every (accept length, accept rate) within rounding: (length - 1) / rate.

    Where several fit, the one that the server's arguments state; else the likeliest, precise lines weighing most, and a
    warning.
    """
    low, high, likeliest, weights = 1, MOST_DRAFTS, 0.0, 0.0
    for length, rate in rounded:
        accepted, share = float(length) - 1, float(rate)
        off, share_off = _half_unit(length), _half_unit(rate)
        low = max(low, math.ceil((accepted - off) / (share + share_off)))
        if share > share_off:
            high = min(high, math.floor((accepted + off) / (share - share_off)))
        weight = share**2  # the error of the quotient goes with 1 / rate
        likeliest, weights = likeliest + weight * accepted / share, weights + weight
    if low > high:
        quotients = [(float(length) - 1) / float(rate) for length, rate in rounded]
        raise _several(
            where,
            f"(accept length - 1) / accept rate from {min(quotients):.2f} to {max(quotients):.2f} in {len(rounded)} lines",
        )
    named = {int(steps) for steps in stated if low <= int(steps) <= high}
    if low < high and len(named) != 1:
        depth = min(max(round(likeliest / weights), low), high)
        warn(f"{where}: the rounded figures fit {low} to {high} drafts a round; taken for {depth}, the likeliest")
        return depth
    return named.pop() if low < high else low


def _half_unit(number: str) -> float:
    """How far a printed number may be from the true one."""
    return 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9


def _several(where: object, found: str) -> DraftsmithError:
    return DraftsmithError(
        "the log's lines are of several depths", where=where, found=found, expected="the rounds of one server, all of one depth",
        mend="cut the log to one run of the server, and give each depth's log with its own --log",
    )  # fmt: skip


def sweep(
    engine: Engine | None,
    urls: Sequence[str],
    plain_url: str | None,
    decode_ms: float | None,
    batches: Sequence[int],
    *,
    limit: float = 3600.0,
    patience: float = 120.0,
) -> list[Costs]:
    """Measure running servers: at each batch size that many requests at once, twice, and the difference counts.

    Args:
        urls: servers with the drafter; each has one depth.
        plain_url: one without; else decode_ms stands for it at batch size 1.
        limit, patience: seconds for all requests to a server, and for one.

    Raises:
        DraftsmithError: a server is not healthy, is lost, or reports no counters.
    """
    from draftsmith.accept.remote import Server

    assert engine is not None
    found: dict[int, dict[int, float]] = {batch: {} for batch in batches}
    for url in urls:
        server = Server(engine, url, limit, patience)
        server.wait(HEALTHY_WITHIN, mend=UNHEALTHY)
        depth = server.depth()
        if not depth:
            raise DraftsmithError(
                f"{server.title} does not say how many tokens it drafts", where=server.url,
                expected="a server with --speculative-num-steps, or vLLM with a speculative config",
            )  # fmt: skip
        for batch in batches:
            found[batch][depth] = _measure(server, batch, drafted=True)
            console.print(
                f"  {server.title}: {batch} at once, {depth} drafts: round {found[batch][depth]:.2f} ms",
                highlight=False,
            )
    if plain_url:
        server = Server(engine, plain_url, limit, patience)
        server.wait(HEALTHY_WITHIN, mend=UNHEALTHY)
        for batch in batches:
            found[batch][0] = _measure(server, batch, drafted=False)
            console.print(f"  {server.title}: {batch} at once, plain: {found[batch][0]:.2f} ms", highlight=False)
    elif decode_ms is not None:
        found.setdefault(1, {})[0] = decode_ms
    return _paired(found, "servers")


def _measure(server: Server, batch: int, *, drafted: bool) -> float:
    """Milliseconds of a round (or of a decode step)."""
    spent, rounds = [], []
    for number, new_tokens in enumerate((SHORT, SHORT, LONG)):  # the first warms up
        prompts = [
            {"id": str(i), "input_ids": [100 + 7 * i + j for j in range(16)], "max_new_tokens": new_tokens}
            for i in range(batch)
        ]
        served = server.serve({"prompts": prompts, "stop_token_ids": [], "ignore_eos": True}, batch, drafted=drafted)
        if not number:
            continue
        spent.append(served.seconds)
        steps = served.counters.get("verify_steps") or sum(o.verify_steps or 0 for o in served.outputs)
        if drafted and not steps:
            raise DraftsmithError(f"{server.title} reported no counters of speculative decoding", where=server.url)
        rounds.append(steps / batch if drafted else sum(len(o.output_ids) - 1 for o in served.outputs) / batch)
    return 1000 * max(1e-6, spent[1] - spent[0]) / max(1e-6, rounds[1] - rounds[0])


def _paired(found: dict[int, dict[int, float]], what: str) -> list[Costs]:
    """Costs of the batch sizes that were measured with and without the drafter."""
    usable = {batch: rounds for batch, rounds in found.items() if 0 in rounds and len(rounds) > 1}
    if not usable:
        with_ = sorted(batch for batch, rounds in found.items() if set(rounds) - {0})
        without = sorted(batch for batch, rounds in found.items() if 0 in rounds)
        raise DraftsmithError(
            f"the {what} show no batch size both with and without the drafter", where=what,
            found=f"with: {with_ or 'none'}; without: {without or 'none'}",
            mend="add a log or server of the other kind at the same load, or --decode-ms for batch size 1",
        )  # fmt: skip
    return [
        make_rounds(batch, rounds[0], {depth: cost for depth, cost in rounds.items() if depth})
        for batch, rounds in sorted(usable.items())
    ]
