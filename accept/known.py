"""Whether an evaluation that lies in the run's folder is of the drafter and store at hand, as they are now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.configs.files import read_json
from draftsmith.configs.schema import RunConfig
from draftsmith.data.store import MANIFEST
from draftsmith.train.evaluate import Chains, walk


def evaluation_of(
    config: RunConfig, drafter: Path, store: Path, chains: Mapping[int, Chains], depth: int
) -> dict[str, Any] | None:
    """What `draftsmith evaluate` last said of this drafter on this store; None if it did not, or if that is not known.

    A path is no proof: another drafter may lie there by now. Nothing may have changed since the evaluation began, and
    it must say of `depth` what the replay at hand says.

    Args:
        drafter: the folder that was read. store: the store's.
        chains: of that drafter on that store, at least `depth` deep.
    """
    changed = max(_changed(drafter), _changed(store / MANIFEST))
    found = []
    for file in config.folder.glob("evaluate*.json"):
        content = read_json(file, what="an evaluation")
        named = [Path(str(content.get(key))).resolve() for key in ("drafter", "store")]
        if named != [drafter.resolve(), store.resolve()] or not isinstance(content.get("seconds"), (int, float)):
            continue
        written = file.stat().st_mtime
        if changed < written - content["seconds"] and _says(content, chains, depth):
            found.append((written, content))
    return max(found, key=lambda one: one[0])[1] if found else None


def _changed(path: Path) -> float:
    """When anything of a file or folder last changed; a file that was copied or moved here changed by that."""
    entries = [path, *(path.rglob("*") if path.is_dir() else ())]
    return max(max(entry.stat().st_mtime, entry.stat().st_ctime) for entry in entries)


def _says(content: Mapping[str, Any], chains: Mapping[int, Chains], depth: int) -> bool:
    """The evaluation has the figures of these chains at `depth`."""
    recorded = content.get("depths", {}).get(str(depth))
    if recorded is None or content.get("conversations") != len(chains):
        return False
    capped = [chain.capped(depth) for chain in chains.values()]
    accepted = np.concatenate([chain.accepted[walk(chain)] for chain in capped] or [np.zeros(0, dtype=np.int64)])
    length = 1 + float(accepted.mean()) if len(accepted) else 1.0
    return recorded["chains"] == len(accepted) and math.isclose(recorded["accept_length"], length, abs_tol=1e-9)
