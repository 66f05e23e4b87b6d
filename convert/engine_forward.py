"""Our forward against an engine's own, on the same files and the same inputs: prefill, then one draft after another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.configs.target import Target
from draftsmith.convert.canonical import EMBEDDING, CanonicalDrafter
from draftsmith.convert.tensors import read_array, to_float32
from draftsmith.train.attention import Segments
from draftsmith.train.model import Drafter


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference of one step's `what` (logits or hidden state), beside the engine's largest value."""

    step: str
    what: str
    absolute: float
    scale: float

    @property
    def relative(self) -> float:
        """`absolute` as a share of the engine's largest value; infinite where one side is no number."""
        share = self.absolute / self.scale if self.scale else self.absolute
        return math.inf if math.isnan(share) else share


def load_drafter(canonical: CanonicalDrafter, target: Target) -> Drafter:
    """The drafter as a float32 module, with the embedding that engines give it."""
    own = canonical.tensors.get(EMBEDDING)
    embedding = target.require("embedding").load().float() if own is None else _read(canonical, EMBEDDING)
    drafter = Drafter(canonical.spec, embedding)
    drafter.load_state_dict({name: _read(canonical, name) for name in canonical.spec.trainable_shapes()})
    return drafter


def _read(canonical: CanonicalDrafter, name: str) -> Tensor:
    tensor = canonical.tensors[name]
    return torch.from_numpy(to_float32(read_array(tensor), tensor.dtype))


@torch.no_grad()
def compare(drafter: Drafter, golden: Mapping[str, Tensor]) -> list[Difference]:
    """Replay what an engine computed; one difference for every step and output, in order.

    Args:
        drafter: float32.
        golden: `features` (T, taps * H), `token_ids` and `positions` (T + later steps,), and the engine's
            `prefill_logits` (T, D), `prefill_hidden` (T, hidden), `logits` (steps, D), `hidden` (steps, hidden).
    """
    count, taps = len(golden["features"]), len(drafter.spec.taps)
    ids, positions = golden["token_ids"], golden["positions"]
    features = golden["features"].view(count, taps, -1)
    fed, cache = drafter.begin(features, ids, len(golden["logits"]))
    segments = Segments.of([0, count], [0, count], torch.arange(count))
    slots = torch.arange(len(ids))
    hidden, read = drafter.step(slots[:count], fed, positions[:count], None, cache, segments)
    differences = _differences("prefill", drafter, read, hidden, golden["prefill_logits"], golden["prefill_hidden"])
    last = torch.tensor([count - 1])
    hidden = hidden[last]
    segments = Segments.of([0, count], [0, 1], last)
    for step in range(1, len(golden["logits"])):
        at = slice(count + step - 1, count + step)
        hidden, read = drafter.step(slots[at], hidden, positions[at], None, cache, segments)
        differences += _differences(
            f"recurrent step {step}", drafter, read, hidden, golden["logits"][step : step + 1], golden["hidden"][step : step + 1]
        )  # fmt: skip
    return differences


def _differences(
    step: str, drafter: Drafter, read: Tensor, hidden: Tensor, logits: Tensor, state: Tensor
) -> list[Difference]:
    pairs = (("logits", drafter.lm_head(read), logits), ("hidden", hidden, state))
    return [
        Difference(step, what, float((ours - theirs).abs().max()), float(theirs.abs().max()))
        for what, ours, theirs in pairs
    ]
