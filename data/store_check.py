"""`draftsmith store check`: whether a store still is what was harvested, and whether that can be right."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import safe_open

from draftsmith.configs.console import meter
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK, sha256_file
from draftsmith.data.codec import layout, not_finite
from draftsmith.data.store import MANIFEST, TOKENS, HarvestReader, Shard, StoreManifest

ROWS = 4096
"""Rows that are in memory at once, a thread."""


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, whether it holds, and in words what was found."""

    name: str
    passed: bool
    detail: str


def check_store(path: Path, guard: Callable[[HarvestReader], str] | None = None) -> list[Finding]:
    """Read every byte of a finished store.

    Args:
        guard: says in words how well the stored states reproduce the target's text, or raises; see train/guard.py.

    Raises:
        DraftsmithError: the store cannot be opened: no manifest, unfinished, a shard missing or cut off.
    """
    reader = HarvestReader(path)
    manifest = reader.manifest
    repeats: dict[bytes, tuple[str, bytes]] = {}
    faults: dict[str, list[str]] = {"hashes": [], "counts": [], "finite": [], "repeated rows": []}
    with (
        meter("check", sum(shard.bytes for shard in manifest.shards), "bytes") as progress,
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
    ):
        for shard, found in zip(
            manifest.shards, pool.map(lambda number: _check(reader, number), range(len(manifest.shards))), strict=True
        ):
            for name, said in found.faults:
                faults[name].append(said)
            for conversation, tokens, state in found.ends:
                other = repeats.setdefault(state, (conversation, tokens))
                if other[1] != tokens:
                    faults["repeated rows"].append(
                        f"conversations {other[0]} and {conversation} end in the same state after different tokens"
                    )
            progress.advance(shard.bytes)
    if len(set(reader.ids)) != len(reader.ids):
        twice = next(name for number, name in enumerate(reader.ids) if name in reader.ids[:number])
        faults["counts"].append(f"conversation {twice} stands twice")
    if len(reader) != manifest.planned:
        faults["counts"].append(f"{len(reader):,} conversations of {manifest.planned:,}")
    known = {MANIFEST, *(shard.file for shard in manifest.shards)}
    orphans = sorted(file.name for file in path.iterdir() if file.name not in known and TEMPORARY_MARK not in file.name)
    good = {
        "hashes": f"{len(manifest.shards):,} shards have the bytes that were written",
        "counts": f"{len(reader):,} conversations, {manifest.tokens:,} tokens",
        "finite": f"every value of {len(manifest.taps)} taps and the final state",
        "repeated rows": "none",
    }
    findings = [
        Finding(name, not said, good[name] if not said else f"{said[0]}" + (f" (and {len(said) - 1:,} more)" if said[1:] else ""))
        for name, said in faults.items()
    ]  # fmt: skip
    findings.append(Finding("orphans", not orphans, "none" if not orphans else f"{orphans[0]} belongs to no manifest"))
    if guard is not None:
        try:
            findings.append(Finding("teacher", True, guard(reader)))
        except DraftsmithError as error:
            findings.append(Finding("teacher", False, str(error)))
    return findings


@dataclass(frozen=True)
class _Found:
    """Faults of a shard by name, and of each conversation: id, hash of its tokens, hash of its last final state."""

    faults: list[tuple[str, str]]
    ends: list[tuple[str, bytes, bytes]]


def _check(reader: HarvestReader, number: int) -> _Found:
    shard = reader.manifest.shards[number]
    with reader.shard_file(number) as file:
        if sha256_file(file) != shard.sha256:
            return _Found([("hashes", f"{shard.file} has changed since it was written")], [])
        return _check_rows(file, shard, reader.manifest)


def _check_rows(file: Path, shard: Shard, manifest: StoreManifest) -> _Found:
    faults: list[tuple[str, str]] = []
    ends: list[tuple[str, bytes, bytes]] = []
    states = layout(manifest.stored_in, len(manifest.taps), manifest.hidden_size)
    starts = list(accumulate((one.length for one in shard.conversations), initial=0))
    with safe_open(file, framework="pt") as handle:
        if handle.get_tensor("offsets").tolist() != starts:
            faults.append(("counts", f"offsets of {shard.file} are not the lengths of its conversations"))
            return _Found(faults, ends)
        for one, start in zip(shard.conversations, starts[:-1], strict=True):
            here = slice(start, start + one.length)
            tokens = {name: handle.get_slice(name)[here] for name in TOKENS}
            ids = tokens["input_ids"]
            if int(tokens["generated"].sum()) != one.generated:
                faults.append(("counts", f"conversation {one.id} has another number of generated tokens"))
            if not 0 <= int(ids.min()) <= int(ids.max()) < manifest.vocab_size:
                faults.append(("counts", f"conversation {one.id} holds a token outside the vocabulary"))
            before = None
            for first in range(start, start + one.length, ROWS):
                rows = slice(first, min(first + ROWS, start + one.length))
                part = {name: handle.get_slice(name)[rows] for name in states}
                for name, bad in not_finite(manifest.stored_in, part).items():
                    if bool(bad.any()):
                        token = first - start + int(bad.nonzero()[0, 0])
                        faults.append(("finite", f"{name} of conversation {one.id}, token {token} of {one.length}"))
                final = part["final"].view(torch.uint8).reshape(rows.stop - rows.start, -1)
                before = final if before is None else torch.cat([before[-1:], final])
                place = rows.stop - len(before)
                part_ids = ids[place - start : rows.stop - start]
                same = (before[1:] == before[:-1]).all(dim=1) & (part_ids[1:] != part_ids[:-1])
                if bool(same.any()):
                    token = place - start + 1 + int(same.nonzero()[0, 0])
                    faults.append(("repeated rows", f"final of conversation {one.id}, token {token} of {one.length}"))
            assert before is not None
            digest = hashlib.blake2b(before[-1].numpy().tobytes(), digest_size=16).digest()
            ends.append((one.id, hashlib.blake2b(ids.numpy().tobytes(), digest_size=8).digest(), digest))
    return _Found(faults, ends)
