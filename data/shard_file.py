"""One shard of the store while it is being written: rows go to their place in the file as they come, in any order.

Lengths are known before the states are, so the header comes first and nothing waits in memory. Space is reserved when
the file is opened: a full disk stops the harvest there, and not in the middle of a shard.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import atomic_file, sha256_file
from draftsmith.data.codec import layout
from draftsmith.data.store import TOKENS, Provenance, Shard, StoredConversation, shard_note

TOKEN_DTYPES = {"I32": np.dtype("<i4"), "BOOL": np.dtype("?")}


class ShardFile:
    """`open`, `put` every conversation, `close`; or `abandon`, which leaves nothing behind.

    Args:
        file: its final name.
        lengths: tokens of each of its conversations, in order.
        provenance: says codec, taps and width.

    """

    def __init__(self, file: Path, lengths: Sequence[int], provenance: Provenance) -> None:
        self.file, self.lengths = file, list(lengths)
        self._offsets = list(accumulate(lengths, initial=0))
        self._stored: list[StoredConversation | None] = [None] * len(lengths)
        states = layout(provenance.stored_in, len(provenance.taps), provenance.hidden_size)
        rows = self._offsets[-1]
        shapes = {name: (code, [rows]) for name, code in TOKENS.items()}
        shapes |= {name: (one.code, [rows, *one.shape]) for name, one in states.items()}
        widths = {name: TOKEN_DTYPES[code].itemsize for name, code in TOKENS.items()}
        widths |= {name: one.dtype.itemsize * int(np.prod(one.shape)) for name, one in states.items()}
        shapes["offsets"], sizes = ("I64", [len(lengths) + 1]), {name: rows * width for name, width in widths.items()}
        sizes["offsets"] = 8 * (len(lengths) + 1)
        header: dict[str, Any] = {"__metadata__": {"draftsmith": json.dumps(shard_note(provenance), sort_keys=True)}}
        place, self._widths, self._places = 0, widths, {}
        for name in sorted(shapes, key=lambda one: (-_alignment(shapes[one][0]), one)):
            code, shape = shapes[name]
            header[name] = {"dtype": code, "shape": shape, "data_offsets": [place, place + sizes[name]]}
            self._places[name] = place
            place += sizes[name]
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        self._head = struct.pack("<Q", len(head)) + head
        self.bytes = len(self._head) + place

    def open(self) -> ShardFile:
        """Reserve the file's space under a temporary name.

        Raises:
            DraftsmithError: the disk is full.
        """
        with ExitStack() as stack:
            self._temporary = stack.enter_context(atomic_file(self.file))
            self._handle = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            stack.callback(os.close, self._handle)
            try:
                os.posix_fallocate(self._handle, 0, self.bytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(self._handle, self.bytes)
            self._write(0, self._head)
            offsets = np.array(self._offsets, dtype="<i8")
            self._write(len(self._head) + self._places["offsets"], offsets)
            self._stack = stack.pop_all()
        return self

    def put(
        self,
        index: int,
        conversation: StoredConversation,
        input_ids: np.ndarray,
        generated: np.ndarray,
        argmax: np.ndarray,
        states: Mapping[str, np.ndarray],
    ) -> None:
        """Write conversation `index` of this shard.

        Args:
            input_ids, generated, argmax: (T,).
            states: of every state tensor T rows, as contiguous bytes or values.

        Raises:
            DraftsmithError: another number of rows than the shard was planned with.
        """
        start, length = self._offsets[index], self.lengths[index]
        values = {"input_ids": input_ids, "generated": generated, "argmax": argmax, **states}
        for name, width in self._widths.items():
            rows = np.ascontiguousarray(values[name])
            if name in TOKENS:
                rows = rows.astype(TOKEN_DTYPES[TOKENS[name]], copy=False)
            if rows.nbytes != length * width or len(rows) != length:
                raise DraftsmithError(
                    f"{name} of conversation {conversation.id} does not fit its {length} tokens",
                    found=f"{len(rows)} rows, {rows.nbytes:,} bytes",
                    expected=f"{length} rows, {length * width:,} bytes",
                )
            self._write(len(self._head) + self._places[name] + start * width, rows)
        self._stored[index] = conversation

    def close(self) -> Shard:
        """Flush the file to disk, give it its name, and say what is in it.

        Raises:
            DraftsmithError: a conversation was never put, or the disk is full.
        """
        missing = [index for index, one in enumerate(self._stored) if one is None]
        if missing:
            raise DraftsmithError("a shard lacks conversations", where=self.file, found=f"no number {missing[0]}")
        with ThreadPoolExecutor(1) as flusher:  # neither waits for the other: both end with the last shard
            flushed = flusher.submit(os.fsync, self._handle)
            sha256 = sha256_file(self._temporary)
            flushed.result()
        self._stack.close()
        return Shard(
            file=self.file.name,
            tokens=self._offsets[-1],
            bytes=self.bytes,
            sha256=sha256,
            conversations=tuple(one for one in self._stored if one is not None),
        )

    def abandon(self, error: BaseException) -> None:
        """Remove the unfinished file; raises what `error` means for a person if it is the disk's."""
        self._stack.__exit__(type(error), error, error.__traceback__)

    def _write(self, place: int, data: bytes | np.ndarray) -> None:
        view = memoryview(data).cast("B") if isinstance(data, bytes) else data.view(np.uint8).reshape(-1).data
        while view:
            done = os.pwrite(self._handle, view, place)
            view, place = view[done:], place + done


def _alignment(code: str) -> int:
    return {"I64": 8, "I32": 4, "F32": 4, "BF16": 2}.get(code, 1)
