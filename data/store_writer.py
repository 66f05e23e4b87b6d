"""Writing the store: conversations in, whole shards out, by one process or several.

Which conversations share a shard depends on their lengths and order alone; a shard is written to a temporary name and
renamed, and the record that names it comes after it. So a killed harvest leaves a store of whole shards, any number of
processes can go on with the others, and the finished store has the same bytes as an unbroken run's of one process.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from draftsmith import __version__
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK, absolute_url, atomic_file, writable, write_json
from draftsmith.data.codec import encode, not_finite
from draftsmith.data.owner import OWNER, disown, own
from draftsmith.data.remote_shards import RemoteFolder
from draftsmith.data.shard_file import ShardFile
from draftsmith.data.store import (
    MANIFEST,
    RECORDS,
    HarvestedConversation,
    Provenance,
    Shard,
    StoredConversation,
    StoreManifest,
    check_shards,
    read_manifest,
)

SHARD = "shard-{:05d}.safetensors"
NUMBER = re.compile(r"shard-(\d{5,})\.safetensors")


class StoreWriter:
    """The store at `path` while it is being written; a context manager.

    One process at a time prepares it; others may then `join`. Shards are numbered from 0 through the whole store;
    `finished` holds the numbers of those that are whole. On leaving without an error, whoever finds all
    `provenance.planned` conversations there writes the manifest.

    Args:
        join: another process has prepared the store.
        mend: what helps where another store lies there; none: what a harvest can do.

    Raises (on entry):
        DraftsmithError: the store there has another provenance, a damaged shard, or is being written, or cannot be; another run's
            unfinished store lies on the shared storage.
    """

    def __init__(self, path: Path, provenance: Provenance, *, join: bool = False, mend: str | None = None) -> None:
        self.path, self.provenance, self._join, self._mend = path, provenance, join, mend
        self.finished: dict[int, Shard] = {}
        self._pending: list[HarvestedConversation] = []
        self._remote = None if provenance.location is None else RemoteFolder(provenance.location)

    def __enter__(self) -> StoreWriter:
        with writable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY)
        try:
            if self._join:
                self._take_lock(fcntl.LOCK_SH)
            else:
                with writable(self.path):
                    self._prepare()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pending.clear()
        try:
            if kind is None:
                self._complete()
        finally:
            os.close(self._lock)

    @property
    def complete(self) -> bool:
        """Whether the manifest lists every conversation."""
        return read_manifest(self.path).complete

    @property
    def done(self) -> int:
        """Conversations in the whole shards at the store's beginning: `append` goes on behind them."""
        count = 0
        for number in range(len(self.finished)):
            if number not in self.finished:
                break
            count += len(self.finished[number].conversations)
        return count

    def shard(self, number: int, lengths: Sequence[int]) -> ShardFile:
        """An unopened file for shard `number`, whose conversations have these lengths; `record` it when it is closed."""
        return ShardFile(self.path / SHARD.format(number), lengths, self.provenance)

    def record(self, shard: Shard) -> None:
        """Say that a shard is whole; one that belongs on shared storage goes there first."""
        if self._remote is not None:
            self._remote.put(self.path / shard.file)
            (self.path / shard.file).unlink()
        write_json((self.path / shard.file).with_suffix(".json"), shard.model_dump(mode="json"))
        match = NUMBER.fullmatch(shard.file)
        assert match is not None
        self.finished[int(match[1])] = shard

    def append(self, conversation: HarvestedConversation) -> None:
        """Take one conversation, in order; writes a shard when one is full and when all have come.

        Raises:
            DraftsmithError: a tensor has another dtype or number of rows than the conversation's tokens, or a value
                that is not finite.
        """
        check_conversation(conversation, self.provenance)
        tokens = sum(len(one.input_ids) for one in self._pending)
        if self._pending and tokens + len(conversation.input_ids) > self.provenance.shard_tokens:
            self._write_shard()
        self._pending.append(conversation)
        if self.done + len(self._pending) == self.provenance.planned:
            self._write_shard()

    def _write_shard(self) -> None:
        number = next(n for n in range(len(self.finished) + 1) if n not in self.finished)
        shard = self.shard(number, [len(one.input_ids) for one in self._pending]).open()
        try:
            for index, one in enumerate(self._pending):
                states = encode(self.provenance.stored_in, one.taps, one.final)
                shard.put(index, describe(one), one.input_ids.numpy(), one.generated.numpy(), one.argmax.numpy(),
                          {name: as_bytes(rows) for name, rows in states.items()})  # fmt: skip
        except BaseException as error:
            shard.abandon(error)
            raise
        self.record(shard.close())
        self._pending = []

    def _prepare(self) -> None:
        self._take_lock(fcntl.LOCK_EX)
        if (self.path / MANIFEST).exists():
            manifest = read_manifest(self.path)
            refuse_other_provenance(self.path, manifest, self.provenance, self._mend)
            if self._remote is not None and not manifest.complete:
                own(self.path, self._remote)
            check_shards(self.path, manifest.shards, self.provenance)
            for shard in manifest.shards:
                match = NUMBER.fullmatch(shard.file)
                if match is not None:
                    self.finished[int(match[1])] = shard
            self._remove_orphans({shard.file for shard in manifest.shards}, whole=manifest.complete)
        else:
            if self._remote is not None:
                own(self.path, self._remote)
            self._remove_orphans(set(), whole=False)
            self._write_manifest(())
        self._take_lock(fcntl.LOCK_SH)

    def _take_lock(self, kind: int) -> None:
        """The folder itself is locked, until this process ends; a file system without locks goes without."""
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DraftsmithError("another process writes this store", where=self.path) from None
        except OSError:
            return

    def _remove_orphans(self, known: set[str], *, whole: bool) -> None:
        """Delete what a killed run left: temporary files, shards without a record, records that a manifest replaced."""
        for file in self.path.iterdir():
            unnamed = file.name.startswith("shard-") and file.suffix == ".safetensors" and file.name not in known
            replaced = whole and file.match(RECORDS)
            if unnamed or replaced or TEMPORARY_MARK in file.name:
                file.unlink(missing_ok=True)
        if self._remote is not None:
            for name in self._remote.sizes():
                if NUMBER.fullmatch(name) and name not in known:
                    self._remote.remove(name)

    def _complete(self) -> None:
        """Write the finished manifest if every shard is there; two processes that do so write the same bytes."""
        try:
            manifest = read_manifest(self.path)
        except DraftsmithError:
            manifest = read_manifest(self.path)  # another process replaced the records with the manifest meanwhile
        if not manifest.complete:
            if len(manifest.stored) != self.provenance.planned:
                return
            self._write_manifest(manifest.shards, complete=True)
        elif not (self.path / OWNER).exists():
            return
        if self._remote is not None:  # also where a run was killed before its manifest was up
            self._remote.put(self.path / MANIFEST)
            disown(self.path, self._remote)
        for record in self.path.glob(RECORDS):
            record.unlink(missing_ok=True)

    def _write_manifest(self, shards: Sequence[Shard], *, complete: bool = False) -> None:
        write_manifest(self.path, self.provenance, shards, complete=complete)


