"""What the `store` verbs print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from draftsmith.configs.console import closing, out, table
from draftsmith.configs.plan import size
from draftsmith.data.store import HarvestReader
from draftsmith.data.store_check import check_store
from draftsmith.data.store_stats import draw, store_stats


def check_command(path: Path, guard: Callable[[HarvestReader], str] | None, *, as_json: bool) -> bool:
    """Print the checks; whether all of them hold."""
    findings = check_store(path, guard)
    if as_json:
        out.print_json(json.dumps([vars(one) for one in findings]))
    else:
        rows = [[one.name, "yes" if one.passed else "NO", one.detail] for one in findings]
        out.print(table(f"store {path}", ["check", "holds", "found"], rows, left=True))
    return all(one.passed for one in findings)


def stats_command(path: Path, vocab: Path | None, png: Path | None, *, as_json: bool) -> None:
    """Print the figures, and draw them."""
    stats = store_stats(path, vocab)
    record = stats.record()
    if as_json:
        out.print_json(json.dumps(record))
    else:
        length = record["length"]
        rows = [
            ["conversations", f"{record['conversations']:,}"],
            ["tokens", f"{stats.tokens:,}, of which generated {record['generated_share']:.1%}"],
            ["length", f"mean {record['mean_length']}, " + ", ".join(f"{name} {length[name]:,}" for name in length)],
            ["disk", f"{size(stats.bytes)} in {stats.shards:,} shards, {record['bytes_per_token']} bytes a token, {stats.codec}"],
            ["distinct generated", f"{stats.distinct:,}"],
            ["best coverage", ", ".join(f"{count:,}: {share:.2%}" for count, share in stats.best.items())],
        ]  # fmt: skip
        if stats.coverage is not None:
            rows.append(["coverage of the draft vocabulary", f"{stats.coverage:.2%}"])
        out.print(table(f"store {path}", ["what", "value"], rows, left=True))
    if png is not None:
        draw(stats, png)
        closing(str(png))
