"""What a run leaves to look at: report.png with its curves, and report.html with the curves, the figures and the set-up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.configs.files import read_json
from draftsmith.configs.page import Page
from draftsmith.configs.picture import picture
from draftsmith.configs.schema import RunConfig
from draftsmith.train.inputs import Inputs
from draftsmith.train.metrics import read_metrics
from draftsmith.train.shards import RECORD


def write_report(config: RunConfig, inputs: Inputs, provenance: Mapping[str, Any], best: Path) -> Path:
    """Write both files beside the metrics, replacing older ones; returns the HTML file."""
    folder = config.training
    rows = read_metrics(folder / "metrics.jsonl")
    draw_curves(rows, folder / "report.png")
    training = [row for row in rows if "loss" in row]
    heldout = [row for row in rows if "heldout_accept_length" in row]
    steps, draft_steps = config.train.unroll_steps, config.evaluate.draft_steps
    page = Page(f"Training of {config.name}", f"draftsmith {provenance['tool_version']}; best checkpoint: {best}")
    page.section("Held-out accept length").text(
        f"Greedy chains of {draft_steps} drafts on {len(inputs.heldout) if inputs.heldout else 0} conversations, walked as an "
        "engine does, bonus token included; accept_i is the chance that the first i+1 drafts are all right."
    )
    marked = json.loads((folder / "best.json").read_text())["checkpoint"] if (folder / "best.json").is_file() else None
    buckets = list(dict.fromkeys(name for row in heldout for name in row["heldout_by_context"]))
    page.table(
        ["step", f"accept_length@{draft_steps}", *(f"accept_{i}" for i in range(draft_steps)), *(f"context {b}" for b in buckets)],
        [
            [
                f"{row['step']:,}" + (" (best)" if marked and marked.endswith(f"{row['step']:08d}") else ""),
                f"{row['heldout_accept_length']:.3f}",
                *(f"{share:.3f}" for share in row["heldout_accept_per_position"]),
                *(f"{row['heldout_by_context'][b]:.3f}" if b in row["heldout_by_context"] else "-" for b in buckets),
            ]
            for row in heldout
        ],
    )  # fmt: skip
    page.section("Curves").picture(folder / "report.png", "loss and acceptance by unroll step, held-out accept length")
    if training:
        first, last = training[0], training[-1]
        page.section("By unroll step").text(
            f"Training positions, first logged row (step {first['step']:,}) and last one (step {last['step']:,})."
        )
        page.table(
            ["unroll step", "loss", "", "acc", "", "accept", ""],
            [
                [str(i), *(f"{row[key][i]:.3f}" for key in ("loss_i", "acc_i", "accept_i") for row in (first, last))]
                for i in range(steps)
            ],
        )
        page.section("Speed and data").table(["what", "value"], _data(inputs, folder) + _facts(training), left=True)
    page.section("Set-up").table(
        ["setting", "value"],
        [[f"train.{key}", value] for key, value in config.train.model_dump(mode="json").items()]
        + [[f"drafter.{key}", value] for key, value in inputs.spec.model_dump(mode="json").items()]
        + [["target", config.target.path], ["store", json.dumps(provenance["store"])]],
        left=True,
    )
    file = folder / "report.html"
    page.write(file)
    return file


def _data(inputs: Inputs, folder: Path) -> list[list[str]]:
    damaged = read_json(folder / RECORD, what="the run's record of shards")["damaged"]
    return [
        ["data", f"{len(inputs.train):,} conversations, {sum(inputs.train.lengths):,} tokens"],
        ["damaged shards left out", ", ".join(damaged) or "none"],
    ]


def _facts(rows: list[dict[str, Any]]) -> list[list[str]]:
    rates = sorted(row["tokens_per_second"] for row in rows)
    steady = sorted(rows[1:] or rows, key=lambda row: row["mfu"])
    middle = steady[len(steady) // 2]
    facts = [
        ["tokens a second, median of logged rows", f"{rates[len(rates) // 2]:,.0f}"],
        ["model FLOPs utilisation, median", f"{middle['mfu']:.1%}"],
        ["share of time waiting for data, largest after the first row", f"{max(row['waiting'] for row in steady):.1%}"],
        ["positions supervised at step 0, share of tokens", f"{sum(r['supervised'] for r in rows) / len(rows):.1%}"],
        ["labels outside the draft vocabulary", f"{sum(r['outside'] for r in rows) / len(rows):.1%}"],
        ["largest gradient norm", f"{max(row['grad_norm_max'] for row in rows):.3g}"],
    ]
    if "peak_memory" in rows[-1]:
        facts.append(["peak memory of the first process's GPU", f"{rows[-1]['peak_memory'] / 2**30:.1f} GiB"])
    return facts


def draw_curves(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw metrics.jsonl rows into a PNG, which replaces an older one whole."""
    training = [row for row in rows if "loss" in row]
    heldout = [row for row in rows if "heldout_accept_length" in row]
    with picture(file, columns=3, size=(15, 4)) as (left, middle, right):
        steps = [row["step"] for row in training]
        for index in range(len(training[0]["loss_i"]) if training else 0):
            left.plot(steps, [row["loss_i"][index] for row in training], label=f"step {index}", linewidth=1)
            middle.plot(
                steps, [row["accept_i"][index] for row in training], label=f"first {index + 1} right", linewidth=1
            )
        right.plot(
            [row["step"] for row in heldout],
            [row["heldout_accept_length"] for row in heldout],
            marker="o",
            label="held-out, as served",
        )
        right.plot(
            steps,
            [row["accept_length"] for row in training],
            linewidth=1,
            label="training, all positions, all unroll steps",
        )
        titles = ("loss by unroll step (nats)", "accept_i, training", "accept length, bonus token included")
        for axis, title in zip((left, middle, right), titles, strict=True):
            axis.set_title(title)
            axis.set_xlabel("optimiser step")
            axis.grid(alpha=0.3)
            axis.legend(fontsize="small")
