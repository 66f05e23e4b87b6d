"""`draftsmith forecast`: the tables, the verdict, the picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

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


def forecast_command(
    acceptance: str,
    *,
    decode_ms: float | None,
    draft_ms: float | None,
    verify_ms: str | None,
    costs: Path | None,
    most: int,
    png: Path | None,
    as_json: bool,
) -> list[Forecast]:
    """Print a table a batch size and the verdicts; write the picture if a file is named."""
    if not 1 <= most <= 64:
        raise DraftsmithError("the depth must be 1 to 64", where="--steps", found=most)
    accept = read_accept(acceptance)
    forecasts = [forecast(accept, entry, most) for entry in _costs(decode_ms, draft_ms, verify_ms, costs)]
    if as_json:
        rows = [
            {**asdict(entry), "best": entry.best.steps if entry.best else None, "verdict": entry.verdict}
            for entry in forecasts
        ]
        out.print(json.dumps(rows, indent=2), markup=False, highlight=False)
    else:
        for entry in forecasts:
            out.print(_table(entry))
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


def _costs(decode: float | None, draft: float | None, verify: str | None, file: Path | None) -> list[Costs]:
    by_hand = [value for value in (decode, draft, verify) if value is not None]
    if file is not None and not by_hand:
        return read_costs(file)
    if file is None and len(by_hand) == 3:
        assert decode is not None and draft is not None and verify is not None
        return [make_costs(1, decode, draft, read_verify(verify))]
    raise DraftsmithError(
        "a forecast needs the costs of a plain decode, of one draft step and of verifying",
        where="command line",
        mend="pass --decode-ms, --draft-ms and --verify-ms together, or --costs FILE alone",
    )


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