def attach(url: str, path: Path) -> Path:
    """Make the store whose shards and manifest lie at `url` a store at `path`: only the manifest is copied.

    Raises:
        DraftsmithError: no finished store there, or something else at `path`, or it cannot be written.
    """
    if (path / MANIFEST).exists():
        raise DraftsmithError("there is a store already", where=path, mend="name another folder")
    remote = RemoteFolder(absolute_url(url))
    with writable(path):
        path.mkdir(parents=True, exist_ok=True)
    with atomic_file(path / MANIFEST) as temporary:
        remote.get(MANIFEST, temporary)
    manifest = read_manifest(path)
    if manifest.location != remote.url:
        write_json(path / MANIFEST, manifest.model_copy(update={"location": remote.url}).model_dump(mode="json"))
    return path


def write_manifest(path: Path, provenance: Provenance, shards: Sequence[Shard], *, complete: bool) -> None:
    """Write manifest.json, atomically."""
    manifest = StoreManifest(
        **provenance.model_dump(include=set(Provenance.model_fields)),
        tool_version=__version__,
        complete=complete,
        shards=tuple(shards),
    )
    write_json(path / MANIFEST, manifest.model_dump(mode="json"))


def describe(conversation: HarvestedConversation) -> StoredConversation:
    """What the manifest says of it."""
    return StoredConversation(
        id=conversation.id,
        length=len(conversation.input_ids),
        generated=int(conversation.generated.sum()),
        greedy=conversation.greedy,
        mean_logprob=conversation.mean_logprob,
        temperature=conversation.temperature,
    )


