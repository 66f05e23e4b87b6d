"""What stops a run that has gone wrong: a loss or gradient that is not finite, or a loss that has left its course."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.train.step import Figures

IN_A_ROW = 3
"""Logged losses above the limit, one after the other, that make a divergence."""


def stop_not_finite(figures: Figures, first: int, conversations: Callable[[int], Sequence[str]]) -> None:
    """Look at each optimiser step since the last look.

    Args:
        figures: of the steps first, first + 1, ...
        conversations: ids of the conversations in a step.

    Raises:
        DraftsmithError: the first step whose loss or gradient norm is not finite, with its conversations.
    """
    for index, (loss, norm) in enumerate(zip(figures.losses, figures.norms, strict=True)):
        for label, value in (("loss", loss), ("gradient's norm", norm)):
            if not math.isfinite(value):
                raise DraftsmithError(
                    f"training stopped: the {label} is not finite",
                    where=f"step {first + index + 1}, conversations {', '.join(conversations(first + index))}",
                    found=value,
                    mend="look at these conversations (draftsmith inspect CONFIG --conversation ID), or lower "
                    "train.learning_rate; the last checkpoint is untouched",
                )


def stop_diverged(rows: Sequence[dict[str, Any]], limit: float, batch: Sequence[str]) -> None:
    """Compare the last logged losses with the lowest level that as many in a row held: one lucky batch sets no standard.

    Args:
        rows: of metrics.jsonl with a loss, in order.
        limit: multiple of that level.
        batch: ids of the conversations in the last step.

    Raises:
        DraftsmithError: the last IN_A_ROW losses are all above the limit.
    """
    losses = [row["loss"] for row in rows]
    if len(losses) <= IN_A_ROW:
        return
    before, last = losses[:-IN_A_ROW], losses[-IN_A_ROW:]
    lowest = min(max(before[first : first + IN_A_ROW]) for first in range(max(1, len(before) - IN_A_ROW + 1)))
    if min(last) > limit * lowest:
        raise DraftsmithError(
            "training stopped: the loss diverges",
            where=f"steps {rows[-IN_A_ROW]['step']} to {rows[-1]['step']}; the last one's conversations {', '.join(batch)}",
            found=", ".join(f"{loss:.4g}" for loss in last),
            expected=f"at most {limit:g} times the lowest level of {IN_A_ROW} logged losses, {lowest:.4g} (train.stop_above)",
            mend="lower train.learning_rate and start afresh under another name",
        )
