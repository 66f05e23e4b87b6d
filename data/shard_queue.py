"""Blocks of rows go to their shards in threads, behind the computation; finished shards are hashed and flushed in others."""

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

DEPTH = 4
"""Blocks that are written side by side, or are on their way from the device."""

SHARDS = 3
"""Shards that are hashed and flushed side by side while the next one is filled."""


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
    """A context manager; leaving it waits for all shards, or abandons the unfinished ones after an error.

    Attributes:
        agreed, asked: how many probed tokens of greedy text the head chose too, of how many.
    """

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._threads = ThreadPoolExecutor(DEPTH, "draftsmith-rows")
        self._finishers = ThreadPoolExecutor(SHARDS, "draftsmith-shards")
        self._waiting: deque[Future[tuple[int, int]]] = deque()
        self._finishing: deque[Future[None]] = deque()
        self._shard: Future[ShardFile] | None = None
        self._blocks: list[Future[tuple[int, int]]] = []
        self.agreed = self.asked = 0

    def open(self, number: int, lengths: Sequence[int]) -> None:
        """Blocks that follow belong to this shard."""
        self._shard = self._threads.submit(self._writer.shard(number, lengths).open)
        self._blocks = []

    def put(self, pieces: Sequence[Piece], block: Block) -> None:
        """Write a block; waits while DEPTH others are written. Raises what went wrong with an earlier one."""
        assert self._shard is not None
        self._settle(DEPTH - 1)
        future = self._threads.submit(_put, self._shard, pieces, block)
        self._waiting.append(future)
        self._blocks.append(future)

    def close(self) -> None:
        """The open shard has all its blocks; waits while SHARDS others are finished."""
        shard, self._shard = self._shard, None
        assert shard is not None
        while len(self._finishing) >= SHARDS:
            self._finishing.popleft().result()
        self._finishing.append(self._finishers.submit(self._finish, shard, self._blocks))

    def __enter__(self) -> ShardQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._settle(0)
                while self._finishing:
                    self._finishing.popleft().result()
        finally:
            self._threads.shutdown()
            self._finishers.shutdown()
            if self._shard is not None and self._shard.exception() is None:
                self._shard.result().abandon(error or RuntimeError("an error of another thread"))

    def _settle(self, left: int) -> None:
        while len(self._waiting) > left:
            agreed, asked = self._waiting.popleft().result()
            self.agreed += agreed
            self.asked += asked

    def _finish(self, opened: Future[ShardFile], blocks: Sequence[Future[tuple[int, int]]]) -> None:
        shard = opened.result()
        try:
            for block in blocks:
                block.result()
            self._writer.record(shard.close())
        except BaseException as error:
            shard.abandon(error)
            raise


def _put(opened: Future[ShardFile], pieces: Sequence[Piece], block: Block) -> tuple[int, int]:
    """Write a block's rows; how many probed tokens of greedy text the head chose too, and of how many."""
    if block.wait is not None:
        block.wait()
    shard = opened.result()
    row = place = agreed = asked = 0
    for piece in pieces:
        rows = slice(row, row + len(piece.ids))
        head = block.argmax[place : place + len(piece.wanted)]
        row, place = rows.stop, place + len(piece.wanted)
        refuse_faults(piece, {name: faulty[rows] for name, faulty in block.faults.items()})
        if piece.about.greedy:
            agreed += int((head == piece.ids[piece.wanted + 1]).sum())
            asked += len(head)
        shard.put(
            piece.place, piece.about, piece.ids, piece.generated, piece.argmax(head),
            {name: states[rows] for name, states in block.states.items()},
        )  # fmt: skip
    return agreed, asked


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
