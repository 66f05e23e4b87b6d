"""Which run writes a folder of shared storage: a mark beside its shards, so that another run does not clear them.

The mark lies there and in the run's own folder from before the first shard until the manifest is up. It is the run's if
both are equal, or if it names this machine and this folder (whose records were deleted meanwhile).
"""

from __future__ import annotations

import json
import socket
import uuid
from pathlib import Path

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import write_json
from draftsmith.data.remote_shards import RemoteFolder
from draftsmith.data.store import MANIFEST

OWNER = "owner.json"


def own(folder: Path, remote: RemoteFolder) -> None:
    """Mark the shared folder as that of the store at `folder`.

    Raises:
        DraftsmithError: a finished store lies there, or another run's mark. Nothing has been changed then.
    """
    there = remote.sizes()
    if MANIFEST in there:
        raise DraftsmithError(
            "a finished store lies on the shared storage already", where=remote.url,
            mend=f"draftsmith store attach {remote.url} {folder}; or delete it there",
        )  # fmt: skip
    mine = {"machine": socket.gethostname(), "folder": str(folder.resolve())}
    file = folder / OWNER
    if OWNER in there:
        theirs, ours = _parsed(remote.read(OWNER)), _parsed(file.read_bytes()) if file.is_file() else None
        if theirs != ours and {key: theirs.get(key) for key in mine} != mine:
            raise DraftsmithError(
                "an unfinished store of another run lies on the shared storage", where=remote.url,
                found=f"shards of {theirs.get('folder')} on {theirs.get('machine')}",
                expected=f"those of {mine['folder']} on {mine['machine']}",
                mend="let that run finish, or give harvest.location another prefix; if that run is gone for good, delete "
                f"{remote.url}/{OWNER} and run the command again",
            )  # fmt: skip
        if theirs == ours:
            return
    write_json(file, {**mine, "mark": uuid.uuid4().hex})
    remote.put(file)


def disown(folder: Path, remote: RemoteFolder) -> None:
    """Take the marks away: the store is finished."""
    if OWNER in remote.sizes():
        remote.remove(OWNER)
    (folder / OWNER).unlink(missing_ok=True)


def _parsed(content: bytes) -> dict[str, object]:
    """A mark; of a damaged one nothing."""
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
