"""The teacher guard as `draftsmith store check` uses it: over a store, without a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from draftsmith.configs.schema import TrainSection
from draftsmith.configs.target import read_target
from draftsmith.data.store import HarvestReader
from draftsmith.train.guard import check_teacher


def teacher_of(path: Path) -> Callable[[HarvestReader], str]:
    """Says how well stored states reproduce the text of the target at `path`; raises where training would refuse them."""
    target = read_target(path)
    head, norm = target.require("head").load(), target.require("final_norm").load()

    def guard(reader: HarvestReader) -> str:
        threshold = TrainSection().guard_threshold
        report = check_teacher(reader, head, norm, target.rms_norm_eps, threshold)
        said = []
        if report.agreement is not None:
            said.append(f"{report.agreement:.1%} of {report.greedy_positions:,} greedy tokens reproduced")
        if report.logprob_gap is not None:
            said.append(f"{report.logprob_gap:.3f} nats off over {report.sampled_positions:,} sampled tokens")
        return "; ".join(said)

    return guard
