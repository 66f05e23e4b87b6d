"""Files that appear whole or not at all, and their hashes."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith.configs.errors import DraftsmithError

TEMPORARY_MARK = ".partial-"
"""Names that contain this belong to unfinished writes; readers ignore them and writers may delete them."""

STALE_SECONDS = 3600.0
"""An unfinished write that nothing has touched for this long belongs to a process that died."""


def fsync_path(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Say which folder or file could not be written, where the system only says why."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from error


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success flush it and rename it to `path`, on failure delete it.

    The rename is atomic on one file system: a reader sees the old file or the new one, never half.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY_MARK}{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        fsync_path(temporary)
        temporary.replace(path)
        fsync_path(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        _unlink(temporary)


@contextmanager
def atomic_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling folder; on success flush every file in it and rename the folder to `path`.

    With `replace` an existing `path` is exchanged for the new folder in one step where the system can do that
    (Linux), else moved aside first, and deleted after. Without it an existing `path` is an error, whether it was
    there before or appeared meanwhile. A killed process leaves only a sibling whose name has TEMPORARY_MARK.
    """
    if path.exists() and not replace:
        raise _exists(path)
    temporary = path.with_name(f".{path.name}{TEMPORARY_MARK}{uuid.uuid4().hex[:8]}")
    aside = path.with_name(f".{path.name}{TEMPORARY_MARK}old-{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for entry in sorted(temporary.rglob("*")):
            fsync_path(entry)
        fsync_path(temporary)
        exchanged = replace and path.exists() and _exchange(temporary, path)
        if not exchanged:
            if replace and path.exists():
                path.rename(aside)
            temporary.rename(path)
        fsync_path(path.parent)
    except OSError as error:
        if path.exists() and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _exists(path) from error
        raise _unwritable(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if aside.exists() and not path.exists():
            aside.rename(path)
        shutil.rmtree(aside, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder that others may read: it loses its name in one step, then its files go.

    A process killed midway leaves a sibling whose name has TEMPORARY_MARK, never a folder that lacks some files.
    """
    if not path.exists():
        return
    aside = path.with_name(f".{path.name}{TEMPORARY_MARK}gone-{uuid.uuid4().hex[:8]}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def sweep_unfinished(path: Path) -> None:
    """Clear what killed processes left beside `path` while they wrote it, once untouched for STALE_SECONDS.

    A folder that was moved aside and never replaced goes back to its place.
    """
    for leftover in path.parent.glob(f".{path.name}{TEMPORARY_MARK}*"):
        try:
            if not path.exists() and leftover.name.startswith(f".{path.name}{TEMPORARY_MARK}old-"):
                leftover.rename(path)
                continue
            is_folder = leftover.is_dir() and not leftover.is_symlink()
            entries = [leftover, *leftover.rglob("*")] if is_folder else [leftover]
            if time.time() - max(entry.lstat().st_mtime for entry in entries) < STALE_SECONDS:
                continue
        except FileNotFoundError:  # its writer finished just now
            continue
        if is_folder:
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            _unlink(leftover)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step (renameat2 with RENAME_EXCHANGE); False where the system or file system cannot."""
    here, exchange = -100, 2
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _unlink(path: Path) -> None:
    """Delete a leftover; one that cannot be deleted (read-only or vanished storage) must not hide the first error."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _exists(path: Path) -> DraftsmithError:
    return DraftsmithError("the destination exists already", where=path, mend="name another folder or pass --overwrite")


def _unwritable(path: Path, error: OSError) -> DraftsmithError:
    return DraftsmithError(
        f"could not write {path.name}: {error.strerror or error}",
        where=error.filename or path,
        mend="free some space or name another folder; nothing that was there before has changed",
    )


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with a final newline, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path, *, what: str, mend: str | None = None) -> dict[str, Any]:
    """Read a JSON object; a missing file, bad syntax or another type is a DraftsmithError that calls the file `what`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DraftsmithError(f"{what} is missing", where=path, mend=mend) from None
    except NotADirectoryError:
        raise DraftsmithError(f"{what} is missing", where=path, mend=mend) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DraftsmithError(f"{what} is not valid JSON: {error}", where=path, mend=mend) from None
    if not isinstance(value, dict):
        raise DraftsmithError(
            f"{what} holds no JSON object", where=path, found=type(value).__name__, expected="object", mend=mend
        )
    return value


def absolute_url(url: str) -> str:
    """A folder's URL as it reads from every working folder: a path without a scheme, or of `file:`, becomes absolute."""
    scheme, mark, rest = url.rpartition("://")
    if mark and scheme not in ("file", "local"):
        return url
    return scheme + mark + str(Path(rest).expanduser().absolute())


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value in canonical form (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
