"""`draftsmith forecast`: the tables, the verdict, the picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from draftsmith.accept.costs import costs_from_logs, sweep
from draftsmith.accept.forecast import (
    Costs,
    Forecast,
    draw,
    forecast,
    make_costs,
    read_accept,
    read_costs,
    read_verify,
)
from draftsmith.configs.console import closing, console, out, table
from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.engine_loader import Engine


def forecast_command(
    acceptance: str,
    *,
    decode_ms: float | None,
    draft_ms: float | None,
    verify_ms: str | None,
    costs: Path | None,
    logs: Sequence[Path] = (),
    engine: Engine | None = None,
    url: Sequence[str] = (),
    plain_url: str | None = None,
    batches: Sequence[int] = (1, 4, 16),
    most: int,
    png: Path | None,
    as_json: bool,
) -> list[Forecast]:
    """Print a table a batch size, two and three drafts side by side, and the verdicts; write the picture if a file is named.

    Args:
        decode_ms, draft_ms, verify_ms: costs by hand, at batch size 1; decode_ms also completes logs of drafting alone.
        costs: a table of costs.
        logs: of engines, with the drafter (at any depths) and without.
        engine, url, plain_url, batches: sweep over running servers, of one depth each, and one without the drafter.
    """
    if not 1 <= most <= 64:
        raise DraftsmithError("the depth must be 1 to 64", where="--steps", found=most)
    _check_sources(
        {"--url": url, "--log": logs, "--costs": costs},
        {"--decode-ms": decode_ms, "--draft-ms": draft_ms, "--verify-ms": verify_ms, "--plain-url": plain_url},
    )
    accept, lengths = read_accept(acceptance)
    if url:
        found = sweep(engine, url, plain_url, decode_ms, batches)
    elif logs:
        found = costs_from_logs(logs, decode_ms)
    else:
        found = _costs(decode_ms, draft_ms, verify_ms, costs)
    forecasts = [forecast(accept, entry, most, lengths) for entry in found]
    if as_json:
        rows = [
            {**asdict(entry), "best": entry.best.steps if entry.best else None, "verdict": entry.verdict}
            for entry in forecasts
        ]
        out.print(json.dumps(rows, indent=2), markup=False, highlight=False)
    else:
        for entry in forecasts:
            out.print(_table(entry))
        if (both := side_by_side(forecasts)) is not None:
            out.print(both)
        for entry in forecasts:
            out.print(entry.verdict, style="green" if entry.best else "red", highlight=False)
    if any(depth.extrapolated for entry in forecasts for depth in entry.depths):
        console.print(
            f"  * beyond the {len(accept)} measured positions: each as likely, given those before, as the last measured"
        )
    if png is not None:
        draw(forecasts, png)
        closing(str(png))
    return forecasts


COMPLETES = {"--url": ("--plain-url", "--decode-ms"), "--log": ("--decode-ms",), "--costs": ()}
"""What else may be given with a source of costs; of two for the same thing, one."""


def _check_sources(sources: Mapping[str, object], others: Mapping[str, object]) -> None:
    """Stop where one option would be ignored beside another."""
    given = [name for name, value in sources.items() if value]
    beside = [name for name, value in others.items() if value is not None]
    if len(given) > 1:
        raise DraftsmithError(
            "costs come from one source", where="command line", found=" and ".join(given), expected="one of them",
            mend=f"leave out {' and '.join(given[1:])}",
        )  # fmt: skip
    if not given and "--plain-url" in beside:
        raise DraftsmithError(
            "--plain-url alone measures nothing", where="command line",
            mend="name the server with the drafter too: --url URL",
        )  # fmt: skip
    useless = [name for name in beside if given and name not in COMPLETES[given[0]]]
    if given == ["--url"] and {"--plain-url", "--decode-ms"} <= set(beside):
        useless.append("--decode-ms")  # the plain server is measured
    if useless:
        raise DraftsmithError(
            f"{' and '.join(useless)} would be ignored beside {given[0]}", where="command line", found=", ".join([*given, *beside]),
            mend=f"leave out {' and '.join(useless)}, or {given[0]}",
        )  # fmt: skip


def _costs(decode: float | None, draft: float | None, verify: str | None, file: Path | None) -> list[Costs]:
    if file is not None:
        return read_costs(file)
    if decode is not None and draft is not None and verify is not None:
        return [make_costs(1, decode, draft, read_verify(verify))]
    raise DraftsmithError(
        "a forecast needs the costs of a plain decode, of one draft step and of verifying",
        where="command line",
        mend="pass --decode-ms, --draft-ms and --verify-ms together, or one of --costs FILE, --log FILE, --url URL",
    )


def side_by_side(forecasts: Sequence[Forecast], depths: tuple[int, int] = (2, 3)) -> Table | None:
    """Two depths beside each other at every batch size, and the best depth of all; None if none has both."""
    rows = []
    for entry in forecasts:
        known = {depth.steps: depth for depth in entry.depths}
        if not all(steps in known for steps in depths):
            continue
        row = [str(entry.costs.batch)]
        for steps in depths:
            one = known[steps]
            row += [
                f"{one.accept_length:.2f}",
                f"{one.round_ms:.1f}",
                f"{one.tokens_per_second:.1f}",
                f"{one.speedup:.2f}x",
            ]
        rows.append([*row, str(entry.best.steps) if entry.best else "none"])
    if not rows:
        return None
    columns = ["batch size"]
    for steps in depths:
        columns += [f"{steps} drafts: accept length", "round (ms)", "tokens/s", "speed-up"]
    return table("two depths side by side", [*columns, "best depth"], rows)


def _table(entry: Forecast) -> Table:
    rows = []
    for depth in entry.depths:
        mark = "<" if entry.best is not None and depth.steps == entry.best.steps else ""
        rows.append(
            [
                f"{depth.steps}{' *' if depth.extrapolated else ''}", f"{depth.accept_length:.2f}", f"{depth.break_even:.2f}",
                f"{depth.round_ms:.1f}", f"{depth.tokens_per_second:.1f}", f"{depth.speedup:.2f}x {mark}",
            ]
        )  # fmt: skip
    title = f"batch size {entry.costs.batch}: {1000 / entry.costs.decode:.1f} tokens/s a request without a drafter"
    columns = ["drafted", "accept length", "needed to break even", "round (ms)", "tokens/s", "speed-up"]
    return table(title, columns, rows)
