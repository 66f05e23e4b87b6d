"""Shards that are damaged: found before training, named, and left out or refused as the configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from draftsmith.configs.console import warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json, sha256_file, write_json
from draftsmith.configs.schema import TrainSection
from draftsmith.data.store import Shard, StoreManifest, check_shard, read_manifest

RECORD = "shards.json"


def damaged_shards(accelerator: Accelerator, store: Path, settings: TrainSection, folder: Path) -> dict[str, str]:
    """Shard file -> what is wrong with it; the processes share the reading.

    A shard whose hash was right once and whose size and time have not changed since is not read again.

    Raises:
        DraftsmithError: a shard is damaged and `train.damaged_shards` is `stop`; or no shard is whole; or other shards
            are damaged than when this run began, so that it cannot go on with the same data.
    """
    manifest = read_manifest(store)
    record = folder / RECORD
    known = read_json(record, what="the run's record of shards") if record.is_file() else None
    mine = manifest.shards[accelerator.process_index :: accelerator.num_processes]
    trusted = {} if known is None else known.get("whole", {})
    found = [(shard.file, _fault(store, shard, manifest, settings, trusted)) for shard in mine]
    faults = {file: fault for file, fault in gather_object(found) if fault is not None}
    if faults and settings.damaged_shards == "stop":
        file, fault = sorted(faults.items())[0]
        raise DraftsmithError(
            f"{len(faults)} of {len(manifest.shards)} shards are damaged: {fault}",
            where=", ".join(str(store / name) for name in sorted(faults)),
            mend=f"rm -r {store}; draftsmith harvest CONFIG; or leave them out: train.damaged_shards=skip",
        )
    if len(faults) == len(manifest.shards):
        raise DraftsmithError("no shard of the store is whole", where=store, found="; ".join(faults.values()),
                              mend=f"rm -r {store}; draftsmith harvest CONFIG")  # fmt: skip
    if known is not None and sorted(known.get("damaged", [])) != sorted(faults):
        raise DraftsmithError(
            "other shards are damaged than when this run began, so it cannot go on with the same data",
            where=store, found=sorted(faults) or "none damaged", expected=known.get("damaged") or "none damaged",
            mend=f"restore the shards, or start afresh with another `name`, or: rm -r {folder}",
        )  # fmt: skip
    if accelerator.is_main_process:
        for file, fault in sorted(faults.items()):
            lost = next(len(shard.conversations) for shard in manifest.shards if shard.file == file)
            warn(f"{store / file} is left out ({lost} conversations): {fault}")
    return faults


def remember_shards(store: Path, settings: TrainSection, folder: Path, damaged: dict[str, str]) -> None:
    """Record which shards are whole, so that the next launch decides alike and need not read them again."""
    whole = {}
    for shard in read_manifest(store).shards:
        if shard.file not in damaged and settings.check_shards == "hash":
            stat = (store / shard.file).stat()
            whole[shard.file] = [shard.sha256, stat.st_size, stat.st_mtime_ns]
    write_json(folder / RECORD, {"damaged": sorted(damaged), "whole": whole})


def _fault(
    store: Path, shard: Shard, manifest: StoreManifest, settings: TrainSection, trusted: dict[str, Any]
) -> str | None:
    try:
        check_shard(store, shard, manifest)
    except DraftsmithError as error:
        return f"{error.problem} (found {error.found}, expected {error.expected})" if error.found else error.problem
    if settings.check_shards == "header":
        return None
    stat = (store / shard.file).stat()
    if trusted.get(shard.file) == [shard.sha256, stat.st_size, stat.st_mtime_ns]:
        return None
    try:
        same = sha256_file(store / shard.file) == shard.sha256
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return None if same else "its bytes have changed since it was written (another sha256)"
