"""The one form that every dialect is read into and every output is written from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.tensors import FLOATS, Tensor

EMBEDDING = "embed_tokens.weight"
O_BIAS = "midlayer.self_attn.o_proj.bias"
"""Of zeros, beside an fc.bias: SGLang builds both by one switch."""


@dataclass(frozen=True)
class CanonicalDrafter:
    """A drafter as training left it: dimensions, lazily read tensors by canonical name, and where it comes from.

    `provenance` is what the trainer recorded (empty if nobody did); `notes` say in words what reading it mended.
    """

    spec: DrafterSpec
    tensors: Mapping[str, Tensor]
    dialect: str
    origin: Path
    provenance: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def expected_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a canonical drafter must have.

    An embedding of its own belongs to it only when its width differs from the target's: else engines use the target's.
    """
    shapes = spec.trainable_shapes() | spec.map_shapes()
    if spec.hidden_size != spec.target_hidden_size:
        shapes[EMBEDDING] = (spec.vocab_size, spec.hidden_size)
    return shapes


def key_faults(names: Iterable[str], expected: Iterable[str]) -> list[str]:
    """Every name that is missing, unknown or stands twice, one line each."""
    counts, wanted = Counter(names), set(expected)
    lines = [f"missing: {name}" for name in sorted(wanted - counts.keys())]
    lines += [f"unknown: {name}" for name in sorted(counts.keys() - wanted)]
    lines += [f"{count} tensors of one name: {name}" for name, count in sorted(counts.items()) if count > 1]
    return lines


def shape_faults(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Every tensor of `expected` that is empty or has another shape or kind of dtype, one line each."""
    lines = []
    for name in sorted(expected.keys() & tensors.keys()):
        tensor, shape = tensors[name], expected[name]
        if prod(tensor.shape) == 0:
            lines.append(f"no elements: {name} (shape {list(tensor.shape)}; expected {list(shape)})")
        elif tensor.shape != shape:
            lines.append(f"shape: {name} is {list(tensor.shape)}, expected {list(shape)}")
        allowed = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}.get(name, FLOATS)
        if tensor.dtype not in allowed:
            lines.append(f"dtype: {name} is {tensor.dtype}, expected {' or '.join(allowed)}")
    return lines


def check_tensors(spec: DrafterSpec, named: Iterable[tuple[str, Tensor]], *, where: object) -> dict[str, Tensor]:
    """Check names and shapes both ways and return the tensors by name.

    Raises:
        DraftsmithError: one error that lists every missing, unknown, duplicate, empty or mis-shaped tensor.
    """
    pairs, expected = list(named), expected_shapes(spec)
    tensors = dict(pairs)
    lines = key_faults((name for name, _ in pairs), expected) + shape_faults(tensors, expected)
    if lines:
        raise DraftsmithError(
            "the drafter's tensors are not those that engines need:\n  " + "\n  ".join(lines),
            where=where,
            expected=f"{len(expected)} tensors: {', '.join(sorted(expected))}",
            mend="save the checkpoint again, or convert an earlier one",
        )
    return {name: tensors[name] for name in expected}
