"""Rows of the store out of a target's states, wherever those come from: a pass of its trunk here, or an engine.

On a GPU nothing here waits for the device: rows are encoded there and copied on a stream of their own while the next pass
runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.codec import Codec, encode, not_finite

HEAD_ROWS = 512
"""Rows of logits that exist at once."""


@dataclass(frozen=True)
class Task:
    """One forward pass.

    Attributes:
        rows: token ids int32 of each sequence.
        wanted: of each sequence, the rows whose argmax is asked for.
    """

    rows: list[np.ndarray]
    wanted: list[np.ndarray]


@dataclass
class Block:
    """What a pass gave, on the host, the rows of all sequences one behind the other. Read nothing before `wait`.

    Attributes:
        states: uint8 (T, bytes of a row) of each state tensor of the codec.
        argmax: int64 (rows asked for,).
        faults: bool (T,) for `taps` and `final`, rows that are not finite; and for `repeated`, rows whose final state
            equals the row's before.
    """

    states: dict[str, np.ndarray]
    argmax: np.ndarray
    faults: dict[str, np.ndarray]
    wait: Callable[[], None] | None = field(default=None)


class RowSource(ABC):
    """Runs tasks.

    Args:
        codec: of the rows.
        head: final states (n, H) to logits (n, V).
        device: of the states.
    """

    def __init__(self, codec: Codec, head: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.codec, self.head, self.device = codec, head, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @abstractmethod
    def states(self, rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """taps (T, K, H) and final (T, H) on the device, T being the tokens of all rows."""

    @torch.no_grad()
    def run(self, task: Task) -> Block:
        """The rows of a task."""
        taps, final = self.states(task.rows)
        firsts = np.cumsum([0, *map(len, task.rows)])[:-1]
        wanted = np.concatenate([rows + first for rows, first in zip(task.wanted, firsts, strict=True)])
        argmax = self._argmax(final, wanted) if len(wanted) else torch.zeros(0, dtype=torch.long)
        stored = encode(self.codec, taps, final)
        faults = not_finite(self.codec, stored)
        faults["repeated"] = torch.zeros(len(final), dtype=torch.bool, device=final.device)
        rounded = final.bfloat16()
        faults["repeated"][1:] = (rounded[1:] == rounded[:-1]).all(dim=1)
        return self._to_host(stored, argmax, faults)

    def _argmax(self, final: Tensor, rows: np.ndarray) -> Tensor:
        """int64 (n,), a slice of rows at a time; widened first, as a CPU is slow at bf16 argmax."""
        asked = final.index_select(0, self._upload(rows))
        return torch.cat([self.head(part).float().argmax(dim=-1).to(final.device) for part in asked.split(HEAD_ROWS)])

    def _upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self._stream else tensor

    def _to_host(self, stored: dict[str, Tensor], argmax: Tensor, faults: dict[str, Tensor]) -> Block:
        states = {name: rows.contiguous().view(torch.uint8).reshape(len(rows), -1) for name, rows in stored.items()}
        if self._stream is None:
            return Block(
                {name: rows.numpy() for name, rows in states.items()}, argmax.numpy(),
                {name: rows.numpy() for name, rows in faults.items()},
            )  # fmt: skip
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            block = Block(
                {name: self._download(rows) for name, rows in states.items()}, self._download(argmax),
                {name: self._download(rows) for name, rows in faults.items()},
            )  # fmt: skip
            event = torch.cuda.Event()
            event.record(self._stream)
        block.wait = event.synchronize
        return block

    def _download(self, rows: Tensor) -> np.ndarray:
        """A pinned copy that is not there until the stream has come to it."""
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        if rows.is_cuda:
            assert self._stream is not None
            rows.record_stream(self._stream)
        array: np.ndarray = host.numpy()
        return array
