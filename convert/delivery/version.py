"""One version of a drafter as it is delivered: its files, their hashes, and the manifest that is written last."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK, sha256_file, sha256_json
from draftsmith.configs.target import INDEX
from draftsmith.convert.record import RECORD

SCHEMA = 1
MANIFEST = "manifest.json"
CARD = "README.md"
LATEST = "latest.json"
NOTE = "written last: a version without this file is unfinished and must not be read"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of versions and of files: nothing that a file system, a URL or git could read as another place."""

Files = Mapping[str, Mapping[str, Any]]
"""{name: {"sha256": hex, "bytes": size}}, the manifest excluded."""


@dataclass(frozen=True)
class Version:
    """What one export delivers.

    Attributes:
        label: the version's name.
        sources: files that are copied.
        card: the text of README.md.
        files: size and hash of every file, `card` included.
        stamps: size, time and inode of each source when it was hashed.
    """

    label: str
    sources: Mapping[str, Path]
    card: str
    files: Files
    stamps: Mapping[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(entry["bytes"] for entry in self.files.values())

    @cached_property
    def content(self) -> str:
        """SHA-256 over names, sizes and hashes of all files."""
        return sha256_json(self.files)

    @cached_property
    def manifest(self) -> bytes:
        """The bytes of manifest.json."""
        value = {"schema": SCHEMA, "note": NOTE, "version": self.label, "files": dict(self.files)}
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()

    def check_unchanged(self, name: str) -> None:
        """Raise a DraftsmithError if the source `name` is another file than the one that was hashed."""
        if _stamp(self.sources[name]) != self.stamps[name]:
            raise changed(self.sources[name])


def make_version(drafter: Path, card: str, label: str | None) -> Version:
    """Hash the files of `drafter`; without a label the version is named by twelve digits over all its files.

    Raises:
        DraftsmithError: a file has a name that some storage would read as another place.
    """
    sources = _sources(drafter)
    stamps = {name: _stamp(file) for name, file in sources.items()}
    files = {name: {"sha256": sha256_file(file), "bytes": stamps[name][0]} for name, file in sources.items()}
    files[CARD] = {"sha256": hashlib.sha256(card.encode()).hexdigest(), "bytes": len(card.encode())}
    return Version(label or sha256_json(files)[:12], sources, card, files, stamps)


def check_label(label: str) -> None:
    """Refuse a version's name that would leave the destination or be taken for something else in it."""
    reserved = label in ("latest", LATEST, MANIFEST, "main", "HEAD") or label.endswith(".lock")
    if not NAME.fullmatch(label) or reserved or ".." in label or label.endswith(".") or TEMPORARY_MARK in label:
        raise DraftsmithError(
            "this cannot be the name of a version",
            where="--version",
            found=label,
            expected="letters, digits, dots, dashes and underscores; not `latest` or `main`",
        )


def changed(source: Path) -> DraftsmithError:
    """The error for a drafter that was written to meanwhile."""
    return DraftsmithError("the drafter changed during the export", where=source, mend="run it again")


def other_files(place: str) -> DraftsmithError:
    """The error for a version's name that other files have."""
    return DraftsmithError(
        "other files go by this version's name", where=place, mend="pass another --version; versions never change"
    )


def _sources(drafter: Path) -> dict[str, Path]:
    names = ["config.json", RECORD, *([INDEX] if (drafter / INDEX).is_file() else [])]
    names += sorted(file.name for file in drafter.glob("*.safetensors") if TEMPORARY_MARK not in file.name)
    for name in names:
        if not NAME.fullmatch(name):
            raise DraftsmithError(
                "this file's name is not safe on shared storage",
                where=drafter / name,
                expected="letters, digits, dots, dashes and underscores",
                mend="rename it, and its entry in the weight index",
            )
    return {name: drafter / name for name in names}


def _stamp(file: Path) -> tuple[int, ...]:
    state: os.stat_result = file.stat()
    return (state.st_size, state.st_mtime_ns, state.st_ino)
