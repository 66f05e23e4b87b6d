"""A store's states against the target's own, harvested on the spot: which layers they are, and which final state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from draftsmith.accept.spot import Spot
from draftsmith.data.store import HarvestReader

REHARVEST = "rm -r STORE; draftsmith harvest CONFIG, then draftsmith train CONFIG again"


class Finding(BaseModel):
    """Something wrong: what, why it is thought so, by which number, and what to do."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    cause: str
    number: str
    mend: str


def store_findings(reader: HarvestReader, spots: Sequence[Spot], most: int = 8) -> list[Finding]:
    """Compare stored taps and final states with every reading of them; what fits another reading better is a finding.

    Rounding of the store hides no neighbour: over thousands of values the nearest reading is the true one, although two
    layers may differ by less than one rounding.
    """
    by_id = {spot.id: spot for spot in spots}
    pairs = [(reader[place], by_id[name]) for place, name in enumerate(reader.ids) if name in by_id][:most]
    pairs = [(stored, spot) for stored, spot in pairs if torch.equal(stored.input_ids, _own(spot))]
    if not pairs:
        return []
    found, mend = [], REHARVEST.replace("STORE", str(reader.path))
    for place, tap in enumerate(reader.manifest.taps):
        errors = {}
        for layer in sorted(spots[0].layers):
            errors[f"the residual stream entering layer {layer}"] = _distance(
                [(stored.taps[:, place], spot.layers[layer]) for stored, spot in pairs]
            )
        if tap not in spots[0].layers:
            continue
        for shift in (-1, 1):
            errors[f"that of index t{shift:+d}"] = _distance(
                [(stored.taps[:, place], spot.layers[tap].roll(-shift, 0)) for stored, spot in pairs]
            )
        found += _judge(f"stored tap {tap}", f"the residual stream entering layer {tap}", errors, mend)
    true = "the state after the final norm"
    errors = {
        true: _distance([(stored.final, spot.final) for stored, spot in pairs]),
        "the state before the final norm": _distance([(stored.final, spot.unnormed) for stored, spot in pairs]),
        "that of index t-1": _distance([(stored.final, spot.final.roll(1, 0)) for stored, spot in pairs]),
        "that of index t+1": _distance([(stored.final, spot.final.roll(-1, 0)) for stored, spot in pairs]),
    }
    return found + _judge("stored final states", true, errors, mend)


def _own(spot: Spot) -> Tensor:
    return spot.ids[: len(spot.ids) - spot.added]


def _distance(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Root of the squared difference as a share of the target's own values; the first token is an outlier and left out."""
    gap = sum(float((stored.float() - true[: len(stored)].float())[1:-1].square().sum()) for stored, true in pairs)
    scale = sum(float(true[: len(stored)].float()[1:-1].square().sum()) for stored, true in pairs)
    return float((gap / scale) ** 0.5) if scale else 0.0


def _judge(what: str, expected: str, errors: dict[str, float], mend: str) -> list[Finding]:
    best = min(errors, key=lambda name: errors[name])
    if best == expected:
        return []
    return [
        Finding(
            name=f"{what} is another state", cause=f"the {what} {'are' if what.endswith('s') else 'is'} {best}, not {expected}",
            number=f"differs from it by {errors[best]:.2%}, from {expected} by {errors[expected]:.2%}", mend=mend,
        )
    ]  # fmt: skip
