"""A folder that many servers read, local or mounted.

DESTINATION/VERSION/    config.json, weights, draftsmith.json, README.md, and manifest.json with every file's hash
DESTINATION/latest      a link to the version delivered last
DESTINATION/latest.json the same, for storage without links

A version is written under another name and renamed, so it appears whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.configs.console import Meter, meter, warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import (
    TEMPORARY_MARK,
    atomic_folder,
    read_json,
    sha256_file,
    sweep_unfinished,
    write_json,
)
from draftsmith.configs.target import Target
from draftsmith.convert.delivery.version import CARD, LATEST, MANIFEST, Version, changed, other_files
from draftsmith.convert.launch import serving_line
from draftsmith.convert.write import WORTH_SHOWING

BLOCK = 1 << 24
"""Bytes copied at once."""


class LocalFolder:
    """Versions in a folder; see `Destination`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Storage that is not mounted is no place to create; a `latest` that is no link cannot be flipped."""
        if not self.root.is_dir() and not self.root.parent.is_dir():
            raise DraftsmithError(
                "the destination's parent folder does not exist",
                where=self.root.parent,
                mend="mount the storage, or make the folder: mkdir -p " + str(self.root),
            )
        pointer = self.root / "latest"
        if pointer.exists() and not pointer.is_symlink():
            raise DraftsmithError(
                "`latest` is no link, so it cannot be flipped",
                where=pointer,
                mend=f"move it away: mv {pointer} {pointer}.old",
            )

    def address(self, label: str) -> str:
        return str(self.root / label)

    def pointer(self) -> str:
        return str(self.root / "latest")

    def launch(self, label: str, target: Target, config: Mapping[str, Any]) -> str:
        return serving_line(self.root / label, target, config)

    def deliver(self, version: Version) -> bool:
        place = self.root / version.label
        sweep_unfinished(place)
        if self._present(version):
            return False
        replace = place.exists()
        try:
            with atomic_folder(place, replace=replace) as folder:
                with meter("export", version.size / 1e6, "MB", quiet=version.size < WORTH_SHOWING) as bar:
                    for name, file in version.sources.items():
                        if _copy(file, folder / name, bar) != version.files[name]["sha256"]:
                            raise changed(file)
                (folder / CARD).write_bytes(version.card.encode())
                (folder / MANIFEST).write_bytes(version.manifest)
        except DraftsmithError:
            # Another exporter may have delivered the same version meanwhile, and cleared what this one was writing.
            if not place.exists() or not self._present(version):
                raise
        return True

    def point(self, version: Version) -> None:
        pointer = self.root / "latest"
        _clear(self.root / version.label)
        sweep_unfinished(pointer)
        sweep_unfinished(self.root / LATEST)
        temporary = self.root / f".latest{TEMPORARY_MARK}{uuid.uuid4().hex[:8]}"
        try:
            temporary.symlink_to(version.label, target_is_directory=True)
            temporary.replace(pointer)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise DraftsmithError(
                    f"the version is delivered, but `latest` could not be flipped: {error.strerror}",
                    where=pointer,
                    mend="run the export again; it skips what is there",
                ) from error
            warn(f"{self.root} takes no links; read latest.json instead of latest")
        write_json(self.root / LATEST, {"version": version.label, "path": version.label})

    def _present(self, version: Version) -> bool:
        """Whether the version is there and whole; damaged copies of the same version count as absent.

        Raises:
            DraftsmithError: other files go by this version's name.
        """
        place = self.root / version.label
        if not place.exists():
            return False
        manifest = read_json(
            place / MANIFEST,
            what="the manifest of a version that is there",
            mend="pass another --version, or move it away",
        )
        if manifest.get("files") != version.files:
            raise other_files(str(place))
        damaged = [
            name
            for name, entry in version.files.items()
            if not (place / name).is_file() or sha256_file(place / name) != entry["sha256"]
        ]
        if damaged:
            warn(f"{place} is damaged ({', '.join(damaged)}); it is delivered again")
        return not damaged


def _copy(source: Path, copy: Path, bar: Meter) -> str:
    """Copy a file and return the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, copy.open("wb") as writer:
        while block := reader.read(BLOCK):
            digest.update(block)
            writer.write(block)
            bar.advance(len(block) / 1e6, source.name)
    return digest.hexdigest()


def _clear(place: Path) -> None:
    """Delete what killed exporters left of a version that is whole now: nobody needs it, however young it is."""
    for leftover in place.parent.glob(f".{place.name}{TEMPORARY_MARK}*"):
        shutil.rmtree(leftover, ignore_errors=True)
