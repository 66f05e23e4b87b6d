"""One packed batch on the device: rows of several conversation windows without padding, and what each step supervises.

The alignment lives here and nowhere else: at index t, step i feeds x[t+1+i], is taught by the target's state at
t+1+i, and has the label x[t+2+i].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

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
    """What step i works on. All steps compute the same rows; those that a step does not supervise count for nothing.

    Attributes:
        slots: int64, all different, which of the batch's fed tokens a row reads: at step 0 for every key row, later
            for every query.
        positions: int64, RoPE positions of the same rows.
        active: int64 (n_i,), which queries are supervised; at step 0 all of them are.
        labels: int64 (n_i,), target ids that a right draft must equal.
    """

    slots: Tensor
    positions: Tensor
    active: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Batch:
    """Packed windows.

    Attributes:
        taps: (M, K, H), of the key rows.
        fed: int64 (slots,), the tokens that the steps feed: of each window, x from index 1 on.
        final: (R, H), of all rows.
        queries: int64 (Q,), the key rows from which chains start.
        segments: of key rows and queries.
        steps: the rows of each unroll step.
        lessons: which row of `final` teaches which of their drafts.
        table: embeddings of the batch's tokens, which `fed` then counts in; None: they are target ids.
    """

    taps: Tensor
    final: Tensor
    fed: Tensor
    queries: Tensor
    segments: Segments
    steps: list[StepRows]
    lessons: Lessons
    table: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Copy every tensor to `device`."""
        if self.taps.device == device:
            return self
        moved: Batch = each_tensor(self, lambda tensor: tensor.to(device, non_blocking=True))
        return moved


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Rebuild nested dataclasses, lists and tuples with `change` applied to every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        if value and not isinstance(value[0], (Tensor, list, tuple)) and not is_dataclass(value[0]):
            return value
        return type(value)(each_tensor(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: each_tensor(getattr(value, field.name), change) for field in fields(value)}
        )
    return value


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


def pack(
    windows: list[Window], unroll_steps: int, rule: MaskRule = "aligned", embedding: Tensor | None = None
) -> Batch:
    """Pack windows into a batch. Steps that supervise nothing are left out; a window that supervises nothing adds no row.

    Args:
        windows: at least one.
        unroll_steps: steps to prepare.
        rule: which positions are supervised.
        embedding: (V, hidden) on the host: the batch then carries the rows that it needs.
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
    query_starts = np.concatenate([[0], np.cumsum([len(rows[0]) for _, rows in used])]).astype(int)
    queries = np.concatenate([rows[0] + key_starts[s] for s, (_, rows) in enumerate(used)])
    slot_counts = [count + unroll_steps - 1 for count in key_counts]
    slot_starts = np.concatenate([[0], np.cumsum(slot_counts)]).astype(int)
    fed = torch.cat(
        [
            w.ids[np.minimum(np.arange(1, 1 + count), len(w.ids) - 1)]
            for (w, _), count in zip(used, slot_counts, strict=True)
        ]
    ).long()
    steps, teachers = [], []
    for step in range(unroll_steps):
        now = [rows[step] for _, rows in used]
        if not sum(map(len, now)):
            break
        starts = [np.arange(count) for count in key_counts] if step == 0 else [rows[0] for _, rows in used]
        slots = [start + step + slot_starts[s] for s, start in enumerate(starts)]
        positions = [start + w.start + step for (w, _), start in zip(used, starts, strict=True)]
        active = [np.searchsorted(rows[0], rows[step]) + query_starts[s] for s, (_, rows) in enumerate(used)]
        teachers.append(
            torch.from_numpy(np.concatenate([rows + 1 + step + row_starts[s] for s, rows in enumerate(now)])).long()
        )
        labels = [
            w.ids[rows + 2 + step] if w.greedy else w.argmax[rows + 1 + step]
            for (w, _), rows in zip(used, now, strict=True)
        ]
        steps.append(
            StepRows(
                torch.from_numpy(np.concatenate(slots)).long(),
                torch.from_numpy(np.concatenate(positions)).long(),
                torch.from_numpy(np.concatenate(active)).long(),
                torch.cat(labels).long(),
            )
        )
    table = None
    if embedding is not None:
        unique, fed = fed.unique(return_inverse=True)
        table = embedding[unique]
    return Batch(
        taps=torch.cat([w.taps[: key_counts[s]] for s, (w, _) in enumerate(used)]),
        final=torch.cat([w.final for w, _ in used]),
        fed=fed,
        queries=torch.from_numpy(queries).long(),
        segments=Segments.of(key_starts.tolist(), query_starts.tolist(), torch.from_numpy(queries).long()),
        steps=steps,
        lessons=arrange(teachers),
        table=table,
    )
