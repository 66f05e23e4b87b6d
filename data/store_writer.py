"""Writing the store: conversations in, whole shards out.

Which conversations share a shard depends on their lengths and order alone, a shard is written to a temporary name and
renamed, and the manifest that names it comes after it. So a killed harvest leaves a store of whole shards, and the
finished one has the same bytes as an unbroken run's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith import __version__
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK, atomic_file, sha256_file, write_json
from draftsmith.data.store import (
    MANIFEST,
    HarvestedConversation,
    Provenance,
    Shard,
    StoredConversation,
    StoreManifest,
    check_shard,
    read_manifest,
)

AXES = {"taps": "token, tap, hidden", "final": "token, hidden"}
"""Written into every shard's header, so that no reader has to guess."""


class StoreWriter:
    """Appends conversations to the store at `path`; a context manager.

    `done` says how many conversations an earlier run stored: the caller appends the ones after those. A shard is closed
    before the conversation that would lift it over `provenance.shard_tokens`, and when all `provenance.planned`
    have come; leaving the context earlier keeps whole shards only.

    Raises (on entry):
        DraftsmithError: the store there has another provenance, or a damaged shard.
    """

    def __init__(self, path: Path, provenance: Provenance, *, rank: int = 0) -> None:
        self._path, self._provenance, self._rank = path, provenance, rank
        self._shards: list[Shard] = []
        self._pending: list[HarvestedConversation] = []
        self._pending_tokens = 0

    def __enter__(self) -> StoreWriter:
        self._path.mkdir(parents=True, exist_ok=True)
        if (self._path / MANIFEST).exists():
            manifest = read_manifest(self._path)
            refuse_other_provenance(self._path, manifest, self._provenance)
            for shard in manifest.shards:
                check_shard(self._path, shard, self._provenance)
            self._shards = list(manifest.shards)
        self._remove_orphans()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pending.clear()

    @property
    def done(self) -> int:
        """Conversations in whole shards."""
        return sum(len(shard.conversations) for shard in self._shards)

    def append(self, conversation: HarvestedConversation) -> None:
        """Take one conversation; writes a shard when one is full.

        Raises:
            DraftsmithError: a tensor has another dtype or number of rows than the conversation's tokens, or a value
                that is not finite.
        """
        check_conversation(conversation, self._provenance)
        length = len(conversation.input_ids)
        if self._pending and self._pending_tokens + length > self._provenance.shard_tokens:
            self._write_shard()
        self._pending.append(conversation)
        self._pending_tokens += length
        if self.done + len(self._pending) == self._provenance.planned:
            self._write_shard()

    def _write_shard(self) -> None:
        parts = self._pending
        lengths = [len(part.input_ids) for part in parts]
        tensors = {
            "input_ids": torch.cat([part.input_ids for part in parts]).to(torch.int32),
            "generated": torch.cat([part.generated for part in parts]),
            "offsets": torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int64),
            "taps": torch.cat([part.taps for part in parts]),
            "final": torch.cat([part.final for part in parts]),
            "argmax": torch.cat([part.argmax for part in parts]).to(torch.int32),
        }
        file = self._path / f"shard-{self._rank:05d}-{len(self._shards):05d}.safetensors"
        note = {"axes": AXES, "taps": list(self._provenance.taps), "tap_convention": "layer-input"}
        save_tensors(file, tensors, note)
        shard = Shard(
            file=file.name,
            tokens=sum(lengths),
            bytes=file.stat().st_size,
            sha256=sha256_file(file),
            conversations=tuple(
                StoredConversation(
                    id=part.id,
                    length=len(part.input_ids),
                    generated=int(part.generated.sum()),
                    greedy=part.greedy,
                    mean_logprob=part.mean_logprob,
                )
                for part in parts
            ),
        )
        self._shards.append(shard)
        manifest = StoreManifest(
            **self._provenance.model_dump(),
            tool_version=__version__,
            complete=self.done == self._provenance.planned,
            shards=tuple(self._shards),
        )
        write_json(self._path / MANIFEST, manifest.model_dump(mode="json"))
        self._pending, self._pending_tokens = [], 0

    def _remove_orphans(self) -> None:
        """Delete what a killed run left: temporary files, and shards of this rank that no manifest names."""
        known = {shard.file for shard in self._shards}
        for file in self._path.iterdir():
            unnamed = file.name.startswith(f"shard-{self._rank:05d}-") and file.name not in known
            if unnamed or TEMPORARY_MARK in file.name:
                file.unlink()


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
    return [*shards, range(start, len(lengths))] if lengths else []


def refuse_other_provenance(path: Path, found: Provenance, expected: Provenance) -> None:
    """Stop, by name of the first field that differs, before a store is continued with other states."""
    for name, value in expected.model_dump().items():
        other = getattr(found, name)
        if other != value:
            raise DraftsmithError(
                f"the store there was harvested with another {name}",
                where=path,
                found=other,
                expected=value,
                mend=f"give the run another name, or: rm -r {path}; draftsmith harvest CONFIG",
            )


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
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            row = int((~torch.isfinite(tensor)).flatten(1).any(dim=1).nonzero()[0, 0])
            raise DraftsmithError(
                f"{name} of conversation {conversation.id} is not finite",
                where=f"token {row} of {rows}",
                mend="harvest in bfloat16 or float32 (target.dtype); float16 overflows in many targets",
            )
