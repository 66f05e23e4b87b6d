"""What makes a draft vocabulary's maps right: the one rule that conversion and verification share."""

from __future__ import annotations

import numpy as np

from draftsmith.convert.tensors import Array, Tensor, ValueTensor


def identity_maps(vocab_size: int) -> dict[str, Tensor]:
    """Maps of a drafter whose vocabulary is the target's: no offset, every id drafted."""
    origin = "the draft vocabulary is the target's"
    return {
        "d2t": ValueTensor(np.zeros(vocab_size, np.int64), origin),
        "t2d": ValueTensor(np.ones(vocab_size, np.bool_), origin),
    }


def d2t_fault(d2t: Array, draft_vocab_size: int, vocab_size: int) -> str | None:
    """What is wrong with `d2t` (D,), or None. Right: integer offsets, `arange(D) + d2t` ascending within 0..V-1."""
    if d2t.dtype.kind not in "iu":
        return f"d2t holds {d2t.dtype} values; engines need integer offsets"
    if d2t.shape != (draft_vocab_size,):
        return f"d2t has shape {list(d2t.shape)}, the draft vocabulary {draft_vocab_size} entries"
    ids = d2t.astype(np.int64) + np.arange(draft_vocab_size)
    ascending = bool((np.diff(ids) > 0).all())
    if ascending and ids[0] >= 0 and ids[-1] < vocab_size:
        return None
    if bool((np.diff(d2t) > 0).all()) and d2t[0] >= 0 and d2t[-1] < vocab_size and ids[-1] >= vocab_size:
        return (
            f"d2t holds absolute target ids ({d2t[0]}, {d2t[1]}, ...), not offsets: engines add the draft id once more, "
            f"so the last one becomes {ids[-1]} of {vocab_size}"
        )
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        first = int(outside[0])
        return (
            f"d2t maps draft id {first} to target id {ids[first]}, outside 0..{vocab_size - 1} ({outside.size:,} such)"
        )
    first = int(np.flatnonzero(np.diff(ids) <= 0)[0])
    return (
        f"d2t maps draft ids {first} and {first + 1} to target ids {ids[first]} and {ids[first + 1]}; they must ascend"
    )


def t2d_fault(t2d: Array, d2t: Array, vocab_size: int) -> str | None:
    """What is wrong with `t2d` (V,) beside a right `d2t`, or None. Right: True exactly at `arange(D) + d2t`."""
    if t2d.dtype != np.bool_:
        return f"t2d holds {t2d.dtype} values, expected booleans"
    if t2d.shape != (vocab_size,):
        return f"t2d has shape {list(t2d.shape)}, the target's vocabulary {vocab_size} entries"
    ids = d2t.astype(np.int64) + np.arange(d2t.size)
    marked = np.flatnonzero(t2d)
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
