"""Which drafter a result is of: a digest of its weights that the checkpoint and every folder converted from it share."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.canonical import CanonicalDrafter
from draftsmith.convert.tensors import TORCH_NAMES, CastTensor, ValueTensor, digest_tensor, read_array


def weight_digests(drafter: CanonicalDrafter, dtypes: Iterable[str] = tuple(TORCH_NAMES)) -> dict[str, str]:
    """dtype -> XXH3-128 over names, shapes and values as conversion to that dtype stores them, in any written form.

    A dtype that cannot hold the values is left out. t2d follows from d2t and does not count.
    """
    found = {}
    for dtype in dtypes:
        try:
            found[dtype] = _digest(drafter, dtype)
        except DraftsmithError:  # too large for float16, or not finite
            continue
    return found


def _digest(drafter: CanonicalDrafter, dtype: str) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(drafter.tensors.keys() - {"t2d"}):
        tensor = drafter.tensors[name]
        if name == "d2t":
            part = digest_tensor(ValueTensor(read_array(tensor).astype("<i8"), tensor.origin))
        else:
            part = digest_tensor(CastTensor(name, tensor, TORCH_NAMES[dtype]))
        digest.update(f"{name} {list(tensor.shape)} {part}\n".encode())
    return digest.hexdigest()
