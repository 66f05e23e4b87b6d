"""Shards that lie on shared storage: written there when they are whole, and read by ranges of rows.

Any URL that fsspec knows (s3://BUCKET/PREFIX, gs://, az://, memory://). Storage like that cannot rename, so a shard is
whole when its record, which stays in the local folder of the store, says so; the manifest goes up last.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.shard_rows import ShardRows

LOGIN = (
    "check the address and the credentials in the environment (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
    "AWS_ENDPOINT_URL, and pip install 'draftsmith[s3]'), then run the command again: it goes on where it stopped"
)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What a local disk answers when it takes no more."""


class RemoteFolder:
    """The folder that a URL names."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @cached_property
    def _place(self) -> tuple[Any, str]:
        import fsspec

        with self._faults("reached"):
            system, path = fsspec.core.url_to_fs(self.url)
            return system, str(path).rstrip("/")

    def sizes(self) -> dict[str, int]:
        """Bytes of every file there."""
        system, path = self._place
        with self._faults("listed"):
            system.invalidate_cache()
            try:
                return {Path(one["name"]).name: int(one["size"]) for one in system.ls(path, detail=True)}
            except FileNotFoundError:
                return {}

    def put(self, file: Path) -> None:
        """Upload a file under its own name."""
        system, path = self._place
        with self._faults(f"written to ({file.name})"):
            system.makedirs(path, exist_ok=True) if not self.url.startswith("s3") else None
            system.put_file(str(file), f"{path}/{file.name}")

    def get(self, name: str, file: Path) -> None:
        """Download a file."""
        system, path = self._place
        with self._faults(f"read ({name})"):
            try:
                system.get_file(f"{path}/{name}", str(file))
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise DraftsmithError(
                    f"no room for a copy of {name}: {error.strerror}", where=file.parent,
                    mend="free some space there, or name a temporary folder that has some: TMPDIR=FOLDER",
                ) from error  # fmt: skip

    def read(self, name: str) -> bytes:
        """The bytes of a small file."""
        system, path = self._place
        with self._faults(f"read ({name})"):
            return bytes(system.cat_file(f"{path}/{name}"))

    def remove(self, name: str) -> None:
        """Delete a file; one that another process has just deleted is gone too."""
        system, path = self._place
        with self._faults(f"cleared ({name})"), suppress(FileNotFoundError):
            system.rm_file(f"{path}/{name}")

    def ranges(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes [first, last) of a file, several ranges at once."""
        system, path = self._place
        with self._faults(f"read ({name})"):
            wanted = [span for span in spans if span[0] < span[1]]
            found = iter(
                system.cat_ranges([f"{path}/{name}"] * len(wanted), [a for a, _ in wanted], [b for _, b in wanted], on_error="raise")
            )  # fmt: skip
            return [next(found) if first < last else b"" for first, last in spans]

    @contextmanager
    def _faults(self, doing: str) -> Iterator[None]:
        try:
            yield
        except DraftsmithError:
            raise
        except Exception as error:  # drivers raise what they like
            raise DraftsmithError(
                f"the shared storage could not be {doing}: {type(error).__name__}: {str(error)[:300]}", where=self.url,
                mend=LOGIN,
            ) from error  # fmt: skip


class RemoteShard(ShardRows):
    """One shard there; all spans of a read come in one round trip."""

    def __init__(self, folder: RemoteFolder, name: str) -> None:
        self._folder, self._name = folder, name

    def _bytes(self, spans: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        found = self._folder.ranges(self._name, list(spans))
        return [
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            for data in found
        ]
