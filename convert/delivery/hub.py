"""hf://NAMESPACE/NAME[@BRANCH]: a model repository of the Hugging Face Hub.

One commit holds all files of a version at the repository's top, as engines load them; a tag with the version's name
stays on that commit, so versions stand side by side. The branch (main) is the pointer to the latest: its head moves in
the same commit, so a reader of it, too, sees the old version whole or the new one. There is no latest.json: a tag would
keep an old one; manifest.json at the branch's head names the version.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.configs.console import console, meter, warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import INDEX, Target
from draftsmith.convert.delivery.faults import AGAIN, storage_faults
from draftsmith.convert.delivery.version import CARD, MANIFEST, Version, changed, other_files
from draftsmith.convert.launch import HERE, serving_line
from draftsmith.convert.write import WORTH_SHOWING

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ATTEMPTS = 5
"""How often another committer may be faster before we give up."""

LOGIN = "run `hf auth login`, or set HF_TOKEN to a token with write permission"


def open_repository(rest: str) -> HubRepository:
    """The repository of hf://`rest`.

    Raises:
        DraftsmithError: it is not NAMESPACE/NAME or NAMESPACE/NAME@BRANCH.
    """
    match = re.fullmatch(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?/?", rest)
    if match is None or ".." in rest or rest.split("/", maxsplit=1)[0] in ("datasets", "spaces", "buckets", "kernels"):
        raise DraftsmithError(
            "this names no model repository", where="DESTINATION", found="hf://" + rest.rpartition("://")[2],
            expected="hf://NAMESPACE/NAME or hf://NAMESPACE/NAME@BRANCH",
        )  # fmt: skip
    return HubRepository(match[1], match[2] or "main")


class HubRepository:
    """Versions as tagged commits; see `Destination`."""

    def __init__(self, name: str, branch: str) -> None:
        self.name, self.branch = name, branch
        self._api: HfApi | None = None

    @property
    def api(self) -> HfApi:
        """The client; it takes endpoint and token from the environment, or from `hf auth login`."""
        if self._api is None:
            from huggingface_hub import HfApi

            self._api = HfApi(library_name="draftsmith")
        return self._api

    def prepare(self) -> None:
        with self._faults("log in"):
            self.api.whoami()

    def address(self, label: str) -> str:
        return f"hf://{self.name}@{label}"

    def pointer(self) -> str:
        return f"hf://{self.name}@{self.branch}"

    def launch(self, label: str, target: Target, config: Mapping[str, Any]) -> str:
        line = serving_line(HERE, target, config)
        if line.startswith("vllm "):
            return line.replace(f'"model": "{HERE}"', f'"model": "{self.name}", "revision": "{label}"')
        flag = "--speculative-draft-model-path"
        return f"{line.replace(f'{flag} {HERE}', f'{flag} {self.name}')} --speculative-draft-model-revision {label}"

    def deliver(self, version: Version) -> bool:
        self._make()
        for _ in range(ATTEMPTS):
            branches, tags = self._refs()
            tagged = version.label in tags and self._whole(tags[version.label], version, says=True)
            head = branches.get(self.branch)
            if head is not None and self._whole(head, version):
                if tagged:
                    return False
            elif (head := self._commit(version, head)) is None:  # another committer was faster
                continue
            if not tagged:
                self._tag(version, head, replace=version.label in tags)
            return True
        raise DraftsmithError(
            "others commit to the repository all the time", where=self.pointer(), mend="run the export again later"
        )

    def point(self, version: Version) -> None:
        """The commit has moved the branch."""

    def _make(self) -> None:
        """Create the repository, private, and the branch, if they are not there."""
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._faults("find or create the repository"):
            try:
                self.api.repo_info(self.name)
            except RepositoryNotFoundError:
                self.api.create_repo(self.name, private=True, exist_ok=True)
                console.print(f"  made {self.name}, private", markup=False, highlight=False)
            if self.branch not in self._refs()[0]:
                self.api.create_branch(self.name, branch=self.branch, exist_ok=True)

    def _refs(self) -> tuple[dict[str, str], dict[str, str]]:
        """Branches and tags by name, with the commits that they are at."""
        with self._faults("list the versions"):
            refs = self.api.list_repo_refs(self.name)
        return (
            {ref.name: ref.target_commit for ref in refs.branches},
            {ref.name: ref.target_commit for ref in refs.tags},
        )

    def _tree(self, revision: str) -> dict[str, Any]:
        from huggingface_hub.hf_api import RepoFile

        with self._faults("list the files"):
            entries = list(self.api.list_repo_tree(self.name, revision=revision))
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def _whole(self, revision: str, version: Version, *, says: bool = False) -> bool:
        """Whether a commit holds exactly this version, by the hashes that the Hub stores its files under.

        The Hub keeps files by content (SHA-256 for large ones, git's hash for small ones), so these are hashes of the
        bytes that it serves.

        Raises:
            DraftsmithError: the commit says that it is this version, and its manifest names other files.
        """
        tree = self._tree(revision)
        manifest = self._manifest(revision) if MANIFEST in tree else {}
        if manifest.get("version") == version.label and manifest.get("files") != version.files:
            raise other_files(self.address(version.label))
        if says and manifest.get("version") != version.label:
            raise other_files(self.address(version.label))
        if manifest.get("version") != version.label or self._strays(tree, version):
            return False
        damaged = [name for name in version.files if not _same(tree.get(name), version, name)]
        if damaged and says:
            warn(f"{self.address(version.label)} is damaged ({', '.join(damaged)}); it is delivered again")
        return not damaged

    def _manifest(self, revision: str) -> dict[str, Any]:
        with self._faults("read the manifest"), tempfile.TemporaryDirectory() as folder:
            file = self.api.hf_hub_download(self.name, MANIFEST, revision=revision, cache_dir=folder)
            text = Path(file).read_bytes()
        try:
            value = json.loads(text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _strays(self, tree: dict[str, Any], version: Version, old: tuple[str, ...] = ()) -> list[str]:
        """Files that an engine would read beside the version's, and those of the version before; others stay."""
        return [
            name
            for name in tree
            if (name.endswith(".safetensors") or name == INDEX or name in old)
            and name not in version.files
            and name != MANIFEST
        ]

    def _commit(self, version: Version, parent: str | None) -> str | None:
        """One commit with all files, on top of `parent`; None if the branch has moved meanwhile.

        Large files that an interrupted export sent are stored by content already and are not sent again.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.errors import HfHubHTTPError

        tree = self._tree(parent) if parent else {}
        old = tuple(self._manifest(parent).get("files", {})) if parent and MANIFEST in tree else ()
        deleted = [CommitOperationDelete(path_in_repo=name) for name in self._strays(tree, version, old)]
        texts = {CARD: version.card.encode(), MANIFEST: version.manifest}
        added = []
        with self._faults("send the files"):
            quiet = version.size < WORTH_SHOWING or console.is_terminal  # on a terminal the client draws bars itself
            with _bars(console.is_terminal), meter("export", version.size / 1e6, "MB", quiet=quiet) as bar:
                for name, source in version.sources.items():
                    addition = CommitOperationAdd(path_in_repo=name, path_or_fileobj=source)
                    self.api.preupload_lfs_files(self.name, [addition], revision=self.branch)
                    version.check_unchanged(name)
                    if addition.upload_info.sha256.hex() != version.files[name]["sha256"]:
                        raise changed(source)
                    added.append(addition)
                    bar.advance(version.files[name]["bytes"] / 1e6, name)
            added += [CommitOperationAdd(path_in_repo=name, path_or_fileobj=text) for name, text in texts.items()]
            try:
                with _bars(False):
                    done = self.api.create_commit(
                        self.name, [*deleted, *added], commit_message=f"draftsmith export: {version.label}",
                        revision=self.branch, parent_commit=parent,
                    )  # fmt: skip
            except HfHubHTTPError as error:
                if error.response.status_code in (409, 412):
                    return None
                raise
        return str(done.oid)

    def _tag(self, version: Version, commit: str, *, replace: bool) -> None:
        from huggingface_hub.errors import HfHubHTTPError

        with self._faults("tag the version"):
            if replace:
                self.api.delete_tag(self.name, tag=version.label)
            try:
                self.api.create_tag(self.name, tag=version.label, revision=commit)
            except HfHubHTTPError as error:
                if error.response.status_code != 409:
                    raise
        _, tags = self._refs()
        if version.label not in tags or not self._whole(tags[version.label], version, says=True):
            raise DraftsmithError(
                "the version's tag is not where it should be", where=self.address(version.label), mend=AGAIN
            )

    def _faults(self, doing: str) -> Any:
        return storage_faults(doing, f"hf://{self.name}", login=LOGIN)


def _same(entry: Any, version: Version, name: str) -> bool:
    """Whether the Hub's file has the bytes of the version's."""
    expected = version.files[name]
    if entry is None or entry.size != expected["bytes"]:
        return False
    if entry.lfs is not None:
        return bool(entry.lfs.sha256 == expected["sha256"])
    data = version.card.encode() if name == CARD else version.sources[name].read_bytes()
    return bool(entry.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Whether the client draws its own progress bars."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    if not shown and not before:
        disable_progress_bars()
    try:
        yield
    finally:
        if not shown and not before:
            enable_progress_bars()
