"""Batches for one process, read from the store one step ahead of the computation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from draftsmith.configs.schema import TrainSection
from draftsmith.data.store import HarvestReader
from draftsmith.train.batch import Batch, pack
from draftsmith.train.plan import WindowRef, deal, epoch_batches, load_window, step_counts


@dataclass(frozen=True)
class Share:
    """This process's share of one optimiser step.

    Attributes:
        batches: one packed batch a micro-step; None where the step has fewer windows than shares.
        filler: a batch that stands in for None, with its loss weighted 0, so that all processes do equal work.
        counts: global supervised positions of each unroll step, over all processes and micro-steps.
        tokens: rows of the whole step.
        epoch: number of the pass over the data, from 0.
    """

    batches: list[Batch | None]
    filler: Batch
    counts: list[int]
    tokens: int
    epoch: int


class Loader:
    """Plans every step of a run up front; `steps(first)` yields this process's shares from optimiser step `first` on."""

    def __init__(
        self,
        reader: HarvestReader,
        windows: list[WindowRef],
        settings: TrainSection,
        *,
        rank: int,
        processes: int,
        accumulation: int,
    ) -> None:
        self.reader, self.settings = reader, settings
        self.rank, self.processes, self.accumulation = rank, processes, accumulation
        self.plan = [
            (epoch, batch)
            for epoch in range(settings.epochs)
            for batch in epoch_batches(windows, settings.batch_tokens, settings.seed, epoch)
        ]
        self.filler = self._pack([min(windows, key=lambda w: (w.tokens, w.conversation, w.start))])

    def __len__(self) -> int:
        return len(self.plan)

    def tokens(self, first: int = 0) -> int:
        """Rows of all steps from `first` on."""
        return sum(window.tokens for _, batch in self.plan[first:] for window in batch)

    def steps(self, first: int) -> Iterator[Share]:
        """Shares in order; the next one is read while the caller computes."""
        with ThreadPoolExecutor(max_workers=1) as pool:
            waiting = pool.submit(self._share, first) if first < len(self.plan) else None
            for step in range(first, len(self.plan)):
                assert waiting is not None
                share = waiting.result()
                waiting = pool.submit(self._share, step + 1) if step + 1 < len(self.plan) else None
                yield share

    def _share(self, step: int) -> Share:
        epoch, windows = self.plan[step]
        hands = deal(windows, self.processes * self.accumulation)
        mine = hands[self.rank * self.accumulation : (self.rank + 1) * self.accumulation]
        return Share(
            batches=[self._pack(hand) if hand else None for hand in mine],
            filler=self.filler,
            counts=step_counts(windows, self.settings.unroll_steps),
            tokens=sum(window.tokens for window in windows),
            epoch=epoch,
        )

    def _pack(self, windows: list[WindowRef]) -> Batch:
        steps = self.settings.unroll_steps
        return pack([load_window(self.reader, window, steps) for window in windows], steps, self.settings.mask)
