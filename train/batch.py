"""One packed batch on the device: rows of several conversation windows without padding, and what each step supervises.

The alignment lives here and nowhere else: at index t, step i feeds x[t+1+i], is taught by the target's state at
t+1+i, and has the label x[t+2+i].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from draftsmith.train.attention import Segments
from draftsmith.train.loss import Lessons, arrange

MaskRule = Literal["aligned", "upstream"]


@dataclass(frozen=True)
class Window:
    """Rows of one conversation, as the store holds them, from `start` to its end or to the lookahead past `stop`.

    Attributes:
        ids: int64 (rows,), x.
        generated: bool (rows,), True where the target wrote the token.
        turn: int64 (rows,), number of the turn that a token belongs to; a chain never crosses from one to the next.
        taps: (rows, K, H), R at the taps.
        final: (rows, H), N.
        argmax: int64 (rows,), the target's most likely next token.
        start: index of the first row within the conversation (its RoPE position).
        stop: rows from this index on are lookahead: labels and teachers, never a chain's start.
        greedy: the text is the target's greedy answer, so labels are x itself; else labels are argmax.
    """

    ids: Tensor
    generated: Tensor
    turn: Tensor
    taps: Tensor
    final: Tensor
    argmax: Tensor
    start: int
    stop: int
    greedy: bool


@dataclass(frozen=True)
class StepRows:
    """What step i works on; n_i rows, a subset of the step before.

    Attributes:
        keep: int64 (n_i,), indices into the rows of the step before (of step 0: into the packed key rows).
        ids: int64 (n_i,), tokens fed; at step 0 for every key row.
        positions: int64, RoPE positions of the rows in `ids`.
        labels: int64 (n_i,), target ids that a right draft must equal.
        segments: for attention.
    """

    keep: Tensor
    ids: Tensor
    positions: Tensor
    labels: Tensor
    segments: Segments


@dataclass(frozen=True)
class Batch:
    """Packed windows: taps (M, K, H) of key rows, final (R, H) of all rows, the rows of each unroll step, and which row of
    `final` teaches which of their drafts."""

    taps: Tensor
    final: Tensor
    steps: list[StepRows]
    lessons: Lessons

    def to(self, device: torch.device) -> Batch:
        """Copy every tensor to `device`."""

        def move(value: Tensor) -> Tensor:
            return value.to(device, non_blocking=True)

        steps = [
            StepRows(
                move(step.keep), move(step.ids), move(step.positions), move(step.labels),
                Segments(step.segments.key_bounds, step.segments.query_bounds, move(step.segments.visible)),
            )
            for step in self.steps
        ]  # fmt: skip
        lessons = Lessons(
            move(self.lessons.order), move(self.lessons.taught), move(self.lessons.place), self.lessons.bounds
        )
        return Batch(move(self.taps), move(self.final), steps, lessons)


def supervised(generated: np.ndarray, turn: np.ndarray, step: int, rule: MaskRule = "aligned") -> np.ndarray:
    """Bool (T,): whether index t is supervised at `step`.

    `aligned`: x[t+1] .. x[t+2+step] were all generated in one turn, so the first generated token of a turn is never a
    label and its end-of-turn token is one. `upstream`: x[t] .. x[t+step] were generated and x[t+2+step] exists, which
    is what public trainers test; it skips the first drafted token of a turn and learns past its end.
    """
    length = len(generated)
    result = np.zeros(length, dtype=bool)
    reach = length - 2 - step
    if reach <= 0:
        return result
    if rule == "upstream":
        result[:reach] = np.all([generated[o : reach + o] for o in range(step + 1)], axis=0)
        return result
    spans = [generated[o : reach + o] & (turn[o : reach + o] == turn[1 : reach + 1]) for o in range(1, step + 3)]
    result[:reach] = np.all(spans, axis=0)
    return result


def turns(generated: np.ndarray) -> np.ndarray:
    """Int64 (T,): a number that changes wherever `generated` does, so that each run of generated tokens has its own."""
    changes = np.concatenate([[False], generated[1:] != generated[:-1]])
    return np.cumsum(changes)


def pack(windows: list[Window], unroll_steps: int, rule: MaskRule = "aligned") -> Batch:
    """Pack windows into a batch. Steps that supervise nothing are left out; a window that supervises nothing adds no row.

    Args:
        windows: at least one.
        unroll_steps: steps to prepare.
        rule: which positions are supervised.
    """
    chains = [
        [
            supervised(w.generated.numpy(), w.turn.numpy(), step, rule)[: w.stop - w.start].nonzero()[0]
            for step in range(unroll_steps)
        ]
        for w in windows
    ]
    used = [(w, rows) for w, rows in zip(windows, chains, strict=True) if len(rows[0])]
    key_counts = [int(rows[0][-1]) + 1 for _, rows in used]
    key_starts = np.concatenate([[0], np.cumsum(key_counts)]).astype(int)
    row_starts = np.concatenate([[0], np.cumsum([len(w.ids) for w, _ in used])]).astype(int)
    steps, teachers = [], []
    before: list[np.ndarray] = []
    for step in range(unroll_steps):
        now = [rows[step] for _, rows in used]
        if not sum(map(len, now)):
            break
        if step == 0:
            keep = [rows + key_starts[s] for s, rows in enumerate(now)]
            ids = [w.ids[1 : key_counts[s] + 1] for s, (w, _) in enumerate(used)]
            positions = [torch.arange(w.start, w.start + key_counts[s]) for s, (w, _) in enumerate(used)]
        else:
            offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in before])])
            keep = [np.searchsorted(before[s], rows) + offsets[s] for s, rows in enumerate(now)]
            ids = [w.ids[rows + 1 + step] for (w, _), rows in zip(used, now, strict=True)]
            positions = [torch.from_numpy(rows + w.start + step) for (w, _), rows in zip(used, now, strict=True)]
        teachers.append(
            torch.from_numpy(np.concatenate([rows + 1 + step + row_starts[s] for s, rows in enumerate(now)])).long()
        )
        labels = [
            w.ids[rows + 2 + step] if w.greedy else w.argmax[rows + 1 + step]
            for (w, _), rows in zip(used, now, strict=True)
        ]
        steps.append(
            StepRows(
                keep=torch.from_numpy(np.concatenate(keep)).long(),
                ids=torch.cat(ids).long(),
                positions=torch.cat(positions).long(),
                labels=torch.cat(labels).long(),
                segments=Segments(
                    key_bounds=key_starts.tolist(),
                    query_bounds=np.concatenate([[0], np.cumsum([len(rows) for rows in now])]).astype(int).tolist(),
                    visible=torch.from_numpy(np.concatenate(now) + 1).long(),
                ),
            )
        )
        before = now
    return Batch(
        taps=torch.cat([w.taps[: key_counts[s]] for s, (w, _) in enumerate(used)]),
        final=torch.cat([w.final for w, _ in used]),
        steps=steps,
        lessons=arrange(teachers),
    )
