"""Curves of a training run as one picture: loss, acceptance by unroll step, held-out accept length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.configs.picture import picture


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
