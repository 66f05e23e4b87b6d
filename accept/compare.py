"""Predicted beside served: the same requests, the same depth, per position, and request by request.

An engine counts the drafts that its last step accepts beyond the end of an answer (a stop token or max_new_tokens); the
replay has no label there and does not. Where histograms of single requests are known that excess is taken off first, and
what is left should be equal: `Excess` says how. A request is *exact* when its histogram is then the predicted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from draftsmith.accept.requests import Request
from draftsmith.configs.errors import DraftsmithError
from draftsmith.train.evaluate import Chains, walk

LENGTH_TOLERANCE = 0.02
"""|predicted - served| / served of the accept length."""

POSITION_TOLERANCE = 0.03
"""The same of each accept_i."""

FEW = 3.0
"""Chains: a position may differ by this many whatever its share, since one near-tie moves that many."""


class Counted(BaseModel):
    """Acceptance over some verify steps; bonus token included in accept_length."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    accept_length: float
    accept_per_position: list[float]
    verify_steps: int


class Comparison(BaseModel):
    """What serve-check concludes from counters.

    Attributes:
        predicted: by replay of the requests that were served.
        served: by the engine's counters, as it counts.
        within: served, without what the last steps accepted beyond an answer's end; None if single requests are unknown.
        length_difference, position_differences: (predicted - served) / served, of `within` where it is known; a position's
            is None where something was predicted and nothing served, which no share can say.
        exact, inexact: requests whose histogram is, is not the predicted one; of those that answered as harvested.
        other_text: requests whose answer is not the harvested one, so that the prediction is of another text.
        agrees: every difference is within its tolerance.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: int
    predicted: Counted
    served: Counted
    within: Counted | None
    length_difference: float
    position_differences: list[float | None]
    exact: int
    inexact: int
    other_text: int
    agrees: bool


def predicted_steps(
    chains: Mapping[int, Chains], numbers: Mapping[str, int], requests: Sequence[Request], depth: int
) -> dict[str, list[int]]:
    """Request id -> accepted drafts of each verify step, by replay.

    Args:
        chains: of a store's conversations, by number, at least `depth` deep.
        numbers: conversation id -> number in the store.
    """
    walked: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    steps: dict[str, list[int]] = {}
    for request in requests:
        number = numbers.get(request.conversation)
        if number is None:
            raise DraftsmithError(
                "a conversation is not in the held-out store", where=request.conversation,
                mend="draftsmith harvest CONFIG --split heldout",
            )  # fmt: skip
        if number not in chains:  # no turn of it is long enough for a chain
            steps[request.id] = []
            continue
        if number not in walked:
            capped = chains[number].capped(depth)
            places = walk(capped)
            walked[number] = capped.starts[places], capped.accepted[places]
        starts, accepted = walked[number]
        own = (starts + 1 >= request.start) & (starts + 1 < request.end)
        steps[request.id] = accepted[own].tolist()
    return steps


def compare(
    predicted: Mapping[str, Sequence[int]], requests: Sequence[Request], spec: Mapping[str, Any], depth: int
) -> Comparison:
    """Set prediction and served counters side by side.

    Args:
        predicted: from `predicted_steps`.
        spec: a served result's part with the drafter: totals, and `outputs` with output_ids and, where the engine
            tells, histogram.
    """
    histograms = [np.bincount(predicted[one.id], minlength=depth + 1) for one in requests]
    forecast = counted(np.sum(histograms, axis=0))
    served = Counted(
        accept_length=spec["accept_length"],
        accept_per_position=spec["accept_per_position"],
        verify_steps=spec["verify_steps"],
    )
    outputs = {output["id"]: output for output in spec["outputs"]}
    exact = inexact = other = 0
    total: np.ndarray | None = np.zeros(depth + 1, dtype=np.int64)
    for request, ours in zip(requests, histograms, strict=True):
        output = outputs[request.id]
        same_text = tuple(output["output_ids"]) == request.answer
        other += not same_text
        if output.get("histogram") is None:
            total = None
            continue
        cut = without_excess(
            output["histogram"], len(output["output_ids"]), predicted[request.id], output.get("per_step")
        )[: depth + 1]  # behind which an engine may list zeros
        if total is not None:
            total = total + cut
        if same_text:
            matches = bool((cut == ours).all())
            exact, inexact = exact + matches, inexact + (not matches)
    within = None if total is None else counted(total)
    reference = within or served
    length = (forecast.accept_length - reference.accept_length) / reference.accept_length
    positions = [
        relative(p, s) for p, s in zip(forecast.accept_per_position, reference.accept_per_position, strict=True)
    ]
    few = FEW / max(1, reference.verify_steps) + _ends(within, served, len(requests))
    close = [
        (difference is not None and abs(difference) <= POSITION_TOLERANCE) or abs(p - s) <= few
        for difference, p, s in zip(positions, forecast.accept_per_position, reference.accept_per_position, strict=True)
    ]
    return Comparison(
        steps=depth,
        predicted=forecast,
        served=served,
        within=within,
        length_difference=length,
        position_differences=positions,
        exact=exact,
        inexact=inexact,
        other_text=other,
        agrees=abs(length) <= LENGTH_TOLERANCE and all(close),
    )


def without_excess(
    histogram: Sequence[int], tokens: int, predicted: Sequence[int], per_step: Sequence[int] | None = None
) -> np.ndarray:
    """A request's histogram with its last step cut at the end of the answer, as the replay counts it.

    The steps gave 1 + sum h[i] (i + 1) tokens, of which `tokens` are the answer. If o of them lie beyond its end, the
    last step accepted a drafts of which a + 1 - o are part of the answer (o = 0 and 1: all of them). Which a that was
    `per_step` says; else the one that the prediction implies, if the engine counted such a step.
    """
    cut = np.array(histogram, dtype=np.int64)
    over = 1 + int((cut * np.arange(1, len(cut) + 1)).sum()) - tokens
    if over < 2:
        return cut
    choices = [per_step[-1]] if per_step else [predicted[-1] + over - 1] if predicted else []
    choices += [accepted for accepted in range(len(cut) - 1, over - 2, -1) if cut[accepted]]
    last = next((accepted for accepted in choices if over - 1 <= accepted < len(cut) and cut[accepted]), None)
    if last is not None:
        cut[last] -= 1
        cut[last + 1 - over] += 1
    return cut


def counted(histogram: np.ndarray) -> Counted:
    """Acceptance of a histogram: entry i counts verify steps with i accepted drafts."""
    steps = int(histogram.sum())
    shares = [float(histogram[i + 1 :].sum()) / max(1, steps) for i in range(len(histogram) - 1)]
    return Counted(accept_length=1 + sum(shares), accept_per_position=shares, verify_steps=steps)


def relative(predicted: float, served: float) -> float | None:
    """(predicted - served) / served; None where that is no number."""
    return (predicted - served) / served if served else 0.0 if predicted == served else None


def difference_text(difference: float | None) -> str:
    """A difference as tables show it."""
    return "none served" if difference is None else f"{difference:+.2%}"


def worst_difference(comparison: Comparison) -> str:
    """The largest difference in words; a position at which nothing was accepted is larger than any share."""
    if None in comparison.position_differences:
        place = comparison.position_differences.index(None)
        share = comparison.predicted.accept_per_position[place]
        which = f"the first {place + 1} drafts" if place else "the first draft"
        return f"{which} never right as served, in {share:.1%} of the verify steps as predicted"
    shares = [share for share in comparison.position_differences if share is not None]
    return f"by {max([comparison.length_difference, *shares], key=abs):+.1%} at most"


def _ends(within: Counted | None, served: Counted, requests: int) -> float:
    """What the ends of answers may add to a position's share where single requests are unknown."""
    return 0.0 if within is not None else requests / max(1, served.verify_steps) * 0.5
