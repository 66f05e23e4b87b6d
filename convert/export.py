"""Deliver a drafter to a folder that many servers read: whole or not at all, versions side by side.

DESTINATION/VERSION/    config.json, weights, draftsmith.json, README.md, and manifest.json with every file's hash
DESTINATION/latest      a link to the version delivered last
DESTINATION/latest.json the same, for storage without links
"""

from __future__ import annotations

import errno
import hashlib
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.configs.console import closing, console, meter, warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import (
    TEMPORARY_MARK,
    atomic_folder,
    read_json,
    sha256_file,
    sha256_json,
    sweep_unfinished,
    write_json,
)
from draftsmith.configs.target import read_target
from draftsmith.convert.card import model_card
from draftsmith.convert.launch import sglang_line
from draftsmith.convert.record import RECORD, read_record
from draftsmith.convert.source import INDEX
from draftsmith.convert.verify import verify
from draftsmith.convert.write import WORTH_SHOWING

SCHEMA = 1
MANIFEST = "manifest.json"
CARD = "README.md"
BLOCK = 1 << 24
"""Bytes copied at once."""


def export(drafter: Path, destination: Path, target: Path, *, version: str | None = None) -> Path:
    """Verify `drafter` and deliver it as DESTINATION/VERSION; `latest` points to it afterwards.

    A version that is there already is checked file by file and left alone; a damaged one is replaced in one step.

    Args:
        version: its name; none: twelve digits of a hash over all its files.

    Returns:
        The version's folder.

    Raises:
        DraftsmithError: a check fails, the version's name is taken by other files, or the destination cannot be
            written. Nothing that was there before has then changed.
    """
    faults = [check for check in verify(drafter, target, deep=True) if check.status == "fail"]
    if faults:
        raise DraftsmithError(
            "the drafter does not pass verification:\n  " + "\n  ".join(f"{f.name}: {f.message}" for f in faults),
            where=drafter,
            mend=faults[0].mend,
        )
    record = read_record(drafter)
    if record is None:
        raise DraftsmithError(
            "the drafter has no record of its training", where=drafter / RECORD,
            mend=f"draftsmith convert {drafter} --target {target} --out {drafter} --overwrite",
        )  # fmt: skip
    served = read_target(target)
    card = model_card(drafter, served, record)
    sources = _sources(drafter)
    files = {name: {"sha256": sha256_file(file), "bytes": file.stat().st_size} for name, file in sources.items()}
    files[CARD] = {"sha256": hashlib.sha256(card.encode()).hexdigest(), "bytes": len(card.encode())}
    label = version or sha256_json(files)[:12]
    place = _place(destination, label)
    if _present(place, files):
        console.print(f"  {place} is there already, every file as it should be", markup=False, highlight=False)
    else:
        _deliver(place, sources, card, files, label)
    _point(destination, label)
    closing(f"{place} ({len(files) + 1} files), {destination / 'latest'}", sglang_line(place, served))
    return place


def _sources(drafter: Path) -> dict[str, Path]:
    names = ["config.json", RECORD, *([INDEX] if (drafter / INDEX).is_file() else [])]
    weights = [file for file in sorted(drafter.glob("*.safetensors")) if TEMPORARY_MARK not in file.name]
    return {name: drafter / name for name in names} | {file.name: file for file in weights}


def _place(destination: Path, label: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", label) or label in ("latest", "latest.json"):
        raise DraftsmithError(
            "this cannot be the name of a version",
            where="--version",
            found=label,
            expected="letters, digits, dots, dashes and underscores; not `latest`",
        )
    if not destination.is_dir() and not destination.parent.is_dir():
        raise DraftsmithError(
            "the destination's parent folder does not exist",
            where=destination.parent,
            mend="mount the storage, or make the folder: mkdir -p " + str(destination),
        )
    pointer = destination / "latest"
    if pointer.exists() and not pointer.is_symlink():
        raise DraftsmithError(
            "`latest` is no link, so it cannot be flipped",
            where=pointer,
            mend=f"move it away: mv {pointer} {pointer}.old",
        )
    return destination / label


def _present(place: Path, files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the version is there and whole; damaged copies of the same version count as absent.

    Raises:
        DraftsmithError: other files go by this version's name.
    """
    if not place.exists():
        return False
    manifest = read_json(
        place / MANIFEST, what="the manifest of a version that is there", mend="pass another --version, or move it away"
    )
    if manifest.get("files") != files:
        raise DraftsmithError(
            "other files go by this version's name", where=place, mend="pass another --version; versions never change"
        )
    damaged = [
        name
        for name, entry in files.items()
        if not (place / name).is_file() or sha256_file(place / name) != entry["sha256"]
    ]
    if damaged:
        warn(f"{place} is damaged ({', '.join(damaged)}); it is delivered again")
    return not damaged


def _deliver(
    place: Path, sources: Mapping[str, Path], card: str, files: Mapping[str, Mapping[str, Any]], label: str
) -> None:
    sweep_unfinished(place)
    replace, size = place.exists(), sum(entry["bytes"] for entry in files.values())
    try:
        with atomic_folder(place, replace=replace) as folder:
            with meter("export", size / 1e6, "MB", quiet=size < WORTH_SHOWING) as bar:
                for name, file in sources.items():
                    if _copy(file, folder / name) != files[name]["sha256"]:
                        raise DraftsmithError("the drafter changed during the export", where=file, mend="run it again")
                    bar.advance(files[name]["bytes"] / 1e6, name)
            (folder / CARD).write_text(card, encoding="utf-8")
            write_json(folder / MANIFEST, {"schema": SCHEMA, "version": label, "files": dict(files)})
    except DraftsmithError:
        # Another exporter may have delivered the same version meanwhile.
        if replace or not place.exists() or not _present(place, files):
            raise


def _copy(source: Path, copy: Path) -> str:
    """Copy a file and return the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, copy.open("wb") as writer:
        while block := reader.read(BLOCK):
            digest.update(block)
            writer.write(block)
    return digest.hexdigest()


def _point(destination: Path, label: str) -> None:
    """Flip `latest` to `label`: readers see the old version or the new one."""
    pointer = destination / "latest"
    sweep_unfinished(pointer)
    temporary = destination / f".latest{TEMPORARY_MARK}{uuid.uuid4().hex[:8]}"
    try:
        temporary.symlink_to(label, target_is_directory=True)
        temporary.replace(pointer)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise DraftsmithError(
                f"the version is delivered, but `latest` could not be flipped: {error.strerror}",
                where=pointer,
                mend="run the export again; it skips what is there",
            ) from error
        warn(f"{destination} takes no links; read latest.json instead of latest")
    write_json(destination / "latest.json", {"version": label, "path": label})
