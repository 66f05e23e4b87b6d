"""What every kind of storage can do, and which kind an address means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import Target
from draftsmith.convert.delivery.faults import scrub
from draftsmith.convert.delivery.version import Version

PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


class Destination(Protocol):
    """Storage that holds versions of one drafter side by side, and a pointer to the latest."""

    def prepare(self) -> None:
        """Fail early: what can be told before anything is read or hashed."""

    def deliver(self, version: Version) -> bool:
        """Make the version whole there; False if it was.

        Raises:
            DraftsmithError: other files go by the version's name, or the storage cannot be written.
        """

    def point(self, version: Version) -> None:
        """Flip the pointer to a version that is whole: readers see the old one or the new one."""

    def address(self, label: str) -> str:
        """Where a version lies, without credentials."""

    def pointer(self) -> str:
        """Where a reader finds the latest version."""

    def launch(self, label: str, target: Target, config: Mapping[str, Any]) -> str:
        """The line that serves the version; `config` is the drafter's config.json."""


def open_destination(address: str) -> Destination:
    """The kind of storage that `address` means; nothing is read or written yet.

    Raises:
        DraftsmithError: the address is malformed, its protocol unknown, or the driver not installed.
    """
    from draftsmith.convert.delivery.local import LocalFolder

    match = PROTOCOL.fullmatch(address)
    if not address.strip() or (match is None and "://" in address):
        raise DraftsmithError(
            "this is no destination", where="DESTINATION", found=repr(scrub(address)),
            expected="a folder, s3://BUCKET/PREFIX, another fsspec URL, or hf://NAMESPACE/NAME",
        )  # fmt: skip
    if match is None:
        return LocalFolder(Path(address))
    protocol, rest = match[1].lower(), match[2]
    if protocol in ("file", "local"):
        if not rest.startswith("/"):
            raise DraftsmithError(
                "a file URL needs an absolute path", where="DESTINATION", found=address, expected="file:///FOLDER"
            )
        return LocalFolder(Path(rest))
    if protocol == "hf":
        from draftsmith.convert.delivery.hub import open_repository

        return open_repository(rest)
    from draftsmith.convert.delivery.objects import open_objects

    return open_objects(protocol, rest)
