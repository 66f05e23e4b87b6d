"""What makes a draft vocabulary's maps right, and how wrong ones are mended where nothing is lost.

Right: d2t (D,) integer offsets with `arange(D) + d2t` ascending within 0..V-1, and t2d (V,) True exactly there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from draftsmith.convert.tensors import Array, Tensor, ValueTensor

Reading = Literal["offsets", "absolute"]


@dataclass(frozen=True)
class Maps:
    """A draft vocabulary made right.

    Attributes:
        ids: int64 (D,), target ids of the draft ids, ascending.
        rows: int64 (D,), the row of the found lm_head that belongs to each; None: in the order found.
        notes: in words, what was mended.
    """

    ids: Array
    rows: Array | None
    notes: tuple[str, ...]

    @property
    def d2t(self) -> Array:
        """int64 (D,): what engines add to a draft id."""
        return self.ids - np.arange(self.ids.size)

    def t2d(self, vocab_size: int) -> Array:
        """bool (V,): which target ids can be drafted."""
        marks = np.zeros(vocab_size, np.bool_)
        marks[self.ids] = True
        return marks


def identity_maps(vocab_size: int) -> dict[str, Tensor]:
    """Maps of a drafter whose vocabulary is the target's: no offset, every id drafted."""
    origin = "the draft vocabulary is the target's"
    return {
        "d2t": ValueTensor(np.zeros(vocab_size, np.int64), origin),
        "t2d": ValueTensor(np.ones(vocab_size, np.bool_), origin),
    }


class MapError(Exception):
    """The maps cannot be made right without a guess; the text says why and `mend` what would help."""

    def __init__(self, problem: str, mend: str | None = None) -> None:
        super().__init__(problem)
        self.mend = mend


def settle_maps(
    d2t: Array | None, t2d: Array | None, rows: int, vocab_size: int, reading: Reading | None = None
) -> Maps:
    """Make one right draft vocabulary of what a checkpoint holds.

    Args:
        d2t: as found, None if absent.
        t2d: as found, None if absent.
        rows: of the lm_head found: D, or V when its rows are those of the whole vocabulary.
        vocab_size: V.
        reading: how d2t is to be read; None: as offsets, unless only absolute ids agree with t2d.

    Raises:
        MapError: a map is missing or contradicts itself or the other.
    """
    notes: list[str] = []
    marked = _marked(t2d, vocab_size, notes)
    if d2t is None and marked is None:
        if rows == vocab_size:
            return Maps(np.arange(vocab_size), None, ("no d2t: the draft vocabulary is the target's",))
        raise MapError(
            f"d2t is missing: engines would take draft ids 0..{rows - 1} for target ids in silence",
            "name a file that has it with --vocab FILE (d2t, or vocab.safetensors of the training)",
        )
    if d2t is None:
        assert marked is not None
        ids, order = marked, None
        notes.append("d2t is absent and follows from t2d, whose order lm_head's rows then have")
    else:
        found = _read_ids(_integers(d2t, notes), marked, vocab_size, reading, notes)
        order = np.argsort(found, kind="stable")
        ids = found[order]
        if np.array_equal(order, np.arange(found.size)):
            order = None
        else:
            notes.append("d2t was not in ascending order: d2t and the rows of lm_head are sorted together")
        if t2d is None:
            notes.append("t2d is absent and follows from d2t")
            notes += _doubts(d2t, ids.size, vocab_size, reading)
    if rows == ids.size:
        return Maps(ids, order, tuple(notes))
    if rows == vocab_size:
        notes.append(f"lm_head has all {vocab_size:,} rows: the {ids.size:,} that d2t names are kept")
        return Maps(ids, ids, tuple(notes))
    raise MapError(f"lm_head has {rows:,} rows, d2t {ids.size:,} entries and the target {vocab_size:,} ids")


def _doubts(d2t: Array, size: int, vocab_size: int, reading: Reading | None) -> list[str]:
    """Maps that engines take without a word, and that nothing proves."""
    if size < vocab_size and not d2t.any():
        return [
            "WARNING: d2t is all zeros: draft ids are the target's first ids. A map that was never filled looks like this"
        ]
    if reading is None and (np.diff(d2t) > 0).all() and d2t[0] >= 0 and d2t[-1] < vocab_size:
        return [
            f"WARNING: d2t ({d2t[0]}, {d2t[1] if size > 1 else ''}, ...) could be absolute target ids as well as offsets; "
            "it is read as offsets, as engines do; if training meant ids, pass --d2t-is absolute"
        ]
    return []


def _marked(t2d: Array | None, vocab_size: int, notes: list[str]) -> Array | None:
    if t2d is None:
        return None
    if t2d.shape != (vocab_size,):
        raise MapError(f"t2d has shape {list(t2d.shape)}, the target's vocabulary {vocab_size} entries")
    if t2d.dtype != np.bool_:
        if not np.isin(t2d, (0, 1)).all():
            raise MapError(f"t2d holds {t2d.dtype} values other than 0 and 1")
        notes.append(f"t2d held {t2d.dtype} values; they are booleans now")
    return np.flatnonzero(t2d)


