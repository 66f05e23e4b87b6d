"""How fast are greedy chains replayed, beside the trainer's forward pass over the same conversations in the same run?

    python scripts/bench_evaluate.py CONFIG [key=value ...] [--drafter DIR] [--tokens N] [--rounds N]

Needs a run's held-out store and a converted drafter. Both sides take the same windows, batches, steps and dtype
(float32, as `draftsmith evaluate` computes); the trainer's side is its unroll with the loss and without gradients. Rounds
take turns and the fastest counts; the first of each is dropped, for it compiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch

from draftsmith.accept.evaluate import device, draft_targets
from draftsmith.configs.console import out, run_script
from draftsmith.configs.schema import load_config
from draftsmith.configs.target import read_target
from draftsmith.convert.engine_forward import load_drafter
from draftsmith.convert.read import read_drafter
from draftsmith.data.store import HarvestReader
from draftsmith.train.batch import pack
from draftsmith.train.evaluate import by_budget, draft_chains
from draftsmith.train.plan import load_window, plan_windows
from draftsmith.train.unroll import Unroll, loss_coefficients


def main() -> None:
    """Time both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    target = read_target(config.target.path)
    canonical = read_drafter(options.drafter or config.drafter_folder, target)
    drafter, targets = load_drafter(canonical, target).to(device()), draft_targets(canonical).to(device())
    steps, limit = config.evaluate.draft_steps, config.evaluate.batch_tokens
    reader = HarvestReader(config.store("heldout"))
    windows = plan_windows(reader, max(reader.lengths), steps, "aligned")
    ends = accumulate(window.tokens for window in windows)
    chosen = [w for w, end in zip(windows, ends, strict=True) if end - w.tokens < options.tokens]
    groups, tokens = by_budget(chosen, limit), sum(window.tokens for window in chosen)
    head = target.require("head").load().float().to(device())
    unroll = Unroll(drafter, head[targets], targets)

    def batches():
        for group in groups:
            read = [load_window(reader, one, steps) for one in group]
            table = None if device().type == "cpu" else drafter.embedding
            yield pack(read, steps, embedding=table).to(device())

    def replayed() -> None:
        for batch in batches():
            draft_chains(drafter, targets, batch, None)

    def forward() -> None:
        with torch.no_grad():
            for batch in batches():
                unroll(batch, loss_coefficients([len(rows.active) for rows in batch.steps], 0.8))

    fastest = {replayed: float("inf"), forward: float("inf")}
    for round_ in range(options.rounds + 1):
        for side in (replayed, forward):
            seconds = timed(side)
            if round_:
                fastest[side] = min(fastest[side], seconds)
    where = torch.cuda.get_device_name() if device().type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    out.print(f"{tokens:,} held-out tokens, {steps} steps, float32, {where}")
    out.print(f"replay of greedy chains  {fastest[replayed]:8.2f} s {tokens / fastest[replayed]:12,.0f} tokens/s")
    out.print(f"the trainer's forward    {fastest[forward]:8.2f} s {tokens / fastest[forward]:12,.0f} tokens/s")
    out.print(f"replay is {fastest[forward] / fastest[replayed]:.2f} times as fast as the forward pass")


def timed(work: Callable[[], None]) -> float:
    """Seconds, with the device's queue empty before and after."""
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    run_script(main, __doc__, 1)
