"""What becomes of a drafter's own token embedding: engines share the target's, each in its own way.

SGLang always takes the target's; vLLM keeps the drafter's if it differs. A file without one serves alike in both.
"""

from __future__ import annotations

import numpy as np

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import Target
from draftsmith.convert.canonical import EMBEDDING
from draftsmith.convert.tensors import Tensor, from_ref, to_float32

ROUNDING = 1 / 128
"""Relative distance below which two values may be one value rounded to bfloat16, once or twice."""


def without_copy(
    named: list[tuple[str, Tensor]], spec: DrafterSpec, target: Target, where: object, *, trained: bool
) -> tuple[list[tuple[str, Tensor]], str]:
    """The tensors by name without an embedding that engines share, and what was found, in words.

    Args:
        trained: whether the checkpoint says that it trained its embedding.

    Raises:
        DraftsmithError: the widths differ and there is none, or its own embedding was trained.
    """
    own = dict(named).get(EMBEDDING)
    if spec.hidden_size != spec.target_hidden_size:
        if own is None:
            raise DraftsmithError(
                f"{EMBEDDING} is missing: a drafter of another width than its target cannot share the target's",
                where=where,
                expected=f"{EMBEDDING} of shape {[spec.vocab_size, spec.hidden_size]}",
                mend="convert a checkpoint that has it",
            )
        return named, f"{EMBEDDING} is the drafter's own, which a drafter of another width needs"
    rest = [(name, tensor) for name, tensor in named if name != EMBEDDING]
    if own is None:
        return rest, f"no {EMBEDDING}: engines share the target's"
    if trained:
        raise DraftsmithError(
            "the drafter's embedding was trained; SGLang would replace it by the target's in silence",
            where=own.origin,
            found="embed_requires_grad true",
            mend="serve the file as it is with vLLM, or train with a frozen embedding",
        )
    if target.embedding is None:
        return rest, (
            f"{EMBEDDING} left out: engines share the target's; it could not be compared, the target's folder has no "
            "embedding"
        )
    theirs = from_ref(target.embedding)
    if own.shape != theirs.shape:
        raise DraftsmithError(
            "the drafter's embedding is not of the target's shape", where=own.origin, found=list(own.shape),
            expected=list(theirs.shape), mend="name the target that it was trained on",
        )  # fmt: skip
    return rest, _compared(own, theirs)


def _compared(own: Tensor, theirs: Tensor) -> str:
    largest, differing, equal = 0.0, 0, True
    for ours, other in zip(own.pieces(), theirs.pieces(), strict=True):
        a, b = to_float32(ours, own.dtype), to_float32(other, theirs.dtype)
        if np.array_equal(a, b):
            continue
        equal = False
        with np.errstate(invalid="ignore"):
            distance = np.abs(a - b)
        largest = max(largest, float(np.nanmax(distance)) if np.isfinite(distance).any() else np.inf)
        differing += int((~(distance <= ROUNDING * np.abs(b) + 1e-7)).sum())
    if equal:
        return f"{EMBEDDING} left out: equals the target's, which engines share"
    if not differing:
        return f"{EMBEDDING} left out: the target's, rounded (largest difference {largest:.1g}); engines share the target's own"
    return (
        f"WARNING: {EMBEDDING} left out: it differs from the target's in {differing:,} values (largest difference {largest:.2g}): lost on the "
        "way and filled at random, or trained; engines share the target's"
    )