def _integers(d2t: Array, notes: list[str]) -> Array:
    if d2t.dtype.kind in "iu":
        return d2t.astype(np.int64)
    if d2t.dtype.kind == "f" and np.isfinite(d2t).all() and (d2t == np.floor(d2t)).all():
        notes.append(f"d2t held {d2t.dtype} values, all whole: they are int64 now")
        return d2t.astype(np.int64)
    raise MapError(f"d2t holds {d2t.dtype} values; engines need integer offsets")


def _read_ids(d2t: Array, marked: Array | None, vocab_size: int, reading: Reading | None, notes: list[str]) -> Array:
    """Target ids (D,) in the order found."""
    if d2t.ndim != 1 or not d2t.size:
        raise MapError(f"d2t has shape {list(d2t.shape)}, expected one entry a draft id")
    as_offsets, as_ids = d2t + np.arange(d2t.size), d2t
    faults = {"offsets": ids_fault(as_offsets, vocab_size), "absolute": ids_fault(as_ids, vocab_size)}
    if marked is not None:
        for key, ids in (("offsets", as_offsets), ("absolute", as_ids)):
            faults[key] = faults[key] or _disagreement(np.sort(ids), marked)
    chosen = reading
    if chosen is None:
        # Only t2d can prove that ids are meant: offsets of 0, 0, 0, ... are right for a vocabulary's first ids.
        chosen = "absolute" if marked is not None and faults["offsets"] and not faults["absolute"] else "offsets"
    fault = faults[chosen]
    if fault is None:
        if chosen == "absolute":
            notes.append("d2t held absolute target ids; it holds offsets now, as engines read them")
        return as_offsets if chosen == "offsets" else as_ids
    if reading is None and faults["absolute"] is None:
        raise MapError(
            f"{fault}; it looks like absolute target ids ({', '.join(str(i) for i in as_ids[:3])}, ...)",
            "if it holds absolute ids, pass --d2t-is absolute",
        )
    raise MapError(fault, "convert a checkpoint that still has the map it was trained with")


def ids_fault(ids: Array, vocab_size: int) -> str | None:
    """What is wrong with target ids (D,) in any order, or None: every one inside the vocabulary, none twice."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        first = int(outside[0])
        return (
            f"d2t maps draft id {first} to target id {ids[first]}, outside 0..{vocab_size - 1} ({outside.size:,} such)"
        )
    values, counts = np.unique(ids, return_counts=True)
    twice = values[counts > 1]
    if twice.size:
        return f"d2t maps {int(counts[counts > 1][0])} draft ids to target id {int(twice[0])} ({twice.size:,} such)"
    return None


def _disagreement(ids: Array, marked: Array) -> str | None:
    if np.array_equal(marked, ids):
        return None
    lost, added = np.setdiff1d(ids, marked), np.setdiff1d(marked, ids)
    examples = [
        f"{label} {int(some[0])}" for label, some in (("only d2t has", lost), ("only t2d has", added)) if some.size
    ]
    return (
        f"t2d and d2t disagree about {lost.size + added.size:,} target ids ({'; '.join(examples)}): rows of lm_head "
        "would stand for other tokens than in training"
    )


def d2t_fault(d2t: Array, draft_vocab_size: int, vocab_size: int) -> str | None:
    """What an engine would get wrong with this d2t (D,), or None if it is right as it stands."""
    if d2t.dtype.kind not in "iu":
        return f"d2t holds {d2t.dtype} values; engines need integer offsets"
    if d2t.shape != (draft_vocab_size,):
        return f"d2t has shape {list(d2t.shape)}, the draft vocabulary {draft_vocab_size} entries"
    ids = d2t.astype(np.int64) + np.arange(draft_vocab_size)
    if (np.diff(d2t) > 0).all() and d2t[0] >= 0 and d2t[-1] < vocab_size and ids[-1] >= vocab_size:
        return (
            f"d2t holds absolute target ids ({d2t[0]}, {d2t[1]}, ...), not offsets: engines add the draft id once more, "
            f"so the last one becomes {ids[-1]} of {vocab_size}"
        )
    fault = ids_fault(ids, vocab_size)
    if fault or (np.diff(ids) > 0).all():
        return fault
    first = int(np.flatnonzero(np.diff(ids) <= 0)[0])
    return (
        f"d2t maps draft ids {first} and {first + 1} to target ids {ids[first]} and {ids[first + 1]}; they must ascend"
    )


def t2d_fault(t2d: Array, d2t: Array, vocab_size: int) -> str | None:
    """What is wrong with `t2d` (V,) beside a right `d2t`, or None."""
    if t2d.dtype != np.bool_:
        return f"t2d holds {t2d.dtype} values, expected booleans"
    if t2d.shape != (vocab_size,):
        return f"t2d has shape {list(t2d.shape)}, the target's vocabulary {vocab_size} entries"
    return _disagreement(d2t.astype(np.int64) + np.arange(d2t.size), np.flatnonzero(t2d))
