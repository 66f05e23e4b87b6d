"""Shards of one set of weights: the index that lists them, and names that count them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import INDEX_MEND, read_weight_map

COUNTED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.\w+)")


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index of a whole set of weights says.

    Raises:
        DraftsmithError: no usable map, or a file outside the folder or absent.
    """
    weight_map = read_weight_map(index)
    absent = sorted(name for name in set(weight_map.values()) if not (index.parent / name).is_file())
    if absent:
        raise DraftsmithError(
            "the weight index names files that are not there", where=index, found=", ".join(absent), mend=INDEX_MEND
        )
    return weight_map


def check_index(index: Path, weight_map: dict[str, str], held: Iterable[tuple[str, str]]) -> None:
    """Stop where an index and the (tensor name, file name) pairs that the files hold disagree."""
    pairs = set(held)
    lines = [f"named but not in {file}: {name}" for name, file in sorted(set(weight_map.items()) - pairs)]
    lines += [f"in {file} but not named: {name}" for name, file in sorted(pairs - set(weight_map.items()))]
    if lines:
        raise DraftsmithError(
            "the weight index and the files disagree:\n  " + "\n  ".join(lines), where=index, mend=INDEX_MEND
        )


def counted_sets(files: Iterable[Path]) -> list[list[Path]]:
    """The files, those named `STEM-00001-of-00003` together, every other one alone.

    Raises:
        DraftsmithError: a set of which a member is missing.
    """
    sets: dict[tuple[str, ...], list[Path]] = {}
    for file in sorted(files):
        match = COUNTED.fullmatch(file.name)
        sets.setdefault(match.group("stem", "total", "suffix") if match else (file.name,), []).append(file)
    for key, members in sets.items():
        if len(key) == 1:
            continue
        stem, total, suffix = key
        wanted = [f"{stem}-{number:05}-of-{total}{suffix}" for number in range(1, min(int(total), 10_000) + 1)]
        missing = sorted(set(wanted) - {file.name for file in members})
        if missing:
            raise DraftsmithError(
                "a shard of the weights is missing",
                where=members[0].parent,
                found=", ".join(file.name for file in members[:8]),
                expected=", ".join(missing[:8]),
                mend="fetch the folder again",
            )
    return list(sets.values())
