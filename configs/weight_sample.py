"""A hash of some of a target's weights: targets of one shape and name layout differ in values alone, a base model and
its fine-tune for example, and hashing all bytes of a large target would take an hour."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from draftsmith.configs.target import TensorRef

TENSORS = 128
BYTES = 4096


def weight_sample(tensors: Mapping[str, TensorRef]) -> str:
    """Hex SHA-256 over names and bytes of some tensors, the same however the target is cut into files.

    One tensor of every kind (a name without its numbers) counts, for a fine-tune may touch attention alone, then others
    up to TENSORS; among equals those whose names have the smallest hash, so that no layer is favoured. Of each, BYTES in the
    middle.
    """
    digest, kinds = hashlib.sha256(), dict[str, str]()
    mixed = sorted(tensors, key=lambda one: hashlib.sha256(one.encode()).digest())
    for name in mixed:
        kinds.setdefault(re.sub(r"\d+", "#", name), name)
    for name in list(dict.fromkeys([*kinds.values(), *mixed]))[:TENSORS]:
        digest.update(name.encode() + b"\0" + _middle(tensors[name].file, *tensors[name].span))
    return digest.hexdigest()


def _middle(file: Path, first: int, last: int) -> bytes:
    with file.open("rb") as handle:
        handle.seek(first + max(0, (last - first - BYTES) // 2))
        return handle.read(min(BYTES, last - first))
