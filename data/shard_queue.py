"""Blocks of rows go to their shards in a thread, behind the computation; a finished shard is hashed and flushed in another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.conversations import Conversation
from draftsmith.data.rows import Block
from draftsmith.data.shard_file import ShardFile
from draftsmith.data.store import StoredConversation
from draftsmith.data.store_writer import StoreWriter, not_finite_error

DEPTH = 2
"""Blocks that wait to be written: one is on its way from the device while another is written."""


@dataclass(frozen=True)
class Piece:
    """A conversation as far as it is harvested.

    Attributes:
        place: its number within its shard.
        ids: int32 (T,).
        generated: bool (T,).
        wanted: rows whose argmax the target's head gave.
    """

    about: StoredConversation
    place: int
    ids: np.ndarray
    generated: np.ndarray
    wanted: np.ndarray

    @classmethod
    def of(cls, conversation: Conversation, length: int, place: int, *, probe: bool) -> Piece:
        """The first `length` tokens. Greedy text is its own argmax; with `probe` the head says so nevertheless."""
        generated = np.zeros(len(conversation.input_ids), dtype=bool)
        for start, end in conversation.spans:
            generated[start:end] = True
        generated = generated[:length]
        about = StoredConversation(
            id=conversation.id, length=length, generated=int(generated.sum()), greedy=conversation.greedy,
            mean_logprob=conversation.mean_logprob, temperature=conversation.temperature,
        )  # fmt: skip
        told = generated[1:].nonzero()[0] if probe or not conversation.greedy else np.zeros(0, dtype=np.int64)
        return cls(about, place, np.array(conversation.input_ids[:length], dtype=np.int32), generated, told)

    def argmax(self, head: np.ndarray) -> np.ndarray:
        """int32 (T,): the head's choice at `wanted`, for greedy text the token that was written; -1 elsewhere."""
        argmax = np.full(len(self.ids), -1, dtype=np.int32)
        if self.about.greedy:
            argmax[:-1][self.generated[1:]] = self.ids[1:][self.generated[1:]]
        else:
            argmax[self.wanted] = head
        return argmax


class ShardQueue:
    """A context manager; leaving it waits for all shards, or abandons the unfinished one after an error.

    Attributes:
        agreed, asked: how many probed tokens of greedy text the head chose too, of how many.
    """

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, "draftsmith-rows")
        self._finisher = ThreadPoolExecutor(1, "draftsmith-shards")
        self._waiting: deque[Future[None]] = deque()
        self._finishing: Future[None] | None = None
        self._shard: ShardFile | None = None
        self.agreed = self.asked = 0

    def open(self, number: int, lengths: Sequence[int]) -> None:
        """Blocks that follow belong to this shard."""
        self._submit(self._open, number, lengths)

    def put(self, pieces: Sequence[Piece], block: Block) -> None:
        """Write a block; waits while DEPTH others do. Raises what went wrong with an earlier one."""
        self._submit(self._put, pieces, block)

    def close(self) -> None:
        """The open shard has all its blocks."""
        self._submit(self._close)

    def __enter__(self) -> ShardQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._drain(0)
                if self._finishing is not None:
                    self._finishing.result()
        finally:
            self._thread.shutdown(cancel_futures=True)
            self._finisher.shutdown()
            if self._shard is not None:
                self._shard.abandon(error or RuntimeError("an error of the shard's own thread"))

    def _submit(self, work: object, *arguments: object) -> None:
        self._drain(DEPTH)
        self._waiting.append(self._thread.submit(work, *arguments))  # type: ignore[arg-type]

    def _drain(self, left: int) -> None:
        while len(self._waiting) > left:
            self._waiting.popleft().result()

    def _open(self, number: int, lengths: Sequence[int]) -> None:
        self._shard = self._writer.shard(number, lengths).open()

    def _put(self, pieces: Sequence[Piece], block: Block) -> None:
        if block.wait is not None:
            block.wait()
        assert self._shard is not None
        row = asked = 0
        for piece in pieces:
            rows = slice(row, row + len(piece.ids))
            head = block.argmax[asked : asked + len(piece.wanted)]
            row, asked = rows.stop, asked + len(piece.wanted)
            refuse_faults(piece, {name: faulty[rows] for name, faulty in block.faults.items()})
            if piece.about.greedy:
                self.agreed += int((head == piece.ids[piece.wanted + 1]).sum())
                self.asked += len(head)
            self._shard.put(
                piece.place, piece.about, piece.ids, piece.generated, piece.argmax(head),
                {name: states[rows] for name, states in block.states.items()},
            )  # fmt: skip

    def _close(self) -> None:
        if self._finishing is not None:
            self._finishing.result()
        shard, self._shard = self._shard, None
        assert shard is not None
        self._finishing = self._finisher.submit(self._finish, shard)

    def _finish(self, shard: ShardFile) -> None:
        try:
            self._writer.record(shard.close())
        except BaseException as error:
            shard.abandon(error)
            raise


def refuse_faults(piece: Piece, faults: dict[str, np.ndarray]) -> None:
    """Stop at states that cannot be right.

    Args:
        faults: bool (T,), see `Block`. A repeated row is a fault where the tokens differ: among equal tokens a target
            may well repeat itself.

    Raises:
        DraftsmithError: names the conversation, the tensor and the token.
    """
    for name in ("taps", "final"):
        if faults[name].any():
            raise not_finite_error(name, piece.about.id, int(faults[name].argmax()), len(piece.ids))
    repeated = faults["repeated"][1:] & (piece.ids[1:] != piece.ids[:-1])
    if repeated.any():
        row = int(repeated.argmax()) + 1
        raise DraftsmithError(
            f"final of conversation {piece.about.id} repeats the row before although the token differs",
            where=f"token {row} of {len(piece.ids)}",
            expected="another state for another token",
            mend="the target ignores its input or gives some rows twice: check how it was loaded, and harvest again",
        )
