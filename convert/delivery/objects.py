"""Object stores and other remote storage through fsspec: s3://, gs://, az://, sftp://, memory:// ...

PREFIX/VERSION/FILE            the files, then, last of all, manifest.json
PREFIX/latest.json             {"version": ..., "path": ...}: one small object, replaced in one put
PREFIX/.exporting/VERSION.json who is delivering which files under that name; gone when the version is whole

Nothing can be renamed there, so a version without a manifest is not there. Two exporters of other files under one
name are told apart by the claim in .exporting and by the manifest, both written only if absent (If-None-Match), which
S3, GCS, Azure and their like decide atomically; on storage that cannot, the claim is read back instead.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from draftsmith.configs.console import meter, warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import STALE_SECONDS
from draftsmith.configs.target import Target
from draftsmith.convert.delivery.driver import Store, open_store
from draftsmith.convert.delivery.version import CARD, LATEST, MANIFEST, Version, other_files
from draftsmith.convert.launch import HERE, serving_line
from draftsmith.convert.write import WORTH_SHOWING

CLAIMS = ".exporting"


def open_objects(protocol: str, rest: str) -> ObjectPrefix:
    """The prefix that a URL names.

    Raises:
        DraftsmithError: the URL is malformed, its protocol unknown or read-only, or the driver not installed.
    """
    return ObjectPrefix(open_store(protocol, rest))


class ObjectPrefix:
    """Versions under a prefix; see `Destination`."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def prepare(self) -> None:
        """One read, so that missing credentials or a dead network show before anything is hashed."""
        self.store.check_bucket()
        self.store.read(LATEST)

    def address(self, label: str) -> str:
        return self.store.url(label)

    def pointer(self) -> str:
        return self.store.url(LATEST)

    def launch(self, label: str, target: Target, config: Mapping[str, Any]) -> str:
        return f"{_fetch_line(self.store, label)} && {serving_line(HERE, target, config)}"

    def deliver(self, version: Version) -> bool:
        if self._present(version):
            self._clear(version)
            return False
        if self.store.read(f"{version.label}/{MANIFEST}") is None:
            self._claim(version)
            if self._present(version):  # it was finished between the first look and the claim
                self._clear(version)
                return True
        try:
            self._upload(version)
            self._seal(version)
        except DraftsmithError:
            # Another exporter may have delivered the same version meanwhile, and cleared what this one was sending.
            if not self._present(version):
                raise
        self._clear(version)
        return True

    def point(self, version: Version) -> None:
        value = {"version": version.label, "path": version.label, "manifest": f"{version.label}/{MANIFEST}"}
        self.store.replace(LATEST, (json.dumps(value, indent=2) + "\n").encode())

    def _present(self, version: Version) -> bool:
        """Whether the version is there and whole: every file is downloaded in blocks and hashed.

        Raises:
            DraftsmithError: other files go by this version's name.
        """
        place = self.address(version.label)
        text = self.store.read(f"{version.label}/{MANIFEST}")
        if text is None:
            return False
        if text != version.manifest and _files_of(text, f"{place}/{MANIFEST}") != version.files:
            raise other_files(place)
        damaged = [name for name in version.files if not self._good(version, name)]
        if damaged:
            warn(f"{place} is damaged ({', '.join(damaged)}); it is delivered again")
        return not damaged

    def _good(self, version: Version, name: str) -> bool:
        entry, path = version.files[name], f"{version.label}/{name}"
        size = entry["bytes"]
        if self.store.size(path) != size:
            return False
        with meter("check", size / 1e6, "MB", quiet=size < WORTH_SHOWING) as bar:
            return self.store.sha256(path, lambda count: bar.advance(count / 1e6, name)) == entry["sha256"]

    def _upload(self, version: Version) -> None:
        """Send what is not there yet, as it should be."""
        with meter("export", version.size / 1e6, "MB", quiet=version.size < WORTH_SHOWING) as bar:
            for name in version.files:
                path = f"{version.label}/{name}"
                if self._good(version, name):  # an interrupted export left it
                    bar.advance(version.files[name]["bytes"] / 1e6, name)
                elif name == CARD:
                    self.store.put(path, version.card.encode())
                else:
                    self.store.upload(version.sources[name], path, _counter(bar.advance, name))
                    version.check_unchanged(name)
        for name, entry in version.files.items():
            found = self.store.size(f"{version.label}/{name}")
            if found != entry["bytes"]:
                raise DraftsmithError(
                    "the storage did not keep a file whole", where=self.store.url(f"{version.label}/{name}"),
                    found=f"{found} bytes", expected=f"{entry['bytes']} bytes", mend="run the export again",
                )  # fmt: skip

    def _seal(self, version: Version) -> None:
        """Write the manifest if there is none, and read it back."""
        path = f"{version.label}/{MANIFEST}"
        claim = self._claimed(version)
        if claim is not None and claim.get("content") != version.content:
            raise self._busy(version)
        self.store.create(path, version.manifest)
        text = self.store.read(path)
        if text is None or _files_of(text, self.store.url(path)) != version.files:
            raise other_files(self.address(version.label))

    def _claimed(self, version: Version) -> dict[str, Any] | None:
        text = self.store.read(f"{CLAIMS}/{version.label}.json")
        try:
            value = json.loads(text) if text else None
        except ValueError:
            return {}
        return value if isinstance(value, dict) else None

    def _claim(self, version: Version) -> None:
        """Take the version's name for these files; an interrupted export of the same files is gone on with.

        Raises:
            DraftsmithError: another exporter is delivering other files under it, and was alive within STALE_SECONDS.
        """
        path = f"{CLAIMS}/{version.label}.json"
        claim = (json.dumps({"content": version.content, "since": int(time.time())}) + "\n").encode()
        for _ in range(2):
            if self.store.create(path, claim):
                found = self._claimed(version)
                if found is not None and found.get("content") != version.content:
                    raise self._busy(version)
                return
            found = self._claimed(version)
            if found is not None and found.get("content") == version.content:
                return
            if found is not None and not self._abandoned(version, found):
                raise self._busy(version)
            # Whoever claimed it died: its files must not mix with these.
            self.store.abort_uploads(version.label)
            self.store.remove(*(f"{version.label}/{name}" for name in self.store.listing(version.label)), path)
        raise self._busy(version)

    def _abandoned(self, version: Version, claim: dict[str, Any]) -> bool:
        since = claim.get("since")
        times = [float(since)] if isinstance(since, int | float) else []
        times += [stamp for stamp in self.store.listing(version.label).values() if stamp is not None]
        return not times or time.time() - max(times) > STALE_SECONDS

    def _busy(self, version: Version) -> DraftsmithError:
        claim = self.store.url(f"{CLAIMS}/{version.label}.json")
        return DraftsmithError(
            "another export is delivering other files under this version's name",
            where=self.address(version.label),
            mend=f"pass another --version; if that export is dead, it counts as gone {STALE_SECONDS / 3600:.0f} hour "
            f"after its last file, or delete {claim}",
        )

    def _clear(self, version: Version) -> None:
        """Drop the claim, and uploads that killed exporters left: the version is whole, nobody needs them."""
        claim = self._claimed(version)
        if claim is not None and claim.get("content") == version.content:
            self.store.remove(f"{CLAIMS}/{version.label}.json")
        self.store.abort_uploads(version.label)


def _counter(advance: Callable[[float, str], None], name: str) -> Callable[[int], None]:
    return lambda count: advance(count / 1e6, name)


def _files_of(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)["files"]
    except (ValueError, KeyError, TypeError):
        raise DraftsmithError(
            "the manifest of a version that is there cannot be read", where=where,
            mend="pass another --version, or delete that manifest",
        ) from None  # fmt: skip


def _fetch_line(store: Store, label: str) -> str:
    """A command that copies a version to the folder DRAFTER."""
    address = store.url(label)
    if store.protocol in ("s3", "s3a"):
        return f"aws s3 sync {shlex.quote('s3' + address[address.index(':') :])} DRAFTER"
    if store.protocol in ("gs", "gcs"):
        return f"gcloud storage rsync -r {shlex.quote('gs' + address[address.index(':') :])} DRAFTER"
    code = f'import fsspec; fs, path = fsspec.url_to_fs("{address}"); fs.get(path + "/", "DRAFTER/", recursive=True)'
    return f"python -c {shlex.quote(code)}"
