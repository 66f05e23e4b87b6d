"""Which windows of which conversations make each optimiser step, and which process takes which: pure arithmetic.

Everything here is a function of the store, the configuration and the seed, so that a resumed run, or one with another
number of processes, sees the same batches in the same order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.store import HarvestReader
from draftsmith.train.batch import MaskRule, Window, supervised, turns


@dataclass(frozen=True)
class WindowRef:
    """Rows [start, stop) of one conversation. `counts[i]` is the number of positions supervised at step i."""

    conversation: int
    start: int
    stop: int
    counts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.stop - self.start


def plan_windows(reader: HarvestReader, max_length: int, unroll_steps: int, rule: MaskRule) -> list[WindowRef]:
    """Cut every conversation into windows of at most `max_length` rows; windows without supervision are left out.

    A chain's labels may lie past its window (`load_window` reads on), so that a cut loses no supervised position.
    """
    windows = []
    for index in range(len(reader)):
        _, mask = reader.tokens(index)
        generated = mask.numpy()
        numbers = turns(generated)
        rows = [supervised(generated, numbers, step, rule) for step in range(unroll_steps)]
        for start in range(0, len(generated), max_length):
            stop = min(start + max_length, len(generated))
            counts = tuple(int(row[start:stop].sum()) for row in rows)
            if counts[0]:
                windows.append(WindowRef(index, start, stop, counts))
    if not windows:
        raise DraftsmithError(
            "no position of the store is supervised",
            where=reader.path,
            found=f"{len(reader)} conversations",
            expected="turns of at least two generated tokens",
            mend="draftsmith synthesize CONFIG, with a larger synthesize.max_new_tokens",
        )
    return windows


def epoch_batches(windows: list[WindowRef], batch_tokens: int, seed: int, epoch: int) -> list[list[WindowRef]]:
    """Shuffle by (seed, epoch) and fill batches up to `batch_tokens` rows; every window appears exactly once."""
    order = list(windows)
    random.Random(f"{seed}:{epoch}").shuffle(order)
    batches: list[list[WindowRef]] = [[]]
    room = batch_tokens
    for window in order:
        if batches[-1] and window.tokens > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(window)
        room -= window.tokens
    return batches


def deal(batch: list[WindowRef], hands: int) -> list[list[WindowRef]]:
    """Split one batch into `hands` parts of nearly equal rows (longest first, to the lightest). Parts may be empty."""
    parts: list[list[WindowRef]] = [[] for _ in range(hands)]
    loads = [0] * hands
    for window in sorted(batch, key=lambda w: (-w.tokens, w.conversation, w.start)):
        lightest = loads.index(min(loads))
        parts[lightest].append(window)
        loads[lightest] += window.tokens
    return parts


def step_counts(batch: list[WindowRef], unroll_steps: int) -> list[int]:
    """Supervised positions of each step over the whole batch: the global denominators of the loss."""
    return [sum(window.counts[step] for window in batch) for step in range(unroll_steps)]


def load_window(reader: HarvestReader, ref: WindowRef, unroll_steps: int) -> Window:
    """Read a window's rows, and the lookahead that its last chains need, from the store."""
    rows = slice(ref.start, min(reader.lengths[ref.conversation], ref.stop + unroll_steps + 1))
    conversation = reader.window(ref.conversation, rows.start, rows.stop)
    # turns are counted from the conversation's beginning
    generated = (reader.tokens(ref.conversation)[1] if rows.start else conversation.generated).numpy()
    import torch

    return Window(
        ids=conversation.input_ids,
        generated=conversation.generated,
        turn=torch.from_numpy(np.ascontiguousarray(turns(generated)[rows])),
        taps=conversation.taps,
        final=conversation.final,
        argmax=conversation.argmax,
        start=ref.start,
        stop=ref.stop,
        greedy=conversation.greedy,
    )
