"""Batches for one process, read from the store ahead of the computation by a few threads, in order."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.schema import TrainSection
from draftsmith.data.store import HarvestReader
from draftsmith.train.batch import Batch, each_tensor, pack
from draftsmith.train.flops import step_flops
from draftsmith.train.plan import WindowRef, deal, epoch_batches, load_window, step_counts


@dataclass(frozen=True)
class Share:
    """This process's share of one optimiser step.

    Attributes:
        batches: one packed batch a micro-step; None where the step has fewer windows than shares.
        filler: a batch that stands in for None, with its loss weighted 0, where all processes must do equal work; else
            None, and nothing is computed.
        counts: global supervised positions of each unroll step, over all processes and micro-steps.
        tokens: rows of the whole step.
        flops: counted work of this process.
        epoch: number of the pass over the data, from 0.
    """

    batches: list[Batch | None]
    filler: Batch | None
    counts: list[int]
    tokens: int
    flops: int
    epoch: int


class Loader:
    """Plans every step of a run up front; `steps(first)` yields this process's shares from optimiser step `first` on.

    Args:
        windows: as `plan_windows` cuts them, none longer than the token budget of a step.
        fill: back ends that synchronise processes, or count micro-steps, need a backward pass in each of them.
        pin: put batches into page-locked memory, from which copies to a GPU overlap with its work.
        embedding: (V, hidden): batches carry the rows that they need, since the device does not hold it.
    """

    def __init__(
        self,
        reader: HarvestReader,
        windows: list[WindowRef],
        settings: TrainSection,
        spec: DrafterSpec,
        *,
        rank: int,
        processes: int,
        accumulation: int,
        fill: bool = True,
        pin: bool = False,
        embedding: Tensor | None = None,
    ) -> None:
        self.reader, self.settings, self.spec, self.pin, self.embedding = reader, settings, spec, pin, embedding
        self.rank, self.processes, self.accumulation = rank, processes, accumulation
        self.plan = [
            (epoch, batch)
            for epoch in range(settings.epochs)
            for batch in epoch_batches(windows, settings.batch_tokens, settings.seed, epoch)
        ]
        smallest = min(windows, key=lambda w: (w.tokens, w.conversation, w.start))
        self.filler = self._pack([smallest])[0] if fill else None

    def __len__(self) -> int:
        return len(self.plan)

    def tokens(self, first: int = 0) -> int:
        """Rows of all steps from `first` on."""
        return sum(window.tokens for _, batch in self.plan[first:] for window in batch)

    def mark(self) -> int:
        """A checksum of the first pass over the data, which must be one on all processes; the others follow from it."""
        return zlib.crc32(repr([batch for epoch, batch in self.plan if epoch == 0]).encode())

    def conversations(self, step: int) -> list[str]:
        """Ids of the conversations in a step, each once."""
        return list(dict.fromkeys(self.reader.ids[window.conversation] for window in self.plan[step][1]))

    def steps(self, first: int) -> Iterator[Share]:
        """Shares in order; `prefetch` later ones are read while the caller computes."""
        pool = ThreadPoolExecutor(max_workers=self.settings.prefetch)
        waiting: deque[Future[Share]] = deque()
        ahead = iter(range(first, len(self.plan)))
        try:
            for step in ahead:
                waiting.append(pool.submit(self._share, step))
                if len(waiting) > self.settings.prefetch:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _share(self, step: int) -> Share:
        epoch, windows = self.plan[step]
        hands = deal(windows, self.processes * self.accumulation)
        mine = hands[self.rank * self.accumulation : (self.rank + 1) * self.accumulation]
        packed = [self._pack(hand) if hand else (None, 0) for hand in mine]
        return Share(
            batches=[batch for batch, _ in packed],
            filler=self.filler,
            counts=step_counts(windows, self.settings.unroll_steps),
            tokens=sum(window.tokens for window in windows),
            flops=sum(flops for _, flops in packed),
            epoch=epoch,
        )

    def _pack(self, refs: list[WindowRef]) -> tuple[Batch, int]:
        """The packed batch and its counted work."""
        steps, rule = self.settings.unroll_steps, self.settings.mask
        windows = [load_window(self.reader, ref, steps) for ref in refs]
        batch = pack(windows, steps, rule, self.embedding)
        flops = step_flops(self.spec, windows, steps, rule)
        return each_tensor(batch, Tensor.pin_memory) if self.pin else batch, flops


def same_everywhere(accelerator: Any, value: int) -> bool:
    """Whether all processes hold the same number; a collective call."""
    found = accelerator.gather(torch.tensor([value], dtype=torch.int64, device=accelerator.device)).tolist()
    return len(set(found)) == 1
