"""An fsspec file system below one prefix: the few actions that a delivery needs, each fault one clear error."""

from __future__ import annotations

import errno
import hashlib
import re
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK
from draftsmith.convert.delivery.faults import storage_faults

PUT_IS_ATOMIC = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "tos", "memory")
"""Protocols where a put replaces an object in one step; elsewhere a file is written aside and renamed."""

READ_ONLY = (
    "http", "https", "git", "github", "gist", "zip", "tar", "libarchive", "reference", "data", "filecache", "blockcache",
    "simplecache", "cached", "jlab", "jupyter", "dir", "root", "generic", "asynclocal", "dask",
)  # fmt: skip
"""Protocols that fsspec knows and nobody can deliver to."""

DRIVERS = {"s3": "draftsmith[s3]", "s3a": "draftsmith[s3]", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol",
           "hdfs": "pyarrow", "arrow_hdfs": "pyarrow", "webhdfs": "requests", "dbfs": "requests"}  # fmt: skip
"""What to install where the name of the driver's module does not tell."""

LOGIN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (and AWS_ENDPOINT_URL for a store of your own)",
    "gs": "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "sftp": "give a user, sftp://USER@HOST/FOLDER, and a key that the SSH agent holds",
}
ALIAS = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az", "ssh": "sftp"}

PART = 1 << 25
"""Bytes of one part of an upload to S3, and of one block that is read for hashing."""

PARTS_AT_ONCE = 4
"""Parts of one file that travel to S3 at the same time; PART times this is held in memory."""

READ_TIMEOUT = 60
"""Seconds until an answer of S3 counts as lost; putting the parts of a large file together takes some servers long."""

MOST_PARTS = 10_000
"""S3's limit."""


def open_store(protocol: str, rest: str) -> Store:
    """Find the driver of `protocol://rest`; the network is not touched.

    Raises:
        DraftsmithError: see `open_objects`.
    """
    import fsspec
    from fsspec.registry import known_implementations, registry

    where = f"{protocol}://{_without_login(rest)}"
    segments = rest.rstrip("/").split("/")
    if any(segment in (".", "..") or re.search(r"[?#*\s\\\[\]]", segment) for segment in segments):
        raise DraftsmithError(
            "the destination's URL must be plain", where=where, expected="no `..`, wildcards, blanks or queries"
        )
    if protocol in READ_ONLY or protocol not in {*known_implementations, *registry}:
        hint = "a repository of the Hugging Face Hub is hf://NAMESPACE/NAME" if "http" in protocol else None
        known = "nothing can be delivered over this protocol" if protocol in READ_ONLY else "no such protocol is known"
        raise DraftsmithError(
            known, where="DESTINATION", found=f"{protocol}://",
            expected="a folder, s3://, gs://, az://, sftp://, hf:// or another protocol of fsspec", mend=hint,
        )  # fmt: skip
    if protocol in PUT_IS_ATOMIC and not segments[0] and protocol != "memory":
        raise DraftsmithError(
            "the URL names no bucket", where="DESTINATION", found=where, expected=f"{protocol}://BUCKET/PREFIX"
        )
    if "@" in segments[0] and ALIAS.get(protocol, protocol) in ("s3", "gs"):
        raise DraftsmithError("credentials do not belong in a bucket's URL", where="DESTINATION", mend=LOGIN["s3"])
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        module = str(known_implementations.get(protocol, {}).get("class", "")).split(".")[0]
        package = DRIVERS.get(protocol) or (module if module != "fsspec" else None)
        raise DraftsmithError(
            "the driver for this storage is not installed", where="DESTINATION", found=f"{protocol}://",
            expected=None if package else str(error), mend=f"pip install '{package}'" if package else None,
        ) from error  # fmt: skip
    return Store(protocol, rest.rstrip("/"), where.rstrip("/"))