def as_bytes(rows: torch.Tensor) -> np.ndarray:
    """uint8 (T, bytes of a row) of a contiguous CPU tensor (T, ...): numpy knows neither bf16 nor fp8."""
    return rows.contiguous().view(torch.uint8).reshape(len(rows), -1).numpy()


def save_tensors(file: Path, tensors: dict[str, torch.Tensor], note: dict[str, Any]) -> None:
    """Write a safetensors file, atomically and readable to whoever may read new files; `note` goes into its header.

    Equal tensors and notes give equal bytes: the note is one metadata key, as safetensors writes several in no fixed
    order.
    """
    with atomic_file(file) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(tensors, temporary, metadata={"draftsmith": json.dumps(note, sort_keys=True)})
        temporary.chmod(mode)


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[range]:
    """Indices of the conversations of each shard, as StoreWriter will cut them."""
    shards, start, tokens = [], 0, 0
    for index, length in enumerate(lengths):
        if index > start and tokens + length > shard_tokens:
            shards.append(range(start, index))
            start, tokens = index, 0
        tokens += length
    return [*shards, range(start, len(lengths))] if len(lengths) else []


def refuse_other_provenance(path: Path, found: Provenance, expected: Provenance, mend: str | None = None) -> None:
    """Stop, by name of the first field that differs, before a store is continued with other states."""
    for name, value in expected.model_dump(include=set(Provenance.model_fields)).items():
        other = getattr(found, name)
        if name == "location" and other is not None:
            other = absolute_url(other)
        if other != value:
            changed = _changed(other, value) if isinstance(value, dict) else ""
            raise DraftsmithError(
                f"the store there was harvested with another {name}{changed}",
                where=path,
                found=other,
                expected=value,
                mend=mend or f"give the run another name, or: rm -r {path}; draftsmith harvest CONFIG",
            )


def _changed(found: dict[str, str], expected: dict[str, str]) -> str:
    keys = [key for key in sorted(found.keys() | expected.keys()) if found.get(key) != expected.get(key)]
    return f": its {', '.join(keys)} changed"


def check_conversation(conversation: HarvestedConversation, provenance: Provenance) -> None:
    """Refuse wrong shapes, dtypes and values that are not finite, by the conversation's id and the tensor's name."""
    rows, hidden = len(conversation.input_ids), provenance.hidden_size
    expected = {
        "generated": (torch.bool, (rows,)),
        "taps": (torch.bfloat16, (rows, len(provenance.taps), hidden)),
        "final": (torch.bfloat16, (rows, hidden)),
        "argmax": (torch.int64, (rows,)),
    }
    for name, (dtype, shape) in expected.items():
        tensor: torch.Tensor = getattr(conversation, name)
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise DraftsmithError(
                f"{name} of conversation {conversation.id} does not fit its {rows} tokens",
                found=f"{tensor.dtype} {tuple(tensor.shape)}",
                expected=f"{dtype} {shape}",
            )
    for name, faulty in not_finite("bfloat16", {"taps": conversation.taps, "final": conversation.final}).items():
        if bool(faulty.any()):
            raise not_finite_error(name, conversation.id, int(faulty.nonzero()[0, 0]), rows)


def not_finite_error(name: str, conversation: str, row: int, rows: int) -> DraftsmithError:
    """The refusal of a state that is not finite."""
    return DraftsmithError(
        f"{name} of conversation {conversation} is not finite",
        where=f"token {row} of {rows}",
        mend="harvest in bfloat16 or float32 (target.dtype); float16 overflows in many targets",
    )
