"""Which of the processes that `accelerate launch` started this one is, and what rank 0 tells the others.

The processes of a harvest exchange one small object when a store is opened and nothing afterwards, so that a slow or
dead one holds nobody up; gloo carries it, on GPU machines too. Only where they hold one target together do they exchange
parts of its products all the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

Value = TypeVar("Value")

PATIENCE = timedelta(days=7)
"""How long a process waits for the others to finish the split before."""


@dataclass(frozen=True)
class Rank:
    """This process among `count`, and among the `local_count` of its machine."""

    index: int = 0
    count: int = 1
    local_index: int = 0
    local_count: int = 1

    def lead(self, make: Callable[[], Value]) -> Value:
        """On rank 0: what `make` returns, which `follow` returns on the others; they end if it raises."""
        try:
            value = make()
        except BaseException:
            self._share(None)
            raise
        self._share((value,))
        return value

    def follow(self) -> Any:
        """On the other ranks: what rank 0 made. Ends the process if rank 0 failed: its error says why."""
        shared = self._share(None)
        if shared is None:
            raise SystemExit(2)
        return shared[0]

    def _share(self, value: Any) -> Any:
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        shared = [value]
        broadcast_object_list(shared, from_process=0)
        return shared[0]


def this_rank(*, products: bool = False) -> Rank:
    """This process's rank; without a launcher the only one. With `products` they will exchange those, on GPUs by NCCL."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Rank()
    from accelerate import PartialState

    if products:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            torch.distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=PATIENCE)
    state = PartialState(cpu=True, timeout=PATIENCE)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Rank(state.process_index, state.num_processes, state.local_process_index, local)