class Store:
    """Files below one prefix. Paths are relative to it, with forward slashes.

    Attributes:
        protocol: the URL's.
        shown: the URL without credentials.
    """

    def __init__(self, protocol: str, rest: str, shown: str) -> None:
        self.protocol, self.shown, self._rest = protocol, shown, rest
        self._secrets = _login(rest)
        self._opened: tuple[Any, str] | None = None

    def url(self, path: str) -> str:
        """An address that may be shown."""
        return f"{self.shown}/{path}"

    def check_bucket(self) -> None:
        """Raise a DraftsmithError if the bucket does not exist, where the right to list it lets us tell."""
        if self.protocol not in ("s3", "s3a"):
            return
        with self._faults("find the bucket of", ""):
            fs, root = self._open()
            try:
                fs.call_s3("head_bucket", Bucket=fs.split_path(root)[0])
            except PermissionError:
                return

    def read(self, path: str) -> bytes | None:
        """All bytes of a small file, None if there is none."""
        with self._faults("read", path):
            fs, root = self._open()
            try:
                return bytes(fs.cat_file(f"{root}/{path}"))
            except FileNotFoundError:
                return None

    def size(self, path: str) -> int | None:
        """Bytes of a file, None if there is none."""
        with self._faults("look at", path):
            fs, root = self._open()
            fs.invalidate_cache()
            try:
                return int(fs.info(f"{root}/{path}")["size"])
            except FileNotFoundError:
                return None

    def sha256(self, path: str, advance: Callable[[int], None]) -> str | None:
        """Hex SHA-256 of a file, read in blocks; None if there is none."""
        digest = hashlib.sha256()
        with self._faults("read", path):
            fs, root = self._open()
            try:
                with fs.open(f"{root}/{path}", "rb", block_size=PART, cache_type="none") as reader:
                    while block := reader.read(PART):
                        digest.update(block)
                        advance(len(block))
            except FileNotFoundError:
                return None
        return digest.hexdigest()

    def put(self, path: str, data: bytes) -> None:
        """Write a small file."""
        with self._faults("write", path):
            fs, root = self._open()
            self._make_parent(path)
            fs.pipe_file(f"{root}/{path}", data)

    def create(self, path: str, data: bytes) -> bool:
        """Write a small file if there is none; False if there is one. Atomic where the storage can do that."""
        with self._faults("write", path):
            fs, root = self._open()
            self._make_parent(path)
            try:
                fs.pipe_file(f"{root}/{path}", data, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.ENOTSUP):
                    raise
                if fs.exists(f"{root}/{path}"):
                    return False
                fs.pipe_file(f"{root}/{path}", data)
            return True

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file that readers see old or new, never half."""
        if self.protocol in PUT_IS_ATOMIC:
            self.put(path, data)
            return
        temporary = f".{path}{TEMPORARY_MARK}{uuid.uuid4().hex[:8]}"
        self.put(temporary, data)
        with self._faults("write", path):
            fs, root = self._open()
            fs.mv(f"{root}/{temporary}", f"{root}/{path}")

    def upload(self, source: Path, path: str, advance: Callable[[int], None]) -> None:
        """Send a file in blocks; `advance` counts bytes. It replaces what was there."""
        from fsspec.callbacks import Callback

        class Count(Callback):
            def relative_update(self, inc: int = 1) -> None:
                advance(inc)

        options = {}
        if self.protocol in ("s3", "s3a"):
            part = max(PART, -(-source.stat().st_size // (MOST_PARTS - 1)))
            options = {"chunksize": part, "max_concurrency": PARTS_AT_ONCE}
        with self._faults("write", path):
            fs, root = self._open()
            self._make_parent(path)
            fs.put_file(str(source), f"{root}/{path}", callback=Count(), **options)

    def listing(self, folder: str) -> dict[str, float | None]:
        """Files of a folder by name, with the time of their last change in seconds, where the storage tells it."""
        with self._faults("list", folder):
            fs, root = self._open()
            fs.invalidate_cache()
            try:
                entries = fs.ls(f"{root}/{folder}", detail=True)
            except FileNotFoundError:
                return {}
        return {entry["name"].rsplit("/", 1)[-1]: _time_of(entry) for entry in entries if entry["type"] == "file"}

    def remove(self, *paths: str) -> None:
        """Delete files; one that is gone already is no fault."""
        for path in paths:
            with self._faults("delete", path):
                fs, root = self._open()
                try:
                    fs.rm_file(f"{root}/{path}")
                except FileNotFoundError:
                    continue

    def abort_uploads(self, folder: str) -> None:
        """S3 keeps, and bills, the parts of an upload that never ended: drop those below `folder`."""
        if self.protocol not in ("s3", "s3a"):
            return
        try:
            fs, root = self._open()
            bucket, key, _ = fs.split_path(f"{root}/{folder}/")
            found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
            for upload in found.get("Uploads", []):
                fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        except OSError:  # a right that an exporter need not have, or another exporter was faster
            return

    def _open(self) -> tuple[Any, str]:
        """The file system and the prefix in its own spelling."""
        import fsspec

        if self._opened is None:
            url = f"{self.protocol}://{self._rest}"
            options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
            if self.protocol in ("s3", "s3a"):
                options["config_kwargs"] = {"read_timeout": READ_TIMEOUT}
            fs, root = fsspec.url_to_fs(url, **options)
            self._opened = fs, root.rstrip("/")
        return self._opened

    def _make_parent(self, path: str) -> None:
        """Folders exist only once they are made, except in object stores; no bucket is ever created."""
        if self.protocol not in PUT_IS_ATOMIC:
            fs, root = self._open()
            fs.makedirs(f"{root}/{path}".rsplit("/", 1)[0], exist_ok=True)

    def _faults(self, doing: str, path: str) -> Any:
        login = LOGIN.get(ALIAS.get(self.protocol, self.protocol), "")
        return storage_faults(f"{doing} {path.rsplit('/', 1)[-1]}", self.url(path), secrets=self._secrets, login=login)


def _time_of(entry: dict[str, Any]) -> float | None:
    for key in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


def _login(rest: str) -> tuple[str, ...]:
    """User's secrets in a URL: everything after the colon of USER:PASSWORD@HOST."""
    host = rest.split("/", 1)[0]
    user, at, _ = host.rpartition("@")
    return (user.partition(":")[2],) if at and ":" in user else ()


def _without_login(rest: str) -> str:
    """The URL's rest without its password; a user's name may show."""
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    return f"{user.partition(':')[0]}{at}{host}{slash}{path}"
